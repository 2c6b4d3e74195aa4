"""What comes ahead over a broker line, and what publishers ask over it."""

import array
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import pytest
from tests.client.line.test_line import LONG, SOON, Broker, a_line, a_page, released
from tests.held import left_behind, open_descriptors

from teacher_logits.errors import (
    ForkedClientError,
    PayloadConflictError,
    PayloadRetiredError,
    ServerUnreachableError,
)
from teacher_logits.keys import PayloadKey
from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.payload import Extent, Payload
from teacher_logits.terms import Mail, Reservation, RoomFreed, StepFailure, StepGrant
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.errors import to_status
from teacher_logits.wire.payloads import extent_from_wire, payload_from_wire
from teacher_logits.wire.steps import mail_to_wire, reservation_to_wire
from teacher_logits_client.line.exchange import Exchange


def unexpected(what: object) -> None:
    pytest.fail(f"{what} came")


def a_grant(step: int) -> StepGrant:
    return StepGrant(step=step, leases=(), real_rows=4)


def a_shard() -> Payload:
    columns, size = top_k_columns(
        row_count=2,
        position_count=5,
        top_k=1,
        temperature_count=1,
        value_type=ElementType.FLOAT16,
    )
    return Payload(
        payload_id="",
        teacher_id="teacher",
        teacher_revision="",
        first_row=2,
        row_count=2,
        position_count=5,
        top_k=1,
        temperatures=(1.0,),
        vocabulary_size=8,
        columns=columns,
        size_bytes=size,
        key=PayloadKey(teacher_id="teacher", step=7, shard=1),
    )


def send(broker: Broker, *mail: Mail) -> None:
    for each in mail:
        broker.answer(mail_to_wire(each))


def test_what_lies_in_the_socket_is_drained_in_its_order_without_waiting(tmp_path: Path) -> None:
    got: list[Mail] = []
    with a_line(tmp_path, on_mail=got.append) as (line, broker):
        line.drain()
        assert got == []
        freed = RoomFreed(payload_ids=("p-1",), lowest_open_step=4)
        send(broker, a_grant(3), freed, a_grant(4))
        line.drain()

        assert got == [a_grant(3), freed, a_grant(4)]


def test_a_failure_of_a_step_is_mail_with_the_error_that_the_server_had(tmp_path: Path) -> None:
    got: list[Mail] = []
    with a_line(tmp_path, on_mail=got.append) as (line, broker):
        send(broker, StepFailure(step=3, error=PayloadRetiredError("gone", facts={"lowest": 5})))
        line.drain()

        (failure,) = got
        assert isinstance(failure, StepFailure)
        assert isinstance(failure.error, PayloadRetiredError)
        assert failure.error.facts == {"lowest": 5}


def test_mail_that_comes_during_a_call_is_handed_on_by_the_thread_that_reads(
    tmp_path: Path,
) -> None:
    got: list[Mail] = []
    with a_line(tmp_path, on_mail=got.append) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.release, "s-1", "l-1", timeout=LONG)
        request = broker.take()
        send(broker, a_grant(3))
        broker.answer(released(request.call_id))
        call.result(LONG)

        assert got == [a_grant(3)]


def test_whoever_waits_sees_what_mail_left_behind(tmp_path: Path) -> None:
    got: list[Mail] = []
    with a_line(tmp_path, on_mail=got.append) as (line, broker), ThreadPoolExecutor(4) as threads:
        waits = [
            threads.submit(line.wait, _has(got, count), monotonic() + LONG) for count in (2, 1, 2)
        ]
        send(broker, a_grant(3), a_grant(4))

        assert [wait.result(LONG) for wait in waits] == [True] * 3


def _has(got: list[Mail], count: int) -> Callable[[], bool]:
    return lambda: len(got) >= count


def test_a_wait_ends_with_its_deadline(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, _):
        assert not line.wait(lambda: False, monotonic() + SOON)


def test_a_wait_ends_with_the_line_and_what_came_before_still_counts(tmp_path: Path) -> None:
    got: list[Mail] = []
    with a_line(tmp_path, on_mail=got.append) as (line, broker):
        send(broker, a_grant(3))
        broker.socket.close()

        assert line.wait(_has(got, 1), monotonic() + LONG)
        with pytest.raises(ServerUnreachableError, match="hung up"):
            line.wait(_has(got, 2), monotonic() + LONG)


def test_mail_that_cannot_be_read_ends_the_line(tmp_path: Path) -> None:
    with a_line(tmp_path, on_mail=unexpected) as (line, broker):
        broker.answer(released(0))
        line.drain()

        with pytest.raises(ServerUnreachableError, match="is no mail"):
            line.release("s-1", "l-1", timeout=LONG)


def test_descriptors_beside_mail_are_closed(tmp_path: Path) -> None:
    got: list[Mail] = []
    with a_line(tmp_path, on_mail=got.append) as (line, broker):
        page = a_page(b"stray")
        before = open_descriptors()
        broker.answer(mail_to_wire(a_grant(3)), page)
        line.drain()

        assert got == [a_grant(3)]
        assert not left_behind(before, open_descriptors)
        os.close(page)


