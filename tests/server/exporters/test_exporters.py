"""Exporters: how payloads leave the server, byte for byte, and what keeps their room meanwhile."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.held import left_behind, open_descriptors
from tests.some_payload import some_payload

from teacher_logits import inprocess, keys
from teacher_logits.clock import ManualClock
from teacher_logits.cuts import Segment
from teacher_logits.errors import LeaseLostError, NotAllowedError, RequestInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType, lay_out
from teacher_logits.payload import Extent, Payload
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.slab import WriterSlab
from teacher_logits.transport import Transport, proof_of
from teacher_logits.v1 import bulk_service_pb2
from teacher_logits_server.config import MAX_CHUNK_BYTES, ServerConfig
from teacher_logits_server.exporters.local import LocalExporter
from teacher_logits_server.exporters.shared_memory import SharedMemoryExporter
from teacher_logits_server.exporters.stream import MAX_HEADER_BYTES, StreamExporter, frame
from teacher_logits_server.foreign import ForeignSlabs
from teacher_logits_server.ledger import Ledger, OpenedSession
from teacher_logits_server.lending.rooms import Pinned
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.slabs import ServerSlabs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.terms import LeaseTerms

CHUNK = 4096
EPOCH = "0123456789ab"
SECRET = b"of this process"


@dataclass(frozen=True, kw_only=True)
class Store:
    """A ledger with slabs, and what puts payloads there."""

    ledger: Ledger
    slabs: ServerSlabs

    def open_session(
        self, transport: Transport, *, proven: Transport = Transport.LOCAL, secret: bytes = SECRET
    ) -> OpenedSession:
        profile = StudentProfile(
            batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
            top_k=8,
            transports=(transport,),
        )
        opened = self.ledger.open_session(
            request_id=keys.new_id("r", EPOCH), protocol_version=PROTOCOL_VERSION, profile=profile
        )
        mac = proof_of(secret, nonce=opened.nonce, transport=proven)
        self.ledger.prove_locality(opened.terms.session_id, proofs={proven: mac}, failures=[])
        return opened

    def lend(self, session_id: str, content: bytes) -> tuple[LeaseTerms, Extent]:
        """Put bytes into a slab and lease them."""
        payload = a_payload(len(content))
        extent = self.slabs.room_for(self.ledger, len(content))
        self.slabs.room(extent)[: len(content)] = content
        lease = self.ledger.publish(
            session_id=session_id,
            request_id=keys.new_id("r", EPOCH),
            payload=payload,
            extent=extent,
        )
        return lease, extent


def a_payload(size_bytes: int) -> Payload:
    """A payload of so many bytes, whatever they are."""
    columns, _ = lay_out([(ColumnKind.ROW_STATUS, ElementType.UINT8, (1,))])
    return some_payload(
        payload_id=keys.new_id("p", EPOCH),
        top_k=8,
        vocabulary_size=100,
        columns=columns,
        size_bytes=size_bytes,
    )


@pytest.fixture
def store() -> Iterator[Store]:
    with new_store() as store:
        yield store


@pytest.fixture(scope="module")
def lasting_store() -> Iterator[Store]:
    """One store for all examples of a hypothesis test."""
    with new_store() as store:
        yield store


@contextmanager
def new_store(
    offered: tuple[Transport, ...] = (Transport.LOCAL, Transport.STREAM),
) -> Iterator[Store]:
    slabs = ServerSlabs(epoch=EPOCH)
    ledger = Ledger(
        epoch=EPOCH,
        limits=ServerConfig(pool_size_bytes=2**20, slab_size_bytes=2**18),
        engines=(
            EngineTeacher(
                profile=TeacherProfile(
                    teacher_id="teacher",
                    vocabulary_size=100,
                    head_rows=100,
                    top_k=8,
                    max_row_tokens=8,
                )
            ),
        ),
        clock=ManualClock(),
        slots=slabs,
        offered=frozenset(offered),
        local_secret=SECRET,
    )
    yield Store(ledger=ledger, slabs=slabs)
    slabs.close()


class TestStream:
    @given(
        offset=st.one_of(st.just(0), st.integers(min_value=0, max_value=2**63 - 1)),
        data=st.binary(max_size=300),
    )
    def test_a_chunk_is_what_protobuf_would_write(self, offset: int, data: bytes) -> None:
        message = bulk_service_pb2.ReadPayloadResponse(
            offset_bytes=offset, crc32c=crc32c.crc32c(data), data=data
        )

        assert frame(offset, memoryview(data)) == message.SerializeToString()

    def test_a_checksum_of_zero_is_left_out_as_protobuf_does(self) -> None:
        data = b"\xab\x9b\xe0\x9b"
        message = bulk_service_pb2.ReadPayloadResponse(offset_bytes=1, crc32c=0, data=data)

        assert crc32c.crc32c(data) == 0
        assert frame(1, memoryview(data)) == message.SerializeToString()

    @pytest.mark.parametrize("size", [1, 127, 128, 2**20, MAX_CHUNK_BYTES])
    def test_a_chunk_of_any_size_is_one_bytes_object_below_grpc_s_default_limit(
        self, size: int
    ) -> None:
        chunk = frame(2**62, memoryview(bytes(size)))

        assert type(chunk) is bytes
        assert len(chunk) <= size + MAX_HEADER_BYTES
        assert len(chunk) < 4 * 2**20
        assert bulk_service_pb2.ReadPayloadResponse.FromString(chunk).data == bytes(size)

    @given(
        size=st.integers(min_value=1, max_value=3 * CHUNK + 5),
        chunk=st.integers(min_value=1, max_value=2 * CHUNK),
        part=st.floats(min_value=0, max_value=1),
    )
    def test_chunks_are_the_payload_from_an_offset_on(
        self, lasting_store: Store, size: int, chunk: int, part: float
    ) -> None:
        store = lasting_store
        exporter = StreamExporter(ledger=store.ledger, slabs=(store.slabs,), chunk_bytes=chunk + 64)
        session_id = store.open_session(Transport.STREAM).terms.session_id
        content, offset = os.urandom(size), int(size * part)
        lease, _ = store.lend(session_id, content)

        with exporter.read(session_id, lease.lease_id, offset) as chunks:
            received = [bulk_service_pb2.ReadPayloadResponse.FromString(each) for each in chunks]

        assert b"".join(each.data for each in received) == content[offset:]
        assert [each.offset_bytes for each in received] == [*range(offset, size, chunk + 64)]
        assert all(each.crc32c == crc32c.crc32c(each.data) for each in received)
        store.ledger.close_session(session_id)

    @pytest.mark.parametrize("offset", [-1, 101, 2**62])
    def test_an_offset_outside_the_payload_is_refused(self, store: Store, offset: int) -> None:
        exporter = StreamExporter(ledger=store.ledger, slabs=(store.slabs,), chunk_bytes=CHUNK)
        session_id = store.open_session(Transport.STREAM).terms.session_id
        lease, _ = store.lend(session_id, bytes(100))

        with pytest.raises(RequestInvalidError, match=r"which has 100") as refusal:
            exporter.read(session_id, lease.lease_id, offset).__enter__()
        assert refusal.value.facts == {"offset_bytes": offset, "size_bytes": 100}
        store.ledger.close_session(session_id)

    def test_room_is_not_reused_under_a_stream_that_is_under_way(self, store: Store) -> None:
        exporter = StreamExporter(ledger=store.ledger, slabs=(store.slabs,), chunk_bytes=CHUNK)
        session_id = store.open_session(Transport.STREAM).terms.session_id
        lease, _ = store.lend(session_id, b"a" * 3 * CHUNK)

        with exporter.read(session_id, lease.lease_id, 0) as chunks:
            first = next(chunks)
            store.ledger.release(session_id, lease.lease_id)
            _, extent = store.lend(session_id, b"b" * 3 * CHUNK)
            rest = list(chunks)
        _, reused = store.lend(session_id, b"c" * 3 * CHUNK)

        assert first.endswith(b"a" * CHUNK)
        assert [chunk.count(b"b") for chunk in rest] == [0, 0]
        assert extent.offset_bytes != reused.offset_bytes
        store.ledger.close_session(session_id)

    def test_a_lease_that_was_returned_streams_no_more(self, store: Store) -> None:
        exporter = StreamExporter(ledger=store.ledger, slabs=(store.slabs,), chunk_bytes=CHUNK)
        session_id = store.open_session(Transport.STREAM).terms.session_id
        lease, _ = store.lend(session_id, b"a")
        store.ledger.release(session_id, lease.lease_id)

        with pytest.raises(LeaseLostError):
            exporter.read(session_id, lease.lease_id, 0).__enter__()

    def test_a_stream_given_up_half_way_holds_no_memory(self, store: Store) -> None:
        exporter = StreamExporter(ledger=store.ledger, slabs=(store.slabs,), chunk_bytes=CHUNK)
        session_id = store.open_session(Transport.STREAM).terms.session_id
        lease, extent = store.lend(session_id, bytes(3 * CHUNK))
        used = store.ledger.view().pool.used_bytes

        with exporter.read(session_id, lease.lease_id, 0) as chunks:
            next(chunks)
        store.ledger.release(session_id, lease.lease_id)

        assert store.ledger.view().pool.used_bytes == used - extent.size_bytes


@dataclass(frozen=True, kw_only=True)
class OneLease:
    """A ledger with one lease, which shows what it is told to show."""

    pinned: Pinned

    @contextmanager
    def pin(self, session_id: str, lease_id: str) -> Iterator[Pinned]:
        yield self.pinned


@st.composite
def segments(draw: st.DrawFn) -> tuple[bytes, tuple[Segment, ...]]:
    """Runs of a source of 500 bytes, and the payload that they make, padding and all."""
    source, made, found = SOURCE, bytearray(), []
    for size in draw(st.lists(st.integers(min_value=1, max_value=60), min_size=1, max_size=5)):
        made += bytes(draw(st.integers(min_value=0, max_value=9)))
        start = draw(st.integers(min_value=0, max_value=len(source) - size))
        found.append(Segment(source_offset_bytes=start, offset_bytes=len(made), size_bytes=size))
        made += source[start : start + size]
    made += bytes(draw(st.integers(min_value=0, max_value=9)))
    return bytes(made), tuple(found)


SOURCE = bytes(range(1, 251)) * 2


class TestStreamOfSomeRows:
    @given(cut=segments(), chunk=st.integers(min_value=1, max_value=99), data=st.data())
    def test_is_gathered_from_where_the_rows_lie(
        self, cut: tuple[bytes, tuple[Segment, ...]], chunk: int, data: st.DataObject
    ) -> None:
        content, runs = cut
        offset = data.draw(st.integers(min_value=0, max_value=len(content)))
        with a_publishers_slab(SOURCE) as (extent, slabs):
            ledger = OneLease(pinned=pinned(len(content), extent, runs))
            exporter = StreamExporter(
                ledger=cast("Ledger", ledger), slabs=(slabs,), chunk_bytes=chunk
            )
            with exporter.read("s", "l", offset) as chunks:
                received = [bulk_service_pb2.ReadPayloadResponse.FromString(c) for c in chunks]

        assert b"".join(each.data for each in received) == content[offset:]
        assert [each.offset_bytes for each in received] == [*range(offset, len(content), chunk)]
        assert all(each.crc32c == crc32c.crc32c(each.data) for each in received)

    def test_a_publisher_s_slab_is_read_by_its_descriptor(self, store: Store) -> None:
        with a_publishers_slab(SOURCE) as (extent, slabs):
            run = Segment(source_offset_bytes=0, offset_bytes=0, size_bytes=len(SOURCE))
            ledger = OneLease(pinned=pinned(len(SOURCE), extent, (run,)))
            exporter = StreamExporter(
                ledger=cast("Ledger", ledger), slabs=(store.slabs, slabs), chunk_bytes=CHUNK
            )
            with exporter.read("s", "l", 0) as chunks:
                [chunk] = chunks

        assert bulk_service_pb2.ReadPayloadResponse.FromString(chunk).data == SOURCE


@contextmanager
def a_publishers_slab(content: bytes) -> Iterator[tuple[Extent, ForeignSlabs]]:
    """A slab of another writer's, of which the server has the descriptor alone."""
    written = WriterSlab("theirs", 2**16)
    extent = Extent(
        slab_id="theirs", offset_bytes=4096, size_bytes=len(content), slot=0, generation=2
    )
    with written.room(extent) as room:
        room[:] = content
    slabs = ForeignSlabs(8)
    slabs.add("theirs", written.fd)
    written.close()
    yield extent, slabs
    slabs.close()


