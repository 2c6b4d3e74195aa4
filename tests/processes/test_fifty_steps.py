"""Fifty steps through two publishers, a server and four ranks of a student, a process each."""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.processes.grids import await_done, grids
from tests.processes.running import PATIENCE_SECONDS
from tests.reports.raw import connect_raw

import teacher_logits_client as tl

WARM, LAST = 10, 50
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Census:
    """What a process has.

    ``mappings`` are those of something: a slab, a page, a library. Anonymous ones are counted by
    what is in them, since allocators take another one now and then, whenever that may be.

    ``private_bytes`` is its anonymous memory, in RAM or swapped out. Whatever a process alone
    pays for is anonymous: its heap, and every page that it wrote into a private map, an edited
    page of a slab among them. The kernel's ``Private_*`` counts other things beside it, which
    come and go with what the neighbours do: a page of a library or of a slab turns "private"
    when the last other process that had it mapped lets go.
    """

    descriptors: int
    mappings: Counter[str]
    private_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Census":
        """Count."""
        process = Path(f"/proc/{pid}")
        sizes = {}
        for line in (process / "smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split()[:2]
            sizes[name] = int(size) * 1024
        return cls(
            descriptors=len(os.listdir(process / "fd")),
            mappings=Counter(
                line.split(maxsplit=5)[5]
                for line in (process / "maps").read_text().splitlines()
                if line.split()[4] != "0"
            ),
            private_bytes=sizes["Anonymous:"] + sizes["Swap:"],
        )


@pytest.mark.parametrize("transport", ["shared_memory", "stream"])
def test_fifty_steps_come_row_by_row_and_leave_nothing_behind(transport: str) -> None:
    """What is read is compared where it is read: a rank that saw another byte says so."""
    with (
        tl.testing.serve(pool_size="256KiB", slab_size="256KiB") as server,
        grids(server.address, transport) as ranks,
        connect_raw(server.address) as raw,
    ):
        processes = {"server": server.pid, **{rank.name: rank.pid for rank in ranks}}
        found = {}
        for step in (WARM, LAST):
            for rank in ranks:
                rank.tell(step)
            await_done(ranks)
            await_true(lambda: not (seen := raw.inspect()).leases and not seen.steps)
            if step == WARM:
                found = {name: settled(pid) for name, pid in processes.items()}
        for name, before in found.items():
            await_true(partial(is_no_more, processes[name], before))
            growth = Census.of(processes[name]).private_bytes - before.private_bytes
            assert growth < MIB, (name, growth)


def settled(pid: int) -> Census:
    """Count until it comes out the same three times: threads let go in a moment of their own."""
    looks = [Census.of(pid)]

    def is_settled() -> bool:
        looks.append(Census.of(pid))
        counts = [(each.descriptors, each.mappings) for each in looks[-3:]]
        return len(counts) == 3 and counts.count(counts[0]) == 3

    await_true(is_settled)
    return looks[-1]


def is_no_more(pid: int, before: Census) -> bool:
    """Whether a process has nothing open or mapped that it had not before."""
    now = Census.of(pid)
    return now.descriptors <= before.descriptors and not now.mappings - before.mappings


def await_true(look: Callable[[], bool]) -> None:
    """Look again and again until it is so."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not look():
        assert time.monotonic() < until, "the server keeps what all have read"
