"""Limits: what a client may have of a real server, and what it hears of one more."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from tests.server.services.registry_rig import (
    PATIENCE,
    Wire,
    a_payload,
    a_student,
    a_teacher,
    bytes_of,
    error_of,
    refused,
    serving,
)

import teacher_logits_client as tl
from teacher_logits import keys
from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import LimitReachedError, RequestInvalidError
from teacher_logits.profiles import NodeHints
from teacher_logits.v1 import bulk_service_pb2
from teacher_logits.v1 import teacher_logits_service_pb2 as messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_server.services.waiting import Bell

LIMITS = {
    "max_sessions": 4,
    "max_student_sessions": 2,
    "max_publishers": 1,
    "max_user_lines": 2,
    "max_waiting_calls": 3,
    "max_session_calls": 2,
    "max_session_leases": 2,
    "max_session_streams": 1,
    "max_reservations": 2,
    "max_steps": 3,
    "max_slabs": 1,
    "max_watchers": 2,
    "max_calls": 64,
}


def a_new_teacher() -> TeacherProfile:
    """A publisher whose revision no test has had: what they left of steps goes."""
    return a_teacher(revision=keys.new_id("r", "test"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with serving(tmp_path_factory.mktemp("limits"), **LIMITS) as wire:
        yield wire


@pytest.fixture
def wire(server: Wire) -> Iterator[Wire]:
    """The server, with everything closed that a test has opened."""
    with Wire(server.address) as wire:
        wire.waiting = server.waiting
        yield wire
        for each in wire.inspect().sessions:
            request = messages.CloseSessionRequest(session_id=each.session_id)
            wire.students.CloseSession(request, timeout=PATIENCE)
    server.await_that(lambda seen: not seen.sessions)


@contextmanager
def refused_by(name: str, flag: str) -> Iterator[None]:
    """A limit, with its number, its flag, and when to come back."""
    with pytest.raises(LimitReachedError, match=flag) as told:
        yield
    field = flag.removeprefix("--").replace("-", "_")
    facts = {"limit_name": name, "count": LIMITS[field], "limit": LIMITS[field], "flag": flag}
    assert told.value.facts == facts
    assert told.value.retry_after is not None


def await_waiting(bell: Bell, count: int) -> None:
    limit = MonotonicClock().now() + PATIENCE
    while bell.waiting.total() < count:
        assert MonotonicClock().now() < limit


def test_of_one_student_so_many_sessions_and_of_all_and_publishers_beside_them(wire: Wire) -> None:
    wire.publisher(a_new_teacher(), streams=True)
    for rank in range(2):
        wire.student(a_student(rank, of=4), streams=True)
    with refused_by("student_sessions", "--max-student-sessions"):
        wire.student(a_student(2, of=4), streams=True)
    for rank in range(2):
        wire.student(a_student(rank, of=4, student_id="other"), streams=True)

    with refused_by("sessions", "--max-sessions"):
        wire.student(a_student(student_id="third"), streams=True)
    with refused_by("publishers", "--max-publishers"):
        wire.publisher(a_teacher(teacher_id="more"), streams=True)


def test_a_session_that_is_closed_makes_room_for_the_next(wire: Wire) -> None:
    wire.publisher(a_new_teacher(), streams=True).close()

    wire.publisher(a_teacher(teacher_id="more"), streams=True)


def test_one_user_s_processes_have_so_many_broker_lines(wire: Wire) -> None:
    wire.publisher(a_new_teacher())
    wire.student(a_student(of=2))

    with refused_by("user_lines", "--max-user-lines"):
        wire.student(a_student(1, of=2))
    wire.lines.pop(1).close()
    wire.await_that(lambda seen: len(seen.sessions) == 2)  # the publisher's, and one that opens
    wire.student(a_student(student_id="next"))


def acquire(wire: Wire, session_id: str, step: int) -> Callable[[], object]:
    request = messages.AcquireStepRequest(
        session_id=session_id, request_id=keys.new_id("r", "test"), step=step
    )
    return lambda: refused(lambda: wire.students.AcquireStep(request, timeout=PATIENCE))


def test_so_many_calls_wait_of_one_session_and_of_all(wire: Wire) -> None:
    publisher = wire.publisher(a_new_teacher(), streams=True)
    one, other = (wire.student(a_student(rank, of=2), streams=True) for rank in range(2))
    assert wire.waiting is not None
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(acquire(wire, one.session_id, 0)) for _ in range(2)]
        await_waiting(wire.waiting.steps, 2)
        with refused_by("session_calls", "--max-session-calls"):
            acquire(wire, one.session_id, 0)()

        waiting.append(threads.submit(acquire(wire, other.session_id, 0)))
        await_waiting(wire.waiting.steps, 3)
        with refused_by("waiting_calls", "--max-waiting-calls"):
            acquire(wire, other.session_id, 0)()
        publisher.publish(a_payload(), bytes_of(a_payload()))

        assert all(each.result(PATIENCE) for each in waiting)
    assert not wire.waiting.steps.waiting


def test_a_session_holds_so_many_leases(wire: Wire) -> None:
    publisher = wire.publisher(a_new_teacher(), streams=True)
    student = wire.student(a_student(), streams=True)
    for step in range(3):
        publisher.publish(a_payload(step), bytes_of(a_payload(step)))
    for step in range(2):
        acquire(wire, student.session_id, step)()

    with refused_by("session_leases", "--max-session-leases"):
        acquire(wire, student.session_id, 2)()


def test_a_publisher_reserves_so_much_ahead_and_its_retry_is_none_of_it(wire: Wire) -> None:
    publisher = wire.publisher(a_new_teacher(), streams=True)
    first = publisher.reserve(a_payload(0), request_id="r0")
    publisher.reserve(a_payload(1), request_id="r1")

    with refused_by("reservations", "--max-reservations"):
        publisher.reserve(a_payload(2))
    again = publisher.reserve(a_payload(0), request_id="r0")

    assert again.payload_id == first.payload_id


def test_so_many_steps_of_a_teacher_wait_to_be_read(wire: Wire) -> None:
    publisher = wire.publisher(a_new_teacher(), streams=True)
    for step in range(3):
        publisher.publish(a_payload(step), bytes_of(a_payload(step)))

    with refused_by("steps", "--max-steps"):
        publisher.reserve(a_payload(3))


def test_a_publisher_brings_so_many_slabs(wire: Wire) -> None:
    publisher = wire.publisher(a_new_teacher())
    publisher.put_slab()

    with refused_by("slabs", "--max-slabs"):
        publisher.put_slab()


def test_a_session_has_so_many_streams(wire: Wire) -> None:
    publisher = wire.publisher(a_new_teacher(), streams=True)
    student = wire.student(a_student(), streams=True)
    payload = a_payload(positions=60, top_k=4)
    publisher.publish(payload, bytes_of(payload))
    grant = acquire(wire, student.session_id, 0)()
    assert isinstance(grant, messages.AcquireStepResponse)
    request = bulk_service_pb2.ReadPayloadRequest(
        session_id=student.session_id, lease_id=grant.grant.leases[0].lease_id
    )
    with ThreadPoolExecutor(8) as threads:
        began = threading.Barrier(8)

        def read() -> int:
            began.wait(PATIENCE)
            return len(list(wire.bulk.ReadPayload(request, timeout=PATIENCE)))

        reading = [threads.submit(read) for _ in range(8)]
    for each in reading:
        error = each.exception()
        if error is not None:
            assert isinstance(error, grpc.RpcError)
            assert error_of(error).facts["limit_name"] == "session_streams"
    assert list(wire.bulk.ReadPayload(request, timeout=PATIENCE))


def watch(wire: Wire) -> grpc._CallIterator[bytes]:
    """Watch the server's health; none has come yet."""
    method: grpc.UnaryStreamMultiCallable[bytes, bytes]
    method = wire.channel.unary_stream("/grpc.health.v1.Health/Watch")
    return method(b"")


