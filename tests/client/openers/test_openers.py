"""Openers: the bytes of a lease, over real slabs and real (and really broken) streams."""

import ctypes
import gc
import mmap
import os
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.held import left_behind, open_descriptors
from tests.some_payload import some_payload

from teacher_logits.errors import (
    ChecksumError,
    DeadlinePassedError,
    LeaseLostError,
    NotAllowedError,
    PoolFullError,
    SlabOpenError,
    StalePayloadError,
    StreamBrokenError,
    TransportFailure,
)
from teacher_logits.inprocess import Resident
from teacher_logits.layout import ColumnKind, ElementType, lay_out
from teacher_logits.payload import MAX_SIZE_BYTES, Extent, Payload
from teacher_logits.slab import CONTROL_BYTES, WriterSlab
from teacher_logits.terms import LeaseTerms
from teacher_logits.transport import Locality, Transport
from teacher_logits.v1 import bulk_service_pb2
from teacher_logits_client.calls.channels import MAX_RECONNECT_SECONDS
from teacher_logits_client.config import MapMode
from teacher_logits_client.fallback import (
    MAX_STREAM_TRIES,
    Choice,
    next_transport,
    pause_before_resuming,
)
from teacher_logits_client.line import PassedSlab
from teacher_logits_client.openers import maps, page_map, pages
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.local import LocalOpener
from teacher_logits_client.openers.own import OwnPayload
from teacher_logits_client.openers.shared_memory import SharedMemoryOpener
from teacher_logits_client.openers.stream import StreamOpener, parse_chunk

PAGE = mmap.PAGESIZE
NEVER = float("inf")


def a_payload(size_bytes: int) -> Payload:
    columns, size = lay_out([(ColumnKind.ROW_STATUS, ElementType.UINT8, (size_bytes,))])
    return some_payload(
        row_count=size_bytes,
        position_count=0,
        top_k=0,
        vocabulary_size=8,
        columns=columns,
        size_bytes=size,
    )


def passed(descriptor: int) -> PassedSlab:
    return PassedSlab(descriptor, 0, None)