def test_steps_are_asked_for_without_waiting_and_a_refusal_is_told_when_it_comes(
    tmp_path: Path,
) -> None:
    refusals: list[BaseException] = []
    with a_line(tmp_path) as (line, broker):
        for step in (3, 4):
            line.want_steps("s-1", step, 2, until=monotonic() + LONG, on_refusal=refusals.append)
        one, two = broker.take(), broker.take()
        want = one.want_steps
        assert (want.session_id, want.first_step, want.count) == ("s-1", 3, 2)
        fine = line_pb2.LineReply(call_id=one.call_id)
        fine.want_steps.SetInParent()
        broker.answer(fine)
        status = to_status(PayloadRetiredError("gone")).SerializeToString()
        broker.answer(line_pb2.LineReply(call_id=two.call_id, status=status))

        assert line.wait(lambda: bool(refusals), monotonic() + LONG)
        assert [type(error) for error in refusals] == [PayloadRetiredError]


def test_a_request_that_finds_the_socket_full_is_dropped_at_its_deadline(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker):
        broker.fill(line)
        line.want_steps("s-1", 3, 1, until=monotonic(), on_refusal=unexpected)

        assert line._posts == {}


def test_a_slab_is_handed_over_with_its_descriptor_which_stays_ours(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        fd = a_page(b"slab")
        call = threads.submit(line.put_slab, "slab-1", 4096, fd, timeout=LONG)
        request, (theirs,) = take_with_descriptors(broker)
        reply = line_pb2.LineReply(call_id=request.call_id)
        reply.put_slab.SetInParent()
        broker.answer(reply)
        call.result(LONG)

        assert (request.put_slab.slab_id, request.put_slab.size_bytes) == ("slab-1", 4096)
        assert os.pread(theirs, 4, 0) == os.pread(fd, 4, 0) == b"slab"
        os.close(theirs)
        os.close(fd)


def take_with_descriptors(broker: Broker) -> tuple[line_pb2.LineRequest, list[int]]:
    broker.socket.settimeout(LONG)
    packet, descriptors, _, _ = socket.recv_fds(broker.socket, 65536, 4)
    return line_pb2.LineRequest.FromString(packet), list(array.array("i", descriptors))


def test_rows_are_claimed_and_sealed_over_the_line(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        reserving = threads.submit(
            line.reserve,
            "s-1",
            request_id="r-1",
            payload=a_shard(),
            row_positions=(2, 3),
            real_rows=4,
            timeout=LONG,
        )
        request = broker.take()
        reservation = Reservation(payload_id="p-1", is_repeat=True, lowest_open_step=6)
        reply = line_pb2.LineReply(call_id=request.call_id)
        reply.reserve.CopyFrom(reservation_to_wire(reservation))
        broker.answer(reply)

        assert reserving.result(LONG) == reservation
        assert payload_from_wire(request.reserve.payload) == a_shard()
        assert (request.reserve.request_id, list(request.reserve.row_positions)) == ("r-1", [2, 3])
        assert request.reserve.real_rows == 4

        extent = Extent(slab_id="slab-1", offset_bytes=0, size_bytes=4096, slot=2, generation=8)
        sealing = threads.submit(
            line.seal,
            "s-1",
            "p-1",
            extent=extent,
            bad_row_count=1,
            valid_count=0,
            digest="d",
            timeout=LONG,
        )
        request = broker.take()
        refusal = to_status(PayloadConflictError("other bytes")).SerializeToString()
        broker.answer(line_pb2.LineReply(call_id=request.call_id, status=refusal))

        with pytest.raises(PayloadConflictError, match="other bytes"):
            sealing.result(LONG)
        assert extent_from_wire(request.seal.extent) == extent
        assert request.seal.HasField("valid_count")
        assert (request.seal.bad_row_count, request.seal.valid_count) == (1, 0)
        assert request.seal.digest == "d"


def test_a_seal_says_nothing_of_masks_and_places_that_there_are_not(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        sealing = threads.submit(
            line.seal,
            "s-1",
            "p-1",
            extent=None,
            bad_row_count=0,
            valid_count=None,
            digest="",
            timeout=LONG,
        )
        request = broker.take()
        reply = line_pb2.LineReply(call_id=request.call_id)
        reply.seal.SetInParent()
        broker.answer(reply)
        sealing.result(LONG)

        assert not request.seal.HasField("extent")
        assert not request.seal.HasField("valid_count")


def test_a_forked_child_neither_reads_nor_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[Mail] = []
    with a_line(tmp_path, on_mail=got.append) as (line, broker):
        send(broker, a_grant(3))
        parent = os.getpid()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: parent + 1)
            for use in _uses(line):
                with pytest.raises(ForkedClientError, match="is a fork"):
                    use()
        broker.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            broker.socket.recv(16)
        line.drain()

        assert got == [a_grant(3)]


def _uses(line: Exchange) -> list[Callable[[], object]]:
    request, until = line_pb2.LineRequest(), monotonic() + LONG
    return [
        line.drain,
        lambda: line.wait(lambda: True, until),
        lambda: line.post(request, until=until, on_refusal=unexpected),
        lambda: line.call(request, what="nothing", timeout=LONG),
    ]