def look(wire: Wire, metadata: tuple[tuple[str, str], ...] = ()) -> bytes:
    """Look at the server's health once."""
    method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
    method = wire.channel.unary_unary("/grpc.health.v1.Health/Check")
    return method(b"", timeout=PATIENCE, metadata=metadata)


def test_so_many_watch_the_server_s_health_and_anybody_may_look(wire: Wire) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            watching = watch(wire)
            stack.callback(watching.cancel)
            assert next(watching)

        with refused_by("watchers", "--max-watchers"):
            refused(lambda: next(watch(wire)))
        assert look(wire)
        tl.connect(wire.address, timeout=PATIENCE).close()  # a client of ours looks instead
    limit = MonotonicClock().now() + PATIENCE
    while True:  # those that were cancelled make room
        watching = watch(wire)
        try:
            next(watching)
            break
        except grpc.RpcError:
            assert MonotonicClock().now() < limit
    watching.cancel()


def test_metadata_beyond_its_size_is_refused(wire: Wire) -> None:
    look(wire, (("x-much", "x" * 8192),))

    with pytest.raises(grpc.RpcError) as told:
        look(wire, (("x-much", "x" * 20_000),))

    assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        (NodeHints(host_name="h" * 1025), "host_name"),
        (NodeHints(device_uuids=tuple(map(str, range(65)))), "device_uuids"),
        (NodeHints(versions={"torch": "v" * 1025}), "versions"),
        (NodeHints(namespaces={f"n{number}": number for number in range(65)}), "namespaces"),
    ],
)
def test_what_a_profile_says_has_an_end(wire: Wire, hints: NodeHints, field: str) -> None:
    with pytest.raises(RequestInvalidError, match=f"{field} has .*; give at most"):
        wire.student(a_student(hints=hints), streams=True)


def test_connections_that_say_nothing_to_the_broker_keep_nobody_out(wire: Wire) -> None:
    wire.publisher(a_new_teacher())
    path = wire.address.removeprefix("unix:") + ".broker"
    with ExitStack() as stack:
        for _ in range(300):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(path)

        wire.student(a_student())
