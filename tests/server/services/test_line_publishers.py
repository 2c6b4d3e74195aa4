"""Publishers and students of one machine, over their broker lines: whole steps, byte by byte."""

from __future__ import annotations

import fcntl
import mmap
import os
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.server.services.registry_rig import (
    MIB,
    PATIENCE,
    POSITIONS,
    ROWS,
    Wire,
    a_payload,
    a_student,
    a_teacher,
    bytes_of,
    freed_of,
    holders_of,
    rows_of,
    serving,
)

from teacher_logits.clock import MonotonicClock
from teacher_logits.cuts import cut_rows
from teacher_logits.digest import payload_digest
from teacher_logits.errors import (
    NotAllowedError,
    NotAvailable,
    PayloadConflictError,
    PayloadInvalidError,
    PayloadRetiredError,
    RequestInvalidError,
    ReservationLapsedError,
    TeacherLogitsError,
)
from teacher_logits.layout import ColumnKind
from teacher_logits.payload import Extent
from teacher_logits.slab import CONTROL_BYTES, WriterSlab
from teacher_logits.terms import LeaseTerms
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.payloads import lease_to_wire
from teacher_logits_server.services import line
from teacher_logits_server.services.lease_messages import LeaseMessages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(tmp_path) as wire:
        yield wire


