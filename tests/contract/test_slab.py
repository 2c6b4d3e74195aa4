"""Host slabs: one writer, sealed against every other, and a control page that readers trust."""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.held import left_behind, open_descriptors

from teacher_logits.errors import SlabOpenError
from teacher_logits.payload import Extent
from teacher_logits.slab import (
    CONTROL_BYTES,
    HEADER_BYTES,
    SLOT_COUNT,
    WriterSlab,
    check_extent,
    is_retired,
    is_sparse,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
SIZE = 8 * PAGE
EXTENT = Extent(slab_id="slab", offset_bytes=PAGE, size_bytes=2 * PAGE, slot=3, generation=2)


@pytest.fixture
def slab() -> Iterator[WriterSlab]:
    slab = WriterSlab("slab", SIZE)
    yield slab
    slab.close()


@pytest.fixture
def reader(slab: WriterSlab) -> Iterator[mmap.mmap]:
    with mmap.mmap(slab.fd, 0, prot=mmap.PROT_READ) as memory:
        yield memory


class TestWriting:
    def test_takes_the_control_page_and_the_room(self, slab: WriterSlab) -> None:
        assert slab.total_bytes == CONTROL_BYTES + SIZE
        assert os.fstat(slab.fd).st_size == slab.total_bytes

    def test_takes_its_memory_at_once(self, slab: WriterSlab) -> None:
        assert os.fstat(slab.fd).st_blocks * 512 >= slab.total_bytes

    def test_shows_in_the_readers_map(self, slab: WriterSlab, reader: mmap.mmap) -> None:
        slab.room(EXTENT)[:] = b"\x07" * EXTENT.size_bytes

        start = CONTROL_BYTES + EXTENT.offset_bytes
        assert reader[start : start + EXTENT.size_bytes] == b"\x07" * EXTENT.size_bytes
        assert reader[start - 1] == 0
        assert reader[start + EXTENT.size_bytes] == 0

    def test_goes_through_a_view_that_is_as_large_as_the_extent(self, slab: WriterSlab) -> None:
        assert len(slab.room(EXTENT)) == EXTENT.size_bytes
        assert not slab.room(EXTENT).readonly


class TestSlots:
    def test_bar_readers_from_the_start(self, slab: WriterSlab) -> None:
        assert {slab.generation(slot) for slot in range(SLOT_COUNT)} == {1}

    def test_fill_the_control_page_and_nothing_else(self, slab: WriterSlab) -> None:
        first = bytes(slab.room(dataclasses.replace(EXTENT, offset_bytes=0)))
        slab.mark(SLOT_COUNT - 1, 2**64 - 1)

        assert HEADER_BYTES + 8 * SLOT_COUNT == CONTROL_BYTES
        assert bytes(slab.room(dataclasses.replace(EXTENT, offset_bytes=0))) == first
        assert slab.generation(SLOT_COUNT - 1) == 2**64 - 1

    @pytest.mark.parametrize("keeps_order", [False, True])
    @pytest.mark.parametrize("way", ["mark", "let_in"])
    def test_are_where_readers_look_for_them(
        self,
        slab: WriterSlab,
        reader: mmap.mmap,
        monkeypatch: pytest.MonkeyPatch,
        way: str,
        keeps_order: bool,
    ) -> None:
        monkeypatch.setattr("teacher_logits.slab._KEEPS_ORDER", keeps_order)
        getattr(slab, way)(3, 0x0102030405060708)

        (seen,) = struct.unpack_from("<Q", reader, HEADER_BYTES + 8 * 3)
        assert seen == 0x0102030405060708

    @pytest.mark.parametrize("slot", [SLOT_COUNT, 2**31])
    def test_that_are_not_there_cannot_be_marked(self, slab: WriterSlab, slot: int) -> None:
        with pytest.raises(IndexError):
            slab.mark(slot, 2)


class TestSealing:
    def test_bars_every_later_writer(self, slab: WriterSlab) -> None:
        with pytest.raises(PermissionError):
            mmap.mmap(slab.fd, 0, flags=mmap.MAP_SHARED)
        with pytest.raises(PermissionError):
            os.pwrite(slab.fd, b"x", CONTROL_BYTES)

    def test_bars_a_writer_that_opens_it_anew(self, slab: WriterSlab) -> None:
        fd = os.open(f"/proc/self/fd/{slab.fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 0, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)

    @pytest.mark.parametrize("size", [0, CONTROL_BYTES, 64 * PAGE * PAGE])
    def test_bars_cutting_and_stretching(self, slab: WriterSlab, size: int) -> None:
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, size)

    def test_lets_readers_have_copies_of_their_own(
        self, slab: WriterSlab, reader: mmap.mmap
    ) -> None:
        with mmap.mmap(slab.fd, 0, flags=mmap.MAP_PRIVATE) as mine:
            mine[CONTROL_BYTES] = 9

            assert mine[CONTROL_BYTES] == 9
            assert reader[CONTROL_BYTES] == 0
            assert slab.room(dataclasses.replace(EXTENT, offset_bytes=0))[0] == 0


class TestTheHeader:
    def test_tells_a_reader_how_much_room_there_is(
        self, slab: WriterSlab, reader: mmap.mmap
    ) -> None:
        assert read_header(reader, slab_id="slab", total_bytes=slab.total_bytes) == SIZE

    def test_must_be_a_slabs(self, slab: WriterSlab) -> None:
        with pytest.raises(SlabOpenError, match="magic"):
            read_header(memoryview(bytes(64)), slab_id="slab", total_bytes=slab.total_bytes)

    @pytest.mark.parametrize(("field", "value"), [(8, 2), (12, 7), (24, 2)])
    def test_must_be_of_this_release(
        self, slab: WriterSlab, reader: mmap.mmap, field: int, value: int
    ) -> None:
        header = bytearray(reader[:HEADER_BYTES])
        struct.pack_into("<I", header, field, value)

        with pytest.raises(SlabOpenError, match="same release"):
            read_header(memoryview(header), slab_id="slab", total_bytes=slab.total_bytes)

    def test_must_agree_with_the_descriptor(self, slab: WriterSlab, reader: mmap.mmap) -> None:
        with pytest.raises(SlabOpenError) as caught:
            read_header(reader, slab_id="slab", total_bytes=slab.total_bytes + 1)

        assert caught.value.facts == {
            "size_bytes": SIZE,
            "total_bytes": slab.total_bytes + 1,
        }


class TestASparseSlab:
    @pytest.fixture
    def slab(self) -> Iterator[WriterSlab]:
        slab = WriterSlab("slab", SIZE, is_sparse=True)
        yield slab
        slab.close()

    def test_takes_its_control_page_alone(self, slab: WriterSlab) -> None:
        assert os.fstat(slab.fd).st_size == slab.total_bytes
        assert os.fstat(slab.fd).st_blocks * 512 == CONTROL_BYTES

    def test_says_so(self, reader: mmap.mmap) -> None:
        assert is_sparse(reader)
        assert read_header(reader, slab_id="slab", total_bytes=CONTROL_BYTES + SIZE) == SIZE

    def test_is_sealed_as_any_other(self, slab: WriterSlab) -> None:
        with pytest.raises(PermissionError):
            mmap.mmap(slab.fd, 0)

    def test_takes_nothing_for_a_hole_that_is_read(self, slab: WriterSlab) -> None:
        before = os.fstat(slab.fd).st_blocks

        assert os.pread(slab.fd, SIZE, CONTROL_BYTES) == bytes(SIZE)
        assert os.fstat(slab.fd).st_blocks == before

    @pytest.mark.parametrize(
        ("offset", "size", "holes"),
        [
            (0, SIZE, SIZE - 2 * PAGE),
            (PAGE, 2 * PAGE, 0),
            (PAGE + 5, 10, 0),
            (0, PAGE + 5, PAGE),
            (3 * PAGE, PAGE, PAGE),
            (PAGE, 0, 0),
            (SIZE - 1, 1, 1),
        ],
    )
    def test_knows_what_of_it_is_not_yet_memory(
        self, slab: WriterSlab, offset: int, size: int, holes: int
    ) -> None:
        slab.room(EXTENT)[:] = b"\x07" * EXTENT.size_bytes

        assert slab.hole_bytes(offset, size) == holes

    def test_is_told_from_a_whole_one(self) -> None:
        whole = WriterSlab("whole", SIZE)
        header = memoryview(os.pread(whole.fd, HEADER_BYTES, 0))

        assert not is_sparse(header)
        assert whole.hole_bytes(0, SIZE) == 0
        whole.close()


class TestClosing:
    def test_tells_readers_that_nothing_more_will_come(
        self, slab: WriterSlab, reader: mmap.mmap
    ) -> None:
        assert not is_retired(reader)

        slab.close()

        assert is_retired(reader)

    def test_tells_nothing_to_readers_of_what_is_still_in_use(
        self, slab: WriterSlab, reader: mmap.mmap
    ) -> None:
        slab.close(in_use=True)

        assert not is_retired(reader)

    def test_leaves_readers_what_they_have_mapped(
        self, slab: WriterSlab, reader: mmap.mmap
    ) -> None:
        slab.room(EXTENT)[0] = 5

        slab.close()

        assert reader[CONTROL_BYTES + EXTENT.offset_bytes] == 5

    def test_leaves_the_writers_own_views_alone(self, slab: WriterSlab) -> None:
        room = slab.room(EXTENT)

        slab.close()
        room[0] = 5

        assert room[0] == 5

    def test_leaves_readers_of_this_process_what_they_have(self, slab: WriterSlab) -> None:
        slab.mark(EXTENT.slot, 2)
        room, slot = slab.opened(EXTENT)
        room[:4] = b"kept"

        slab.close()

        assert (bytes(room[:4]), slot.value) == (b"kept", 2)

    def test_refuses_readers_of_this_process_from_then_on(self, slab: WriterSlab) -> None:
        slab.close()

        with pytest.raises(SlabOpenError, match="slab was closed by its writer"):
            slab.opened(EXTENT)

    def test_twice_is_fine(self, slab: WriterSlab) -> None:
        slab.close()
        slab.close()

        assert slab.fd == -1

    def test_gives_the_descriptor_back(self, slab: WriterSlab) -> None:
        fd = slab.fd
        slab.close()

        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_a_slab_that_cannot_be_made_leaves_no_descriptor(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(fd: int, offset: int, size: int) -> None:
            raise OSError("full")

        monkeypatch.setattr(os, "posix_fallocate", fail)
        before = open_descriptors()

        with pytest.raises(OSError, match="full"):
            WriterSlab("slab", SIZE)

        assert not left_behind(before, open_descriptors)


class TestExtents:
    @given(offset=st.integers(0, SIZE), size=st.integers(0, SIZE))
    def test_that_lie_in_the_slab_pass(self, offset: int, size: int) -> None:
        extent = dataclasses.replace(
            EXTENT, offset_bytes=offset, size_bytes=min(size, SIZE - offset)
        )

        check_extent(extent, size_bytes=SIZE)

    @pytest.mark.parametrize("slot", [0, SLOT_COUNT - 1])
    def test_may_have_any_slot_there_is(self, slot: int) -> None:
        check_extent(dataclasses.replace(EXTENT, slot=slot), size_bytes=SIZE)

    @pytest.mark.parametrize(
        "changes",
        [
            {"offset_bytes": -1},
            {"size_bytes": -1},
            {"offset_bytes": SIZE, "size_bytes": 1},
            {"offset_bytes": 0, "size_bytes": SIZE + 1},
            {"offset_bytes": 2**63, "size_bytes": 2**63},
            {"slot": -1},
            {"slot": SLOT_COUNT},
        ],
    )
    def test_that_do_not_are_refused_with_their_numbers(self, changes: dict[str, int]) -> None:
        extent = dataclasses.replace(EXTENT, **changes)  # type: ignore[arg-type]

        with pytest.raises(SlabOpenError, match="outside slab slab") as caught:
            check_extent(extent, size_bytes=SIZE)

        assert caught.value.facts == {
            "offset_bytes": extent.offset_bytes,
            "size_bytes": extent.size_bytes,
            "slab_bytes": SIZE,
            "slot": extent.slot,
        }