def pinned(size_bytes: int, extent: Extent, runs: tuple[Segment, ...]) -> Pinned:
    """A payload of so many bytes, as a lease on some rows shows it."""
    return Pinned(payload=a_payload(size_bytes), extent=extent, writer_id="w", segments=runs)


class TestSharedMemory:
    def test_a_slab_is_passed_as_a_descriptor_of_its_own(self, store: Store) -> None:
        exporter = SharedMemoryExporter(ledger=store.ledger, slabs=(store.slabs,))
        session_id = store.open_session(Transport.LOCAL).terms.session_id
        _, extent = store.lend(session_id, b"x")
        slab = store.slabs.find(extent.slab_id)

        passed = exporter.pass_slab(session_id, extent.slab_id)

        assert passed.descriptor != slab.fd
        assert os.path.sameopenfile(passed.descriptor, slab.fd)
        assert passed.size_bytes == os.fstat(passed.descriptor).st_size
        os.close(passed.descriptor)

    def test_a_slab_that_is_closed_meanwhile_is_refused_and_leaves_no_descriptor(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exporter = SharedMemoryExporter(ledger=store.ledger, slabs=(store.slabs,))
        session_id = store.open_session(Transport.LOCAL).terms.session_id
        lease, extent = store.lend(session_id, bytes(2**17))
        store.ledger.release(session_id, lease.lease_id)
        real, before = os.dup, open_descriptors()

        def dup(descriptor: int) -> int:
            copy = real(descriptor)
            assert extent.slab_id in store.ledger.take_idle_slabs()  # the scorer, meanwhile
            return copy

        monkeypatch.setattr(os, "dup", dup)
        with pytest.raises(NotAllowedError, match="no slab"):
            exporter.pass_slab(session_id, extent.slab_id)
        assert not left_behind(before, open_descriptors)


class TestLocal:
    def test_a_server_is_found_in_its_process_while_it_runs(self, store: Store) -> None:
        exporter = LocalExporter(epoch=EPOCH, slabs=store.slabs)
        before = inprocess.find(EPOCH)
        exporter.start()
        resident = inprocess.find(EPOCH)
        exporter.stop()
        exporter.stop()

        assert before is None
        assert resident is not None
        assert resident.secret == exporter.secret
        assert inprocess.find(EPOCH) is None

    def test_its_secret_is_another_one_each_time(self, store: Store) -> None:
        one, other = (LocalExporter(epoch=EPOCH, slabs=store.slabs) for _ in range(2))

        assert one.secret != other.secret