class TestSteps:
    def test_reach_each_rank_with_the_bytes_of_its_rows_as_they_were_written(
        self, wire: Wire
    ) -> None:
        publishers = [wire.publisher(a_teacher(shard, of=2)) for shard in (0, 1)]
        students = [wire.student(a_student(rank, of=4)) for rank in range(4)]
        written = {}
        for shard, publisher in enumerate(publishers):
            publisher.put_slab()
            payload = a_payload(step=0, shard=shard, of=2)
            written[shard] = bytes_of(payload)
            publisher.publish(payload, written[shard])

        for rank, student in enumerate(students):
            student.want(0)
            grant = student.mailed()
            (lease,) = grant.leases
            assert grant.step == 0
            assert grant.real_rows == ROWS
            assert student.read(lease) == written[rank // 2]
            assert rows_of(rank, of=4).start - lease.payload.first_row == rank % 2

    def test_span_shards_where_the_student_has_fewer_ranks(self, wire: Wire) -> None:
        payloads = [a_payload(step=3, shard=shard, of=2) for shard in (0, 1)]
        publishers = [wire.publisher(a_teacher(shard, of=2)) for shard in (0, 1)]
        student = wire.student(a_student())
        student.want(3)
        for publisher, payload in zip(publishers, payloads, strict=True):
            publisher.put_slab()
            publisher.publish(payload, bytes_of(payload), valid_count=2)

        grant = student.mailed()
        assert grant.global_count == 4
        assert [student.read(lease) for lease in grant.leases] == [*map(bytes_of, payloads)]

    def test_come_ahead_as_many_as_are_wanted(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        student = wire.student(a_student())
        student.want(0, 3)
        for step in range(4):
            payload = a_payload(step=step)
            publisher.publish(payload, bytes_of(payload))

        grants = [student.mailed() for _ in range(3)]
        assert [grant.step for grant in grants] == [0, 1, 2]
        for grant in grants:
            student.release(grant)
        student.want(3)
        assert student.mailed().step == 3

    def test_that_are_not_there_are_told_with_what_they_lack(self, wire: Wire) -> None:
        first, second = (wire.publisher(a_teacher(shard, of=2)) for shard in (0, 1))
        student = wire.student(a_student())

        def lacking(step: int) -> str:
            request = line_pb2.WantStepsRequest(session_id=student.session_id, first_step=step)
            return student.own_line.call(want_steps=request).want_steps.lacking

        first.reserve(a_payload(of=2))
        assert lacking(0).endswith("being written: shard 0; not reserved: shard 1")
        assert lacking(5) == "nothing of it is reserved; the lowest step that is open is 0"
        request = line_pb2.WantStepsRequest(session_id=first.session_id)
        told = first.own_line.call(want_steps=request).want_steps.lacking
        assert told == ""  # whom its room waits for: no step is complete
        wire.drain()
        assert lacking(5).endswith("; the server is shutting down")
        for publisher in (first, second):
            publisher.close()
        assert "; no publisher of the teacher is left" in lacking(5)

    def test_that_were_read_are_told_to_their_publisher_as_free(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        student = wire.student(a_student())
        payload = a_payload()
        payload_id = publisher.publish(payload, bytes_of(payload))
        student.want(0)
        student.release(student.mailed())

        freed: set[str] = set()
        while payload_id not in freed:
            freed |= freed_of(publisher.own_line.mail())
        student.want(0)
        with pytest.raises(PayloadRetiredError, match="step 0 is retired"):
            student.mailed()

    def test_reach_a_student_that_streams_with_its_own_rows_only(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        payload = a_payload()
        data = bytes_of(payload)
        publisher.publish(payload, data)
        student = wire.student(a_student(1, of=2), streams=True)

        (lease,) = student.acquire(0).leases
        streamed = student.read(lease)
        whole, cut = payload.column(ColumnKind.TOPK_IDS), lease.payload.column(ColumnKind.TOPK_IDS)
        assert lease.payload.first_row == 2
        assert cut.size_bytes < whole.size_bytes
        assert (
            streamed[cut.offset_bytes : cut.end_bytes]
            == data[whole.end_bytes - cut.size_bytes : whole.end_bytes]
        )


class TestASlab:
    def test_is_passed_on_to_readers_and_cannot_be_written_there(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        slab = publisher.put_slab()
        student = wire.student(a_student())
        request = line_pb2.GetSlabRequest(slab_id=slab.slab_id)

        reply = student.own_line.call(get_slab=request)
        descriptor = student.own_line.descriptors[-1]

        assert reply.get_slab.size_bytes == slab.total_bytes
        assert os.path.sameopenfile(descriptor, slab.fd)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096)

    @pytest.mark.parametrize("kind", ["file", "pipe", "unsealed", "sparse", "half"])
    def test_that_is_none_is_refused_and_not_kept(
        self, wire: Wire, kind: str, tmp_path: Path
    ) -> None:
        publisher = wire.publisher(a_teacher())
        descriptor, size_bytes, sentence = BAD_DESCRIPTORS[kind](tmp_path)
        request = line_pb2.PutSlabRequest(slab_id="mine", size_bytes=size_bytes)
        try:
            with pytest.raises(RequestInvalidError, match=sentence):
                publisher.own_line.call([descriptor], put_slab=request)

            publisher.put_slab("mine")  # the line goes on, and the id was not used up
            limit = MonotonicClock().now() + PATIENCE
            while holders_of(descriptor) > 1:  # some are closed on a thread
                assert MonotonicClock().now() < limit
        finally:
            os.close(descriptor)

    def test_needs_its_descriptor(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())

        with pytest.raises(RequestInvalidError, match="none came"):
            publisher.own_line.call(put_slab=line_pb2.PutSlabRequest(slab_id="mine", size_bytes=9))

    @pytest.mark.parametrize("count", [2, 3, 100])
    def test_comes_alone(self, wire: Wire, count: int) -> None:
        publisher = wire.publisher(a_teacher())
        slab = WriterSlab("mine", MIB)
        request = line_pb2.PutSlabRequest(slab_id="mine", size_bytes=slab.total_bytes)
        before = holders_of(slab.fd)

        with pytest.raises(RequestInvalidError, match="one descriptor at most"):
            publisher.own_line.call([slab.fd] * count, put_slab=request)

        assert holders_of(slab.fd) == before
        slab.close()

    def test_whose_id_is_taken_is_refused(self, wire: Wire) -> None:
        first, second = (wire.publisher(a_teacher(shard, of=2)) for shard in (0, 1))
        first.put_slab("one")

        with pytest.raises(NotAllowedError, match="'one'"):
            second.put_slab("one")

    def test_of_another_publisher_cannot_be_sealed_into(self, wire: Wire) -> None:
        first, second = (wire.publisher(a_teacher(shard, of=2)) for shard in (0, 1))
        first.put_slab()
        payload = a_payload(shard=1, of=2)
        extent = first.place(bytes_of(payload))
        payload_id = second.reserve(payload).payload_id

        with pytest.raises(NotAllowedError, match="none of this publisher's"):
            second.seal(payload_id, extent)

    def test_that_was_dropped_is_closed_once_nothing_lies_there(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        slab = publisher.put_slab()
        before = holders_of(slab.fd)
        publisher.own_line.call(drop_slab=line_pb2.DropSlabRequest(slab_id=slab.slab_id))

        assert holders_of(slab.fd) == before - 1

    @pytest.mark.parametrize("streams", [False, True], ids=["mapped", "streamed"])
    def test_that_is_dropped_under_a_reader_is_read_whole_and_then_closed(
        self, wire: Wire, streams: bool
    ) -> None:
        publisher = wire.publisher(a_teacher())
        slab = publisher.put_slab()
        before = holders_of(slab.fd)
        payload = a_payload()
        publisher.publish(payload, bytes_of(payload))
        student = wire.student(a_student(), streams=streams)
        grant = student.acquire(0)
        publisher.own_line.call(drop_slab=line_pb2.DropSlabRequest(slab_id=slab.slab_id))

        (lease,) = grant.leases
        assert holders_of(slab.fd) == before
        assert student.read(lease) == bytes_of(payload)
        student.release(grant)

        limit = MonotonicClock().now() + PATIENCE
        while holders_of(slab.fd) != before - 1 + (not streams):  # a map keeps one of its own
            assert MonotonicClock().now() < limit


def _file(folder: Path) -> tuple[int, int, str]:
    path = folder / "file"
    path.write_bytes(bytes(CONTROL_BYTES + 4096))
    return os.open(path, os.O_RDWR), CONTROL_BYTES + 4096, "no memfd"


def _pipe(folder: Path) -> tuple[int, int, str]:
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end, 4096, "no memfd"


def _unsealed(folder: Path) -> tuple[int, int, str]:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * CONTROL_BYTES)
    return descriptor, 2 * CONTROL_BYTES, "not sealed against shrinking and growing and future"


def _sparse(folder: Path) -> tuple[int, int, str]:
    descriptor = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * CONTROL_BYTES)
    fcntl.fcntl(descriptor, 1033, 0x2 | 0x4 | 0x10)
    return descriptor, 2 * CONTROL_BYTES, "has 0 of its 131072 bytes in memory"


def _half(folder: Path) -> tuple[int, int, str]:
    slab = WriterSlab("half", 8192)
    descriptor = os.dup(slab.fd)
    slab.close()
    return descriptor, CONTROL_BYTES + 4096, "has 73728 bytes, and was said to have 69632"


BAD_DESCRIPTORS: dict[str, Callable[[Path], tuple[int, int, str]]] = {
    "file": _file,
    "pipe": _pipe,
    "unsealed": _unsealed,
    "sparse": _sparse,
    "half": _half,
}


class TestASeal:
    def test_reads_nothing_of_another_publisher_s(self, wire: Wire) -> None:
        first, second = (wire.publisher(a_teacher(shard, of=2)) for shard in (0, 1))
        first.put_slab()
        payload = a_payload(shard=1, of=2)
        extent = first.place(b"\x01" * payload.size_bytes)  # no columns that could pass
        payload_id = second.reserve(payload).payload_id

        with pytest.raises(NotAllowedError, match="none of this publisher's"):
            second.seal(payload_id, extent)
        with pytest.raises(ReservationLapsedError):
            second.seal(payload_id, extent)

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            ({"offset_bytes": -4096}, "outside the slab"),
            ({"slot": 1 << 20}, "has slot"),
            ({"generation": 3}, "must be even"),
        ],
    )
    def test_names_the_fault_of_its_place_before_those_of_its_columns(
        self, wire: Wire, change: dict[str, int], fault: str
    ) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        payload = a_payload()
        placed = publisher.place(b"\x01" * payload.size_bytes)
        extent = replace(placed, **change)  # type: ignore[arg-type]
        payload_id = publisher.reserve(payload).payload_id

        with pytest.raises(PayloadInvalidError, match=fault):
            publisher.seal(payload_id, extent)

    @pytest.mark.parametrize("first", [-1, 2**31 - 4])
    def test_of_windows_that_no_row_has_is_refused(self, wire: Wire, first: int) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        payload = a_payload()
        data = bytearray(bytes_of(payload))
        column = payload.column(ColumnKind.ROW_WINDOWS)
        windows = array("i", data[column.offset_bytes : column.end_bytes])
        windows[4] = first  # of row 2, which has 5 positions
        data[column.offset_bytes : column.end_bytes] = windows.tobytes()

        with pytest.raises(PayloadInvalidError, match=f"row 2 begin at position {first}, with 5"):
            publisher.publish(payload, bytes(data))

    def test_of_wrong_offsets_is_refused_before_a_student_sees_them(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        payload = a_payload()
        data = bytearray(bytes_of(payload))
        column = payload.column(ColumnKind.ROW_OFFSETS)
        data[column.offset_bytes : column.end_bytes] = array("q", [0, 3, 4, 10, 11]).tobytes()
        student = wire.student(a_student())
        student.want(0)

        with pytest.raises(PayloadInvalidError, match=r"row_offsets.* 4 for row 2, and 5"):
            publisher.publish(payload, bytes(data))
        good = bytes_of(payload)
        publisher.publish(payload, good)
        assert student.read(student.mailed().leases[0]) == good

    def test_of_another_count_of_bad_rows_is_refused(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        payload = a_payload()

        with pytest.raises(PayloadInvalidError, match="0 for the count of bad rows, and 1"):
            publisher.publish(payload, bytes_of(payload), bad_row_count=1)

    def test_of_a_repeat_is_refused_on_a_line_and_compared_by_rpc(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        payload = a_payload()
        data = bytes_of(payload)
        digest = payload_digest(
            (c.kind.value, c.element_type.value, c.shape, data[c.offset_bytes : c.end_bytes])
            for c in payload.columns
        )
        publisher.publish(payload, data)
        again = publisher.reserve(payload)
        request = publisher.seal_request(again.payload_id, publisher.place(data), digest=digest)

        assert again.is_repeat
        with pytest.raises(RequestInvalidError, match="SealPayload"):
            publisher.own_line.call(seal=request)
        publisher.seal_by_rpc(request)
        assert again.payload_id in freed_of(publisher.own_line.mail())

        other = publisher.reserve(payload)
        extent = publisher.place(bytes_of(payload, seed=1))
        request = publisher.seal_request(other.payload_id, extent, digest="0" * 32)
        with pytest.raises(PayloadConflictError, match="sealed before with digest"):
            publisher.seal_by_rpc(request)

    def test_may_be_repeated(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        payload = a_payload()
        payload_id = publisher.reserve(payload).payload_id
        extent = publisher.place(bytes_of(payload))

        publisher.seal(payload_id, extent)
        publisher.seal(payload_id, extent)


class TestLeaseMessages:
    @pytest.mark.parametrize("bad_row_count", [0, 2])
    def test_are_those_that_are_made_anew(self, bad_row_count: int) -> None:
        announced = a_payload(7)
        payload = replace(announced, payload_id="p-1", bad_row_count=bad_row_count)
        extent = Extent(slab_id="mine", offset_bytes=0, size_bytes=4096, slot=0, generation=2)
        lease = LeaseTerms(lease_id="l-1", payload=payload, writer_id="me", extent=extent)
        messages = LeaseMessages()
        messages.make("p-1", announced)

        assert messages.lease(lease) == lease_to_wire(lease)

    def test_of_a_cut_are_made_anew(self) -> None:
        announced = a_payload(7)
        payload = replace(announced, payload_id="p-1")
        cut = cut_rows(payload, POSITIONS, first_row=1, row_count=2).payload
        lease = LeaseTerms(lease_id="l-1", payload=cut, writer_id="me", extent=None)
        messages = LeaseMessages()
        messages.make("p-1", announced)

        assert messages.lease(lease) == lease_to_wire(lease)

    def test_of_all_rows_without_the_gaps_between_columns_are_made_anew(self) -> None:
        plain = a_payload(7)
        gaps = [replace(c, offset_bytes=n * 4096) for n, c in enumerate(plain.columns)]
        announced = replace(plain, columns=tuple(gaps), size_bytes=len(gaps) * 4096)
        payload = replace(announced, payload_id="p-1")
        cut = cut_rows(payload, POSITIONS, first_row=0, row_count=ROWS).payload
        lease = LeaseTerms(lease_id="l-1", payload=cut, writer_id="me", extent=None)
        messages = LeaseMessages()
        messages.make("p-1", announced)

        assert cut.columns != payload.columns
        assert messages.lease(lease) == lease_to_wire(lease)


class TestAGrantThatNoPacketCarries:
    def test_is_a_failure_and_leaves_nothing_leased(
        self, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publisher = wire.publisher(a_teacher())
        student = wire.student(a_student())
        publisher.put_slab()
        publisher.publish(a_payload(step=0), bytes_of(a_payload(step=0)))
        monkeypatch.setattr(line, "MAX_PACKET_BYTES", 100)
        student.want(0)

        with pytest.raises(NotAvailable, match=r"step 0 grants.*for 1 shards"):
            student.mailed()

        assert not wire.inspect().leases
        monkeypatch.undo()
        student.want(0)
        assert student.mailed().leases


class TestKinds:
    def test_a_student_cannot_do_a_publisher_s_calls(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        publisher.put_slab()
        student = wire.student(a_student())
        request = publisher.reserve_request(a_payload())
        request.session_id = student.session_id

        with pytest.raises(NotAllowedError, match="a student's session"):
            student.own_line.call(reserve=request)
        with pytest.raises(NotAllowedError, match="a student's session"):
            student.own_line.call(drop_slab=line_pb2.DropSlabRequest(slab_id="one"))

    def test_a_publisher_cannot_do_a_student_s_calls(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        request = line_pb2.WantStepsRequest(session_id=publisher.session_id, first_step=0, count=1)

        with pytest.raises(NotAllowedError, match="a publisher's session"):
            publisher.own_line.call(want_steps=request)

    def test_a_line_seals_for_its_own_session_alone(self, wire: Wire) -> None:
        first, second = (wire.publisher(a_teacher(shard, of=2)) for shard in (0, 1))
        first.put_slab()
        payload = a_payload(of=2)
        payload_id = first.reserve(payload).payload_id
        request = first.seal_request(payload_id, first.place(bytes_of(payload)))

        with pytest.raises(NotAllowedError, match="serves no other"):
            second.own_line.call(seal=request)
        request.session_id = second.session_id
        with pytest.raises(TeacherLogitsError, match="another session"):
            second.own_line.call(seal=request)

    def test_a_reservation_of_many_rows_fits_a_packet(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher())
        request = publisher.reserve_request(a_payload())
        request.row_positions.extend([1] * 20_000)

        with pytest.raises(PayloadInvalidError, match="20004 rows"):
            publisher.own_line.call(reserve=request)
