"""Whether the machine and the cgroups have memory for a server's pool.

Slabs are memfds. No mount bounds them, /dev/shm included: what does is the machine's memory
and the memory limit of the cgroup, and a cgroup that is overrun kills.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits.host_memory import CGROUPS, PROC, machine_allowance, tightest_cgroup
from teacher_logits_client.doctor.findings import Finding, Verdict
from teacher_logits_client.units import size_text

if TYPE_CHECKING:
    from teacher_logits.errors import Fact
    from teacher_logits.host_memory import Allowance


def memory_findings(
    pool_size_bytes: int,
    *,
    committed_bytes: int = 0,
    proc: Path = PROC,
    cgroups: Path = CGROUPS,
    shared_mount: Path = Path("/dev/shm"),
) -> list[Finding]:
    """Compare what may still be taken with what a pool still takes.

    ``committed_bytes`` are those that a server has in slabs already.
    """
    pool = _Pool(size_bytes=pool_size_bytes, committed_bytes=committed_bytes)
    machine = machine_allowance(proc=proc)
    cgroup = tightest_cgroup(proc=proc, cgroups=cgroups)
    return [
        _room("memory_available", "free memory is unknown", machine, pool),
        _room("memory_cgroup", "no cgroup limit is seen", cgroup, pool),
        _mount(shared_mount),
    ]


@dataclass(frozen=True, kw_only=True)
class _Pool:
    size_bytes: int
    committed_bytes: int

    @property
    def missing_bytes(self) -> int:
        return max(0, self.size_bytes - self.committed_bytes)

    def __str__(self) -> str:
        size = f"a pool of {size_text(self.size_bytes)}"
        if not self.committed_bytes:
            return size
        return f"{size}, of which the server has {size_text(self.committed_bytes)} already,"


def _room(name: str, unseen: str, limit: Allowance | None, pool: _Pool) -> Finding:
    if limit is None:
        return Finding(name=name, verdict=Verdict.OK, message=f"{unseen} from here")
    facts: dict[str, Fact] = {
        "free_bytes": limit.free_bytes,
        "pool_size_bytes": pool.size_bytes,
        "committed_bytes": pool.committed_bytes,
    }
    have = f"{limit.source} allows {size_text(limit.free_bytes)} more, and {pool}"
    if limit.free_bytes >= pool.missing_bytes:
        message = f"{have} fits"
        return Finding(name=name, verdict=Verdict.OK, message=message, facts=facts)
    return Finding(
        name=name,
        verdict=Verdict.WARN,
        message=f"{have} does not fit: a server here refuses payloads before its pool is full",
        cure="give it more memory, or serve with a smaller --pool-size and --slab-size",
        facts=facts,
    )


def _mount(folder: Path) -> Finding:
    try:
        state = os.statvfs(folder)
    except OSError:
        return Finding(
            name="dev_shm", verdict=Verdict.OK, message=f"there is no {folder}, and none is needed"
        )
    size = state.f_frsize * state.f_blocks
    free = state.f_frsize * state.f_bavail
    return Finding(
        name="dev_shm",
        verdict=Verdict.OK,
        message=f"{folder} has {size_text(size)}, {size_text(free)} of it free, for information "
        "only: slabs are memfds, which it does not bound (data loaders of torch and Ray's object "
        "store do use it)",
        facts={"size_bytes": size, "free_bytes": free},
    )
