"""The server's slabs: created as room is asked for, and never beyond what there is."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from teacher_logits.errors import PayloadInvalidError, PoolFullError
from teacher_logits.pool import PAGE_BYTES as PAGE
from teacher_logits.pool import SLOTS_PER_SLAB, Growth, Pool
from teacher_logits.slab import WriterSlab, is_retired
from teacher_logits_server.slabs import ServerSlabs, check_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Extent


class PoolLedger:
    """The room side of a ledger, and nothing else of it."""

    def __init__(self, *, budget_pages: int = 16, slab_pages: int = 8) -> None:
        self.pool = Pool(
            budget_bytes=budget_pages * PAGE,
            slab_size_bytes=slab_pages * PAGE,
            slots_per_slab=SLOTS_PER_SLAB,
        )

    def reserve(self, size_bytes: int) -> Extent | Growth:
        return self.pool.reserve(size_bytes)

    def add_slab(self, slab_id: str, size_bytes: int) -> None:
        self.pool.add_slab(slab_id, size_bytes)

    def take_idle_slabs(self) -> list[str]:
        idle = self.pool.idle_slabs()
        for slab_id in idle:
            self.pool.drop_slab(slab_id)
        return idle


class Memory:
    """A machine with so many pages left; a slab takes some."""

    def __init__(self, pages: int = 1000) -> None:
        self.pages = pages
        self.asked: list[int] = []

    def check(self, need_bytes: int) -> None:
        self.asked.append(need_bytes // PAGE)
        if need_bytes > self.pages * PAGE:
            raise PoolFullError("no memory", facts={"need_bytes": need_bytes})


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def slabs(memory: Memory) -> Iterator[ServerSlabs]:
    slabs = ServerSlabs(epoch="epoch", check_memory=memory.check)
    yield slabs
    slabs.close()


def test_the_first_room_brings_a_slab_of_the_usual_size(slabs: ServerSlabs) -> None:
    extent = slabs.room_for(PoolLedger(), PAGE)

    assert slabs.find(extent.slab_id).size_bytes == 8 * PAGE
    assert extent.slab_id.startswith("slab-epoch-")


def test_room_in_a_slab_that_is_there_brings_none(slabs: ServerSlabs) -> None:
    ledger = PoolLedger()

    first, second = (slabs.room_for(ledger, PAGE) for _ in range(2))

    assert first.slab_id == second.slab_id
    assert first.offset_bytes != second.offset_bytes


def test_a_larger_payload_gets_a_slab_of_its_own_size(slabs: ServerSlabs) -> None:
    extent = slabs.room_for(PoolLedger(), 12 * PAGE)

    assert slabs.find(extent.slab_id).size_bytes == 12 * PAGE


def test_what_is_written_into_room_is_in_the_slab(slabs: ServerSlabs) -> None:
    ledger = PoolLedger()
    slabs.room_for(ledger, PAGE)
    extent = slabs.room_for(ledger, PAGE)

    slabs.room(extent)[:5] = b"hello"

    slab = slabs.find(extent.slab_id)
    start = slab.total_bytes - slab.size_bytes + extent.offset_bytes
    assert os.pread(slab.fd, 5, start) == b"hello"
    assert len(slabs.room(extent)) == PAGE


def test_marks_are_in_the_slabs_control_page(slabs: ServerSlabs) -> None:
    extent = slabs.room_for(PoolLedger(), PAGE)

    slabs.mark(extent, 12)

    assert slabs.find(extent.slab_id).generation(extent.slot) == 12


def test_an_idle_slab_makes_way_for_one_of_another_size(slabs: ServerSlabs) -> None:
    ledger = PoolLedger(budget_pages=16, slab_pages=8)
    small = slabs.room_for(ledger, PAGE)
    ledger.pool.free(small)

    large = slabs.room_for(ledger, 16 * PAGE)

    assert slabs.find(large.slab_id).size_bytes == 16 * PAGE
    with pytest.raises(KeyError):
        slabs.find(small.slab_id)


def test_readers_see_that_a_slab_has_made_way(slabs: ServerSlabs) -> None:
    ledger = PoolLedger(budget_pages=16, slab_pages=8)
    small = slabs.room_for(ledger, PAGE)
    with mmap.mmap(slabs.find(small.slab_id).fd, 0, prot=mmap.PROT_READ) as control:
        assert not is_retired(control)
        ledger.pool.free(small)

        slabs.room_for(ledger, 16 * PAGE)

        assert is_retired(control)


def test_a_slab_in_use_does_not_make_way(slabs: ServerSlabs) -> None:
    ledger = PoolLedger(budget_pages=16, slab_pages=8)
    kept = slabs.room_for(ledger, PAGE)

    with pytest.raises(PoolFullError):
        slabs.room_for(ledger, 16 * PAGE)

    slabs.find(kept.slab_id)


def test_what_can_never_fit_is_refused_before_memory_is_asked_for(
    slabs: ServerSlabs, memory: Memory
) -> None:
    with pytest.raises(PayloadInvalidError, match="never"):
        slabs.room_for(PoolLedger(), 17 * PAGE)

    assert memory.asked == []


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="the system shows no numbers")
def test_a_slab_beyond_the_machine_is_refused_with_the_servers_flags() -> None:
    with pytest.raises(PoolFullError, match=r"--slab-size or --pool-size"):
        check_memory(1 << 59)


def test_memory_is_asked_for_before_a_slab_is_made(slabs: ServerSlabs, memory: Memory) -> None:
    memory.pages = 0

    with pytest.raises(PoolFullError, match="no memory"):
        slabs.room_for(PoolLedger(), PAGE)


def test_a_short_machine_gives_a_slab_of_just_enough(slabs: ServerSlabs, memory: Memory) -> None:
    memory.pages = 3

    extent = slabs.room_for(PoolLedger(), 2 * PAGE + 1)

    assert slabs.find(extent.slab_id).size_bytes == 3 * PAGE
    assert memory.asked == [8, 3]


def test_a_short_machine_gets_its_idle_slabs_back_first(slabs: ServerSlabs, memory: Memory) -> None:
    ledger = PoolLedger(budget_pages=64, slab_pages=8)
    idle = slabs.room_for(ledger, PAGE)
    ledger.pool.free(idle)
    close = slabs._close

    def close_and_free(slab_id: str) -> None:
        close(slab_id)
        memory.pages = 12

    memory.pages = 4
    slabs._close = close_and_free  # type: ignore[method-assign]

    extent = slabs.room_for(ledger, 12 * PAGE)

    assert slabs.find(extent.slab_id).size_bytes == 12 * PAGE


def test_a_system_that_gives_no_slab_is_a_full_pool(
    slabs: ServerSlabs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)

    with pytest.raises(PoolFullError, match="No space left") as caught:
        slabs.room_for(PoolLedger(), PAGE)

    assert caught.value.facts == {"need_bytes": 8 * PAGE, "errno": errno.ENOSPC}


def test_a_slab_that_lost_the_race_for_the_budget_is_closed_and_room_asked_anew(
    slabs: ServerSlabs,
) -> None:
    class Racing(PoolLedger):
        def add_slab(self, slab_id: str, size_bytes: int) -> None:
            if not self.pool.has_slab("rival"):
                self.pool.add_slab("rival", 12 * PAGE)
            super().add_slab(slab_id, size_bytes)

    extent = slabs.room_for(Racing(), PAGE)

    assert extent.slab_id == "rival"
    with pytest.raises(KeyError):
        slabs.find("slab-epoch-1")


def test_no_slab_is_left_after_closing(memory: Memory) -> None:
    slabs = ServerSlabs(epoch="epoch", check_memory=memory.check)
    extent = slabs.room_for(PoolLedger(), PAGE)
    slab = slabs.find(extent.slab_id)

    slabs.close()
    slabs.close()

    assert slab.fd == -1
    with pytest.raises(KeyError):
        slabs.find(extent.slab_id)


def test_a_mark_that_comes_after_the_end_is_nothing(memory: Memory) -> None:
    slabs = ServerSlabs(epoch="epoch", check_memory=memory.check)
    extent = slabs.room_for(PoolLedger(), PAGE)
    slabs.close()

    slabs.mark(extent, 3)


def test_memory_that_somebody_views_outlives_its_slab(memory: Memory) -> None:
    slabs = ServerSlabs(epoch="epoch", check_memory=memory.check)
    room = slabs.room(slabs.room_for(PoolLedger(), PAGE))
    room[0] = 7

    slabs.close()

    assert room[0] == 7


def test_the_pool_knows_how_many_slots_a_slab_has() -> None:
    slab = WriterSlab("s", PAGE)
    try:
        slab.mark(SLOTS_PER_SLAB - 1, 4)
        assert slab.generation(SLOTS_PER_SLAB - 1) == 4
        with pytest.raises(IndexError):
            slab.mark(SLOTS_PER_SLAB, 4)
    finally:
        slab.close()