class Writer:
    """One slab and what its writer does with it."""

    def __init__(self, pages: int = 16, name: str = "slab") -> None:
        self.slab = WriterSlab(name, pages * PAGE)
        self.opened = 0

    def lease(self, text: bytes, *, page: int = 0, generation: int = 2) -> LeaseTerms:
        """Write a payload of whole pages into the slab, and lease it."""
        payload = a_payload(len(text))
        extent = Extent(
            slab_id="slab",
            offset_bytes=page * PAGE,
            size_bytes=-(-payload.size_bytes // PAGE) * PAGE,
            slot=page,
            generation=generation,
        )
        self.slab.mark(page, generation - 1)
        self.slab.room(extent)[: len(text)] = text
        self.slab.mark(page, generation)
        return LeaseTerms(
            lease_id=f"l-{page}-{generation}", payload=payload, writer_id="server", extent=extent
        )

    def pass_slab(self, slab_id: str, timeout: float) -> PassedSlab:
        self.opened += 1
        return passed(os.dup(self.slab.fd))


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.slab.close()


@pytest.fixture
def opener(writer: Writer) -> SharedMemoryOpener:
    return SharedMemoryOpener(writer.pass_slab)


class TestSharedMemory:
    def test_shows_what_the_writer_wrote(self, writer: Writer, opener: SharedMemoryOpener) -> None:
        opened = opener.open(writer.lease(b"abc" * 3000, page=2), until=NEVER)

        assert bytes(opened.buffer[:9000]) == b"abc" * 3000
        assert not opened.copied

    def test_maps_a_slab_once_whatever_comes_in_it(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        for page in range(5):
            opener.open(writer.lease(b"x", page=page), until=NEVER)

        assert writer.opened == 1

    def test_shows_the_next_payload_in_the_same_room_although_the_last_was_written_into(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        first = opener.open(writer.lease(b"a" * 3 * PAGE), until=NEVER)
        tensor = torch.frombuffer(first.buffer, dtype=torch.uint8)
        tensor.add_(1)
        assert writer.slab.room(writer.lease(b"a" * 3 * PAGE).extent)[0] == ord("a")  # type: ignore[arg-type]
        del tensor

        assert first.vacate() == 3 * PAGE
        second = opener.open(writer.lease(b"z" * 3 * PAGE, generation=4), until=NEVER)
        assert bytes(second.buffer[: 3 * PAGE]) == b"z" * 3 * PAGE

    def test_drops_the_dirtied_pages_of_its_own_extent_alone(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        first = opener.open(writer.lease(b"a" * PAGE, page=0), until=NEVER)
        other = opener.open(writer.lease(b"b" * PAGE, page=1), until=NEVER)
        first.buffer[0] = other.buffer[0] = ord("!")

        first.vacate()

        assert other.buffer[0] == ord("!")

    def test_keeps_the_edits_of_another_lease_on_the_same_extent(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        lease = writer.lease(b"a" * PAGE)
        first, second = opener.open(lease, until=NEVER), opener.open(lease, until=NEVER)
        second.buffer[0] = ord("!")

        assert first.vacate() == 0
        assert second.buffer[0] == ord("!")
        assert second.vacate() == PAGE

    def test_a_second_lease_does_not_see_what_was_written_under_the_first(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        writer.lease(b"?" * PAGE, page=0)
        lease = writer.lease(b"a" * 2 * PAGE, page=1)
        first = opener.open(lease, until=NEVER)
        first.buffer[:] = b"!" * 2 * PAGE

        second, third = opener.open(lease, until=NEVER), opener.open(lease, until=NEVER)
        assert bytes(second.buffer) == bytes(third.buffer) == b"a" * 2 * PAGE
        second.buffer[0] = ord("2")

        assert (first.buffer[0], second.buffer[0], third.buffer[0]) == tuple(b"!2a")
        assert [each.vacate() for each in (third, second, first)] == [0, PAGE, 2 * PAGE]

    def test_a_map_of_its_own_has_the_exit_check_too(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        lease = writer.lease(b"a")
        _first, second = opener.open(lease, until=NEVER), opener.open(lease, until=NEVER)
        assert second.is_current()

        writer.slab.mark(0, 3)

        assert not second.is_current()

    def test_only_a_lease_beside_another_is_mapped_anew(self) -> None:
        writer = Writer(name="to-be-counted")
        opener, lease = SharedMemoryOpener(writer.pass_slab), writer.lease(b"a")

        def maps() -> int:
            return Path("/proc/self/maps").read_text().count("to-be-counted")

        opener.open(lease, until=NEVER).vacate()
        first = opener.open(lease, until=NEVER)
        alone = maps()
        second = opener.open(lease, until=NEVER)
        assert maps() == alone + 1
        second.vacate()
        del second
        assert maps() == alone
        first.vacate()
        writer.slab.close()

    def test_leases_of_memory_that_cannot_be_written_to_share_the_map(self) -> None:
        writer = Writer(name="to-be-read")
        opener = SharedMemoryOpener(writer.pass_slab, mode=MapMode.READ_ONLY)
        lease = writer.lease(b"a")
        first = opener.open(lease, until=NEVER)
        before = Path("/proc/self/maps").read_text().count("to-be-read")

        second = opener.open(lease, until=NEVER)

        assert Path("/proc/self/maps").read_text().count("to-be-read") == before
        assert bytes(first.buffer) == bytes(second.buffer)
        writer.slab.close()

    def test_what_could_not_be_dropped_is_not_shown_to_the_next_lease(
        self, writer: Writer, opener: SharedMemoryOpener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease = writer.lease(b"a" * PAGE)
        first = opener.open(lease, until=NEVER)
        first.buffer[0] = ord("!")

        def refuse(address: int, size_bytes: int) -> int:
            raise OSError("madvise")

        monkeypatch.setattr(maps, "drop_dirtied", refuse)
        with pytest.raises(OSError, match="madvise"):
            first.vacate()

        assert opener.open(lease, until=NEVER).buffer[0] == ord("a")

    def test_a_payload_that_was_only_read_costs_no_pages(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        opened = opener.open(writer.lease(b"a" * 5 * PAGE), until=NEVER)
        assert bytes(opened.buffer).count(b"a") == 5 * PAGE

        assert opened.vacate() == 0

    def test_refuses_room_that_was_reused_before_it_was_opened(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        lease = writer.lease(b"a", generation=2)
        writer.lease(b"b", generation=4)

        with pytest.raises(StalePayloadError, match=r"generation 4.*generation 2") as caught:
            opener.open(lease, until=NEVER)
        assert caught.value.facts["found_generation"] == 4

    def test_the_exit_check_sees_that_room_was_reused(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        opened = opener.open(writer.lease(b"a"), until=NEVER)
        assert opened.is_current()

        writer.slab.mark(0, 3)

        assert not opened.is_current()

    def test_a_write_into_the_payload_cannot_hide_that_room_was_reused(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        opened = opener.open(writer.lease(b"a" * PAGE), until=NEVER)
        opened.buffer[:] = bytes(len(opened.buffer))
        writer.slab.mark(0, 3)

        assert not opened.is_current()

    @pytest.mark.parametrize(
        ("offset", "size", "slot"),
        [
            (16 * PAGE, PAGE, 0),
            (0, 17 * PAGE, 0),
            ((1 << 63) - 1, PAGE, 0),
            (-PAGE, PAGE, 0),
            (0, PAGE, 1 << 20),
            (0, PAGE, -1),
        ],
    )
    def test_refuses_an_extent_outside_its_slab(
        self, writer: Writer, opener: SharedMemoryOpener, offset: int, size: int, slot: int
    ) -> None:
        lease = LeaseTerms(
            lease_id="l",
            payload=a_payload(1),
            writer_id="server",
            extent=Extent(
                slab_id="slab", offset_bytes=offset, size_bytes=size, slot=slot, generation=2
            ),
        )

        with pytest.raises(SlabOpenError, match="outside slab"):
            opener.open(lease, until=NEVER)

    def test_refuses_a_payload_larger_than_its_extent(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        lease = writer.lease(b"a")
        large = LeaseTerms(
            lease_id="l", payload=a_payload(2 * PAGE), writer_id="server", extent=lease.extent
        )

        with pytest.raises(SlabOpenError, match=r"8192 bytes, and its extent 4096"):
            opener.open(large, until=NEVER)

    def test_refuses_a_descriptor_that_is_no_slab(self, writer: Writer, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.write_bytes(b"x" * CONTROL_BYTES)
        opener = SharedMemoryOpener(lambda slab_id, timeout: passed(os.open(other, os.O_RDONLY)))

        with pytest.raises(SlabOpenError):
            opener.open(writer.lease(b"a"), until=NEVER)

    def test_refuses_a_slab_that_its_writer_could_shrink(self, writer: Writer) -> None:
        def unsealed(slab_id: str, timeout: float) -> PassedSlab:
            fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
            os.truncate(fd, CONTROL_BYTES + PAGE)
            return passed(fd)

        with pytest.raises(SlabOpenError, match="not sealed against shrinking"):
            SharedMemoryOpener(unsealed).open(writer.lease(b"a"), until=NEVER)

    def test_keeps_no_descriptor_of_a_slab_that_it_refused(self, writer: Writer) -> None:
        def unsealed(slab_id: str, timeout: float) -> PassedSlab:
            return passed(os.memfd_create("unsealed"))

        lease = writer.lease(b"a")
        gc.collect()  # what other tests left goes now, and not in between
        before = open_descriptors()
        with pytest.raises(SlabOpenError):
            SharedMemoryOpener(unsealed).open(lease, until=NEVER)

        assert not left_behind(before, open_descriptors)

    def test_unmaps_a_retired_slab_with_the_last_lease_on_it(self) -> None:
        writer = Writer(name="to-be-retired")
        opener = SharedMemoryOpener(writer.pass_slab)
        first = opener.open(writer.lease(b"a", page=0), until=NEVER)
        last = opener.open(writer.lease(b"b", page=1), until=NEVER)
        writer.slab.close()
        first.vacate()
        assert opener.slab_count == 1

        last.vacate()

        assert opener.slab_count == 0
        assert bytes(last.buffer[:1]) == b"b"  # a view keeps the mapping
        assert "to-be-retired" in Path("/proc/self/maps").read_text()
        del first, last
        assert "to-be-retired" not in Path("/proc/self/maps").read_text()

    def test_unmaps_a_slab_that_is_gone_with_the_last_lease_on_it(self, writer: Writer) -> None:
        opener = SharedMemoryOpener(writer.pass_slab)
        opened = opener.open(writer.lease(b"a"), until=NEVER)
        slab_id = writer.slab.slab_id
        opener.forget([slab_id, "never-mapped"])
        assert opener.slab_count == 1
        again = opener.open(writer.lease(b"b", page=1), until=NEVER)
        opened.vacate()
        assert opener.slab_count == 1

        again.vacate()

        assert opener.slab_count == 0
        opener.open(writer.lease(b"c"), until=NEVER).vacate()
        assert opener.slab_count == 1
        opener.forget([slab_id])
        assert opener.slab_count == 0

    def test_a_slab_in_use_stays_mapped_between_leases(
        self, writer: Writer, opener: SharedMemoryOpener
    ) -> None:
        opener.open(writer.lease(b"a"), until=NEVER).vacate()

        assert opener.slab_count == 1

    def test_a_read_only_map_can_not_be_written_to(self, writer: Writer) -> None:
        opener = SharedMemoryOpener(writer.pass_slab, mode=MapMode.READ_ONLY)
        opened = opener.open(writer.lease(b"a"), until=NEVER)

        assert opened.buffer.readonly
        assert opened.vacate() == 0


class SlowBroker:
    """Passes slabs when the test lets it, and counts who asks."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def __call__(self, slab_id: str, timeout: float) -> PassedSlab:
        self.asked.put(slab_id)
        error = self.answers.get(timeout=30)
        if error is not None:
            raise error
        return self.writer.pass_slab(slab_id, timeout)


class TestManyThreads:
    """Opening the first payloads of a session at the same time."""

    def test_a_slab_is_asked_for_by_one_of_them(self, writer: Writer) -> None:
        broker = SlowBroker(writer)
        opener, lease = SharedMemoryOpener(broker), writer.lease(b"abc")
        with ThreadPoolExecutor(6) as threads:
            calls = [threads.submit(opener.open, lease, until=NEVER) for _ in range(6)]
            assert broker.asked.get(timeout=30) == "slab"
            for _ in calls:
                broker.answers.put(None)
            opened = [call.result(30) for call in calls]

        assert [bytes(each.buffer[:3]) for each in opened] == [b"abc"] * 6
        assert (writer.opened, broker.asked.qsize()) == (1, 0)

    def test_another_tries_when_the_one_that_asks_fails(self, writer: Writer) -> None:
        broker = SlowBroker(writer)
        opener, lease = SharedMemoryOpener(broker), writer.lease(b"abc")
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(opener.open, lease, until=NEVER)
            broker.asked.get(timeout=30)
            second = threads.submit(opener.open, lease, until=time.monotonic() + 30)
            broker.answers.put(DeadlinePassedError("late"))
            with pytest.raises(DeadlinePassedError, match="late"):
                first.result(30)
            broker.answers.put(None)

            assert bytes(second.result(30).buffer[:3]) == b"abc"

    def test_who_waits_for_another_waits_no_longer_than_its_own_deadline(
        self, writer: Writer
    ) -> None:
        broker = SlowBroker(writer)
        opener, lease = SharedMemoryOpener(broker), writer.lease(b"abc")
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(opener.open, lease, until=NEVER)
            broker.asked.get(timeout=30)

            with pytest.raises(DeadlinePassedError, match="slab slab, which another thread"):
                opener.open(lease, until=time.monotonic() + 0.01)
            assert not first.done()
            broker.answers.put(None)
            first.result(30)

    def test_a_slab_that_does_not_come_holds_up_no_other(self, writer: Writer) -> None:
        other = Writer(name="other")
        broker = SlowBroker(writer)
        there = other.lease(b"xyz")
        assert there.extent is not None
        there = replace(there, extent=replace(there.extent, slab_id="other"))

        def get_slab(slab_id: str, timeout: float) -> PassedSlab:
            return (
                broker(slab_id, timeout) if slab_id == "slab" else other.pass_slab(slab_id, timeout)
            )

        opener = SharedMemoryOpener(get_slab)
        with ThreadPoolExecutor(1) as threads:
            stuck = threads.submit(opener.open, writer.lease(b"abc"), until=NEVER)
            broker.asked.get(timeout=30)

            assert bytes(opener.open(there, until=NEVER).buffer[:3]) == b"xyz"
            assert not stuck.done()
            broker.answers.put(None)
            stuck.result(30)
        other.slab.close()


class TestDirtiedPages:
    """A private map over a file of known bytes; a kernel that finds them, and one that cannot."""

    @pytest.fixture(autouse=True, scope="class", params=["scanned", "read"])
    @classmethod
    def kernel(cls, request: pytest.FixtureRequest) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "read":
                patch.setattr(page_map, "_SCAN", 0)  # a call that no kernel knows
            else:
                patch.setattr(page_map, "_read", lambda *_: pytest.skip("Linux before 6.7"))
            yield

    @given(dirtied=st.sets(st.integers(0, 39)))
    def test_exactly_the_dirtied_pages_are_dropped(self, dirtied: set[int]) -> None:
        writer = Writer(pages=40)
        writer.lease(bytes(40 * PAGE))
        opened = SharedMemoryOpener(writer.pass_slab).open(
            writer.lease(b"a" * 40 * PAGE), until=NEVER
        )
        for page in dirtied:
            opened.buffer[page * PAGE + 7] = ord("!")

        assert opened.vacate() == len(dirtied) * PAGE
        assert bytes(opened.buffer) == b"a" * 40 * PAGE
        writer.slab.close()

    def test_many_scattered_pages_are_all_dropped(self) -> None:
        writer = Writer(pages=2000)
        opened = SharedMemoryOpener(writer.pass_slab).open(
            writer.lease(b"a" * 2000 * PAGE), until=NEVER
        )
        for page in range(0, 2000, 3):
            opened.buffer[page * PAGE] = ord("!")

        opened.vacate()

        assert bytes(opened.buffer) == b"a" * 2000 * PAGE
        writer.slab.close()

    def test_what_is_found_of_too_many_runs_ends_where_the_range_ends(self) -> None:
        writer = Writer(pages=1200)
        writer.lease(bytes(1200 * PAGE))
        room = SharedMemoryOpener(writer.pass_slab).open(
            writer.lease(b"a" * 1200 * PAGE), until=NEVER
        )
        for page in range(1, 1200, 2):
            room.buffer[page * PAGE] = ord("!")
        address = ctypes.addressof(ctypes.c_char.from_buffer(room.buffer))

        runs = page_map.own_pages(address, 1199 * PAGE)

        assert len(runs) <= page_map.MOST_RUNS
        assert runs[0][0] == address + PAGE
        assert sum(runs[-1]) <= address + 1199 * PAGE
        assert all(size > 0 for _, size in runs)


class TestPages:
    def test_without_a_page_map_all_pages_are_dropped(
        self, writer: Writer, opener: SharedMemoryOpener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page_map, "PAGE_MAP", "/nowhere")
        opened = opener.open(writer.lease(b"a" * 2 * PAGE), until=NEVER)
        opened.buffer[PAGE] = ord("!")

        assert opened.vacate() == 2 * PAGE
        assert opened.buffer[PAGE] == ord("a")

    def test_what_the_kernel_refuses_is_an_error(self) -> None:
        with pytest.raises(OSError, match="madvise"):
            pages.drop_dirtied(1 << 60, PAGE)


class TestLocal:
    def test_gives_the_writers_own_memory(self, writer: Writer) -> None:
        lease = writer.lease(b"abc")
        opener = LocalOpener(Resident(find_slab={"slab": writer.slab}.__getitem__))

        opened = opener.open(lease, until=NEVER)
        assert lease.extent is not None
        writer.slab.room(lease.extent)[0] = ord("!")

        assert bytes(opened.buffer[:3]) == b"!bc"

    def test_refuses_room_that_was_reused(self, writer: Writer) -> None:
        opener = LocalOpener(Resident(find_slab={"slab": writer.slab}.__getitem__))
        lease = writer.lease(b"abc")
        opened = opener.open(lease, until=NEVER)
        writer.slab.mark(0, 3)

        assert not opened.is_current()
        with pytest.raises(StalePayloadError):
            opener.open(lease, until=NEVER)

    def test_a_slab_that_is_gone_is_a_transport_failure(self, writer: Writer) -> None:
        none: dict[str, WriterSlab] = {}
        opener = LocalOpener(Resident(find_slab=none.__getitem__))

        with pytest.raises(SlabOpenError, match="no slab slab"):
            opener.open(writer.lease(b"abc"), until=NEVER)

    def test_what_is_leased_stays_good_when_the_server_stops(self, writer: Writer) -> None:
        opener = LocalOpener(Resident(find_slab={"slab": writer.slab}.__getitem__))
        opened = opener.open(writer.lease(b"abc"), until=NEVER)

        writer.slab.close()

        assert opened.is_current()
        assert bytes(opened.buffer[:3]) == b"abc"


class Streams:
    """A server of one payload: each stream is cut short, or spoilt, as the test tells it."""

    def __init__(self, data: bytes, chunk: int = 1000) -> None:
        self.data = data
        self.chunk = chunk
        self.faults: list[Exception | int | None] = []
        self.offsets: list[int] = []

    def __call__(self, lease_id: str, offset: int, timeout: float) -> Iterator[bytes]:
        self.offsets.append(offset)
        fault = self.faults.pop(0) if self.faults else None
        for start in range(offset, len(self.data), self.chunk):
            data = self.data[start : start + self.chunk]
            if isinstance(fault, Exception) and start > offset:
                raise fault
            checksum = crc32c.crc32c(data) ^ (1 if fault == start else 0)
            yield bulk_service_pb2.ReadPayloadResponse(
                offset_bytes=start, crc32c=checksum, data=data
            ).SerializeToString()


def a_stream(
    streams: Streams, pool: BufferPool | None = None, pauses: list[float] | None = None
) -> tuple[StreamOpener, LeaseTerms]:
    waited = [] if pauses is None else pauses
    opener = StreamOpener(
        streams, pool=pool or BufferPool(), count=lambda size: None, pause=waited.append
    )
    payload = a_payload(len(streams.data))
    streams.data = streams.data.ljust(payload.size_bytes, b"\0")
    lease = LeaseTerms(lease_id="l-1", payload=payload, writer_id="server", extent=None)
    return opener, lease


DATA = bytes(range(256)) * 20


class TestStream:
    def test_brings_all_bytes(self) -> None:
        opener, lease = a_stream(Streams(DATA))

        opened = opener.open(lease, until=NEVER)

        assert bytes(opened.buffer) == DATA
        assert opened.copied

    def test_counts_what_came(self) -> None:
        sizes: list[int] = []
        streams = Streams(DATA)
        _, lease = a_stream(streams)
        StreamOpener(streams, pool=BufferPool(), count=sizes.append).open(lease, until=NEVER)

        assert sum(sizes) == len(DATA)

    def test_resumes_a_broken_stream_at_the_byte_it_broke_at(self) -> None:
        streams = Streams(DATA)
        streams.faults = [StreamBrokenError("reset"), StreamBrokenError("reset")]
        opener, lease = a_stream(streams)

        assert bytes(opener.open(lease, until=NEVER).buffer) == DATA
        assert streams.offsets == [0, 1000, 2000]

    def test_takes_bytes_that_changed_on_the_way_once_more(self) -> None:
        streams = Streams(DATA)
        streams.faults = [2000]
        opener, lease = a_stream(streams)

        assert bytes(opener.open(lease, until=NEVER).buffer) == DATA
        assert streams.offsets == [0, 2000]

    def test_gives_up_when_the_same_bytes_change_every_time(self) -> None:
        streams = Streams(DATA)
        streams.faults = [2000] * 20
        opener, lease = a_stream(streams)

        with pytest.raises(ChecksumError, match="1000 bytes from byte 2000"):
            opener.open(lease, until=NEVER)
        assert len(streams.offsets) == 1 + MAX_STREAM_TRIES

    def test_a_stream_that_ends_early_is_resumed(self) -> None:
        streams = Streams(DATA)
        opener, lease = a_stream(streams)
        whole, streams.data = streams.data, streams.data[:3000]

        def lengthen(seconds: float) -> None:
            streams.data = whole

        opener._pause = lengthen
        assert bytes(opener.open(lease, until=NEVER).buffer) == DATA
        assert streams.offsets == [0, 3000]

    def test_what_the_server_refuses_is_not_tried_again(self) -> None:
        streams = Streams(DATA)
        streams.faults = [LeaseLostError("over")]
        opener, lease = a_stream(streams)

        with pytest.raises(LeaseLostError):
            opener.open(lease, until=NEVER)
        assert streams.offsets == [0]

    def test_pauses_longer_and_longer_between_streams_that_bring_nothing(self) -> None:
        pauses: list[float] = []
        streams = Streams(DATA)
        opener, lease = a_stream(streams, pauses=pauses)
        streams.data = b""

        with pytest.raises(StreamBrokenError, match="ended at byte 0 of 5120"):
            opener.open(lease, until=NEVER)
        assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8]

    def test_does_not_resume_past_the_deadline(self) -> None:
        streams = Streams(DATA)
        streams.faults = [StreamBrokenError("reset")]
        opener, lease = a_stream(streams)

        with pytest.raises(DeadlinePassedError, match=r"byte 1000 of 5120 .* reset"):
            opener.open(lease, until=0.0)

    @pytest.mark.parametrize("wrong", [500, 1001, 999_999])
    def test_refuses_bytes_that_are_not_next(self, wrong: int) -> None:
        def read(lease_id: str, offset: int, timeout: float) -> Iterator[bytes]:
            yield bulk_service_pb2.ReadPayloadResponse(
                offset_bytes=offset + wrong, crc32c=crc32c.crc32c(b"abc"), data=b"abc"
            ).SerializeToString()

        _, lease = a_stream(Streams(DATA))
        opener = StreamOpener(read, pool=BufferPool(), count=lambda n: None, pause=lambda s: None)

        with pytest.raises(StreamBrokenError, match="where byte 0 of 5120 was next"):
            opener.open(lease, until=NEVER)

    def test_refuses_more_bytes_than_the_payload_has(self) -> None:
        streams = Streams(DATA)
        opener, lease = a_stream(streams)
        streams.data += b"more"

        with pytest.raises(StreamBrokenError):
            opener.open(lease, until=NEVER)

    def test_the_buffer_of_a_failed_stream_is_used_again(self) -> None:
        pool = BufferPool()
        streams = Streams(DATA)
        streams.faults = [LeaseLostError("over")]
        opener, lease = a_stream(streams, pool)
        with pytest.raises(LeaseLostError):
            opener.open(lease, until=NEVER)

        assert pool.idle_bytes == 2 * PAGE

    @given(
        offset=st.integers(0, 1 << 40),
        checksum=st.integers(0, (1 << 32) - 1),
        data=st.binary(max_size=300),
    )
    def test_a_chunk_is_read_as_protobuf_reads_it(
        self, offset: int, checksum: int, data: bytes
    ) -> None:
        message = bulk_service_pb2.ReadPayloadResponse(
            offset_bytes=offset, crc32c=checksum, data=data
        ).SerializeToString()

        chunk = parse_chunk(message)

        assert (chunk.offset_bytes, chunk.crc32c, bytes(chunk.data)) == (offset, checksum, data)

    @given(unknown=st.sampled_from([b"\x80\x01\x05", b"\x89\x01" + b"x" * 8, b"\x8d\x01abcd"]))
    def test_fields_of_a_later_release_are_passed_over(self, unknown: bytes) -> None:
        message = bulk_service_pb2.ReadPayloadResponse(offset_bytes=3, data=b"abc")

        assert bytes(parse_chunk(unknown + message.SerializeToString()).data) == b"abc"

    @given(message=st.binary(min_size=1, max_size=60))
    def test_bytes_that_are_no_chunk_never_raise_anything_else(self, message: bytes) -> None:
        try:
            chunk = parse_chunk(message)
        except StreamBrokenError:
            return
        assert len(chunk.data) <= len(message)


class TestBuffers:
    def test_a_vacated_buffer_is_used_for_the_next_stream(self) -> None:
        pool = BufferPool()
        opener, lease = a_stream(Streams(DATA), pool)
        first = opener.open(lease, until=NEVER)
        where = torch.frombuffer(first.buffer, dtype=torch.uint8).data_ptr()
        first.vacate()

        second = opener.open(lease, until=NEVER)

        assert torch.frombuffer(second.buffer, dtype=torch.uint8).data_ptr() == where

    def test_buffers_in_use_are_not_shared(self) -> None:
        opener, lease = a_stream(Streams(DATA))
        first, second = opener.open(lease, until=NEVER), opener.open(lease, until=NEVER)
        first.buffer[0] = 255

        assert second.buffer[0] == DATA[0]

    def test_a_large_buffer_is_not_wasted_on_a_small_payload(self) -> None:
        pool = BufferPool()
        pool.put(pool.take(100 * PAGE))

        assert len(pool.take(PAGE)) == PAGE
        assert pool.idle_bytes == 100 * PAGE

    def test_the_smallest_that_fits_is_taken(self) -> None:
        pool = BufferPool()
        for buffer in [pool.take(size * PAGE) for size in (9, 6, 8)]:
            pool.put(buffer)

        assert len(pool.take(5 * PAGE)) == 6 * PAGE

    def test_no_more_than_the_limit_is_kept(self) -> None:
        pool = BufferPool(most_bytes=10 * PAGE)
        for buffer in [pool.take(4 * PAGE) for _ in range(5)]:
            pool.put(buffer)

        assert pool.idle_bytes == 8 * PAGE


class TestOwnPayload:
    def test_a_copy_outlives_the_slab(self, writer: Writer) -> None:
        opener = SharedMemoryOpener(writer.pass_slab, mode=MapMode.READ_ONLY)
        lease = writer.lease(b"abc")
        copy = OwnPayload(opener.open(lease, until=NEVER), lease.payload.columns).copy()

        writer.lease(b"xyz", generation=4)

        assert bytes(copy.buffer[:3]) == b"abc"
        assert copy.copied
        assert copy.is_current()

    def test_a_copy_of_room_that_was_reused_meanwhile_says_so(self, writer: Writer) -> None:
        opener = SharedMemoryOpener(writer.pass_slab, mode=MapMode.READ_ONLY)
        lease = writer.lease(b"abc")
        opened = opener.open(lease, until=NEVER)
        writer.slab.mark(0, 3)

        assert not OwnPayload(opened, lease.payload.columns).copy().is_current()

    def test_streamed_bytes_are_not_copied_again_and_never_reused(self) -> None:
        pool = BufferPool()
        opener, lease = a_stream(Streams(DATA), pool)
        opened = opener.open(lease, until=NEVER)

        own = OwnPayload(opened, lease.payload.columns).copy()
        own.vacate()

        assert own.buffer is opened.buffer
        assert pool.idle_bytes == 0


ALL = (Transport.LOCAL, Transport.SHARED_MEMORY, Transport.STREAM)


class TestFallback:
    @pytest.mark.parametrize(
        ("failed", "wanted", "locality", "has_line", "expected"),
        [
            (Transport.LOCAL, ALL, Locality.PREFER, True, Transport.SHARED_MEMORY),
            (Transport.LOCAL, ALL, Locality.REQUIRE, True, Transport.SHARED_MEMORY),
            (Transport.LOCAL, ALL, Locality.PREFER, False, Transport.STREAM),
            (Transport.LOCAL, ALL, Locality.REQUIRE, False, None),
            (Transport.LOCAL, ALL[::2], Locality.PREFER, True, Transport.STREAM),
            (Transport.SHARED_MEMORY, ALL, Locality.PREFER, True, Transport.STREAM),
            (Transport.SHARED_MEMORY, ALL, Locality.REQUIRE, True, None),
            (Transport.SHARED_MEMORY, ALL, Locality.RULE, True, None),
            (Transport.SHARED_MEMORY, ALL[:2], Locality.PREFER, True, None),
            (Transport.STREAM, ALL, Locality.PREFER, True, None),
        ],
    )
    def test_what_is_tried_next(
        self,
        failed: Transport,
        wanted: Sequence[Transport],
        locality: Locality,
        has_line: bool,
        expected: Transport | None,
    ) -> None:
        choice = Choice(wanted=wanted, locality=locality, has_line=has_line)

        assert next_transport(failed, choice) is expected

    def test_a_chain_of_failures_ends(self) -> None:
        choice = Choice(wanted=ALL, locality=Locality.PREFER, has_line=True)
        tried: list[Transport | None] = [Transport.LOCAL]
        while tried[-1] is not None:
            tried.append(next_transport(tried[-1], choice))

        assert tried == [*ALL, None]

    @pytest.mark.parametrize("error", [NotAllowedError("no"), SlabOpenError("no")])
    def test_only_what_a_new_stream_could_mend_is_resumed(
        self, error: NotAllowedError | TransportFailure
    ) -> None:
        assert pause_before_resuming(error, fruitless=0) is None

    def test_a_stream_that_brought_bytes_is_resumed_at_once(self) -> None:
        assert pause_before_resuming(StreamBrokenError("reset"), fruitless=0) == 0.0

    def test_the_pauses_outlast_a_channel_that_waits_before_it_connects_anew(self) -> None:
        """A server that was started again a moment ago is there, whatever the last try met."""
        broken = StreamBrokenError("connection refused")
        pauses = [
            pause_before_resuming(broken, fruitless=number) or 0.0
            for number in range(1, MAX_STREAM_TRIES + 1)
        ]

        assert sum(pauses) > MAX_RECONNECT_SECONDS
        assert pauses[-1] == 0.0


def test_a_payload_that_this_process_has_no_memory_for_is_refused_with_its_size() -> None:
    with pytest.raises(PoolFullError, match=f"{MAX_SIZE_BYTES} bytes .*no memory"):
        BufferPool().take(MAX_SIZE_BYTES)
