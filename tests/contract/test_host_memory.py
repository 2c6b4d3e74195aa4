"""Memory is asked for before it is taken: the machine's, and every cgroup's above us."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from teacher_logits.errors import PoolFullError
from teacher_logits.host_memory import (
    HEADROOM_BYTES,
    Allowance,
    cgroup_allowances,
    check_memory,
    machine_allowance,
    tightest_cgroup,
)

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


class Machine:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def available(self, size_bytes: int) -> None:
        text = f"MemTotal:  999 kB\nMemFree:  1 kB\nMemAvailable:   {size_bytes // 1024} kB\n"
        self.write(self.proc / "meminfo", text)

    def groups(self, text: str) -> None:
        self.write(self.proc / "self" / "cgroup", text)

    def v2(self, group: str, limit: str, current: int, inactive_file: int = 0) -> None:
        folder = self.cgroups / group
        self.write(folder / "memory.max", f"{limit}\n")
        self.write(folder / "memory.current", f"{current}\n")
        self.write(folder / "memory.stat", f"anon 7\ninactive_file {inactive_file}\n")

    def v1(self, group: str, limit: int, usage: int, inactive_file: int = 0) -> None:
        folder = self.cgroups / "memory" / group
        self.write(folder / "memory.limit_in_bytes", f"{limit}\n")
        self.write(folder / "memory.usage_in_bytes", f"{usage}\n")
        self.write(
            folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\n"
        )

    def allowances(self) -> list[Allowance]:
        return list(cgroup_allowances(proc=self.proc, cgroups=self.cgroups))

    def check(self, need_bytes: int) -> None:
        check_memory(need_bytes, way_out="or buy more", proc=self.proc, cgroups=self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_machine_allows_what_is_available(machine: Machine) -> None:
    machine.available(500 * MIB)

    allowance = machine_allowance(proc=machine.proc)

    assert allowance == Allowance(source="MemAvailable", free_bytes=500 * MIB)


def test_cgroup_v2_allows_what_is_left_of_its_limit(machine: Machine) -> None:
    machine.groups("0::/pod/server\n")
    machine.v2("pod/server", str(100 * MIB), 30 * MIB)

    (allowance,) = machine.allowances()

    assert allowance == Allowance(source="memory.max of cgroup /pod/server", free_bytes=70 * MIB)


def test_page_cache_that_can_be_dropped_is_no_use(machine: Machine) -> None:
    machine.groups("0::/pod\n")
    machine.v2("pod", str(100 * MIB), 90 * MIB, inactive_file=60 * MIB)

    assert machine.allowances()[0].free_bytes == 70 * MIB


def test_a_limit_above_binds_those_below(machine: Machine) -> None:
    machine.groups("0::/pod/server\n")
    machine.v2("pod/server", "max", 10 * MIB)
    machine.v2("pod", str(50 * MIB), 20 * MIB)

    (allowance,) = machine.allowances()

    assert allowance == Allowance(source="memory.max of cgroup /pod", free_bytes=30 * MIB)


def test_a_group_above_its_limit_allows_nothing(machine: Machine) -> None:
    machine.groups("0::/pod\n")
    machine.v2("pod", str(10 * MIB), 12 * MIB)

    assert machine.allowances()[0].free_bytes == 0


def test_a_container_that_sees_its_own_group_as_the_root_is_found(machine: Machine) -> None:
    machine.groups("0::/kubepods/burstable/pod1\n")
    machine.v2("", str(80 * MIB), 20 * MIB)

    (allowance,) = machine.allowances()

    assert allowance == Allowance(source="memory.max of cgroup /", free_bytes=60 * MIB)


def test_cgroup_v1_counts_the_whole_subtrees_cache(machine: Machine) -> None:
    machine.groups("5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n")
    machine.v1("docker/1", 100 * MIB, 90 * MIB, inactive_file=40 * MIB)

    (allowance,) = machine.allowances()

    assert allowance == Allowance(
        source="memory.limit_in_bytes of cgroup /docker/1", free_bytes=50 * MIB
    )


def test_cgroup_v1_without_a_limit_writes_a_huge_number_that_is_none(machine: Machine) -> None:
    machine.groups("4:memory:/docker/1\n")
    machine.v1("docker/1", 9223372036854771712, 90 * MIB)

    assert machine.allowances() == []


def test_a_version_2_hierarchy_beside_version_1_is_found(machine: Machine) -> None:
    machine.groups("4:memory:/docker/1\n0::/pod\n")
    machine.v1("docker/1", 100 * MIB, 0)
    machine.v2("unified/pod", str(30 * MIB), 0)

    assert tightest_cgroup(proc=machine.proc, cgroups=machine.cgroups) == Allowance(
        source="memory.max of cgroup /pod", free_bytes=30 * MIB
    )


def test_another_controllers_group_is_not_memorys(machine: Machine) -> None:
    machine.groups("5:cpu:/docker/1\n")
    machine.v1("docker/1", 100 * MIB, 0)

    assert machine.allowances() == []


def test_the_tightest_limit_refuses_with_its_name_and_numbers(machine: Machine) -> None:
    machine.available(500 * MIB)
    machine.groups("0::/pod\n")
    machine.v2("pod", str(100 * MIB), 0)
    machine.check(100 * MIB - HEADROOM_BYTES)

    with pytest.raises(PoolFullError, match=r"memory.max of cgroup /pod.*buy more") as caught:
        machine.check(100 * MIB - HEADROOM_BYTES + 1)

    assert caught.value.facts == {
        "need_bytes": 100 * MIB - HEADROOM_BYTES + 1,
        "free_bytes": 100 * MIB,
        "headroom_bytes": HEADROOM_BYTES,
        "limit": "memory.max of cgroup /pod",
    }


def test_what_cannot_be_read_limits_nothing(machine: Machine) -> None:
    machine.check(1 << 60)
    assert machine_allowance(proc=machine.proc) is None
    assert tightest_cgroup(proc=machine.proc, cgroups=machine.cgroups) is None
    machine.groups("no colons here\n0::/pod\n")
    machine.v2("pod", "soon", 0)

    machine.check(1 << 60)


def test_a_limit_without_a_breakdown_counts_all_that_is_used(machine: Machine) -> None:
    machine.groups("0::/pod\n")
    machine.v2("pod", str(100 * MIB), 90 * MIB)
    (machine.cgroups / "pod" / "memory.stat").unlink()

    assert machine.allowances()[0].free_bytes == 10 * MIB


def test_this_machine_has_a_page_to_spare() -> None:
    check_memory(4096, way_out="or buy more")
