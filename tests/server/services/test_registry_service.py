"""Publishers that stream, and calls that wait: over gRPC, in raw messages."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import grpc
import pytest
from tests.clocks import answer_early
from tests.server.services.registry_rig import (
    PATIENCE,
    ROWS,
    TOP_K,
    Wire,
    a_payload,
    a_student,
    a_teacher,
    bytes_of,
    chunks_of,
    error_of,
    refused,
    serving,
)

from teacher_logits.digest import payload_digest
from teacher_logits.errors import (
    ChecksumError,
    DeadlinePassedError,
    DrainingError,
    NotAllowedError,
    PayloadConflictError,
    PayloadInvalidError,
    PoolFullError,
    ProducerLostError,
    RequestInvalidError,
    ReservationLapsedError,
    SessionRefusedError,
    TeacherLogitsError,
    UnknownTeacherError,
)
from teacher_logits.v1 import registry_service_pb2
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits_server.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.server.services.registry_rig import Publisher

T = TypeVar("T")


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(tmp_path) as wire:
        yield wire


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Wire]:
    """A server with room for two payloads, a page each."""
    with serving(tmp_path, pool_size_bytes=8192, slab_size_bytes=8192) as wire:
        yield wire


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def started(threads: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """Begin a call on a thread; return once that runs."""
    begun = threading.Event()

    def run() -> T:
        begun.set()
        return call()

    future = threads.submit(run)
    assert begun.wait(PATIENCE)
    return future


class TestOpenPublisher:
    def test_refuses_a_profile_with_every_rule_that_it_breaks(self, wire: Wire) -> None:
        with pytest.raises(SessionRefusedError) as refusal:
            wire.publisher(a_teacher(5, of=2))

        assert [each.rule for each in refusal.value.violations] == ["rank_out_of_range"]

    def test_refuses_publishers_that_disagree(self, wire: Wire) -> None:
        wire.publisher(a_teacher(0, of=2))

        with pytest.raises(SessionRefusedError) as refusal:
            wire.publisher(a_teacher(1, of=2, top_k=TOP_K + 1))
        (violation,) = refusal.value.violations
        assert violation.rule == "teacher_grid_conflict"
        assert str(TOP_K + 1) in violation.message

    def test_refuses_a_shard_that_is_taken_and_grants_it_once_it_is_closed(
        self, wire: Wire
    ) -> None:
        first = wire.publisher(a_teacher())
        with pytest.raises(SessionRefusedError, match="shard_taken"):
            wire.publisher(a_teacher())

        first.close()
        wire.publisher(a_teacher())

    def test_shows_who_publishes(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)

        (session,) = wire.inspect().sessions
        assert session.session_id == publisher.session_id
        assert [teacher.teacher_id for teacher in wire.inspect().teachers] == ["published"]


class TestWriting:
    def test_brings_a_payload_to_readers_that_map_and_to_those_that_stream(
        self, wire: Wire
    ) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()
        data = bytes_of(payload)
        publisher.publish(payload, data)

        mapping = wire.student(a_student(student_id="maps"))
        streaming = wire.student(a_student(student_id="streams"), streams=True)
        mapping.want(0)
        assert mapping.read(mapping.mailed().leases[0]) == data
        assert streaming.read(streaming.acquire(0).leases[0]) == data

    def test_goes_on_where_a_stream_ended(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()
        data = bytes_of(payload)
        payload_id = publisher.reserve(payload).payload_id
        chunks = chunks_of(publisher.session_id, payload_id, data, size=500)

        assert publisher.write(chunks[:2]) == 1000
        asked = chunks_of(publisher.session_id, payload_id, b" ")[0]
        asked.ClearField("data")
        asked.crc32c = 0
        assert publisher.write([asked]) == 1000
        rest = chunks_of(publisher.session_id, payload_id, data, start=700, size=500)
        assert publisher.write(rest) == payload.size_bytes
        publisher.seal(payload_id)

        student = wire.student(a_student(), streams=True)
        assert student.read(student.acquire(0).leases[0]) == data

    def test_of_large_chunks_leaves_the_bytes_as_they_are(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(top_k=96), streams=True)
        payload = a_payload(top_k=96, positions=400)
        data = bytes_of(payload)
        payload_id = publisher.reserve(payload).payload_id
        chunks = chunks_of(publisher.session_id, payload_id, data, size=200_000)
        assert len(chunks) > 1
        publisher.write(chunks)
        publisher.seal(payload_id)

        student = wire.student(a_student(), streams=True)
        assert student.read(student.acquire(0).leases[0]) == data

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ({"offset_bytes": 1}, "starts at byte 1, and bytes have come up to 0"),
            ({"offset_bytes": -1}, "starts at byte -1"),
            ({"crc32c": 1}, "changed on the way"),
            ({"data": bytes(5000)}, "ends at byte 5000 of a payload of"),
        ],
    )
    def test_refuses_a_chunk_that_does_not_fit(
        self, wire: Wire, wrong: dict[str, object], sentence: str
    ) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()
        payload_id = publisher.reserve(payload).payload_id
        data = bytes_of(payload)
        (chunk, *_) = chunks_of(publisher.session_id, payload_id, data, size=500)
        for name, value in wrong.items():
            setattr(chunk, name, value)

        with pytest.raises((RequestInvalidError, ChecksumError), match=sentence):
            publisher.write([chunk])
        publisher.write(chunks_of(publisher.session_id, payload_id, data))
        publisher.seal(payload_id)

    def test_refuses_chunks_out_of_order(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()
        payload_id = publisher.reserve(payload).payload_id
        chunks = chunks_of(publisher.session_id, payload_id, bytes_of(payload), size=500)

        with pytest.raises(RequestInvalidError, match="the one before ended at 1000"):
            publisher.write([chunks[0], chunks[1], chunks[1]])

    def test_refuses_a_chunk_of_another_payload(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()
        payload_id = publisher.reserve(payload).payload_id
        chunks = chunks_of(publisher.session_id, payload_id, bytes_of(payload), size=500)
        chunks[1].payload_id = "p-other"

        with pytest.raises(RequestInvalidError, match="one stream brings one payload"):
            publisher.write(chunks)

    def test_needs_a_reservation_of_one_s_own(self, wire: Wire) -> None:
        first, second = (wire.publisher(a_teacher(shard, of=2), streams=True) for shard in (0, 1))
        payload_id = first.reserve(a_payload(of=2)).payload_id

        with pytest.raises(NotAllowedError, match="another session"):
            second.write(chunks_of(second.session_id, payload_id, b"x"))
        with pytest.raises(ReservationLapsedError):
            second.write(chunks_of(second.session_id, "p-none", b"x"))
        with pytest.raises(RequestInvalidError, match="none came"):
            second.write([])

    def test_that_stalls_is_given_up_and_keeps_its_reservation(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()
        data = bytes_of(payload)
        payload_id = publisher.reserve(payload).payload_id
        chunks = chunks_of(publisher.session_id, payload_id, data, size=500)
        enough = threading.Event()

        def stalling() -> Iterator[registry_service_pb2.WritePayloadRequest]:
            yield chunks[0]
            enough.wait(PATIENCE)

        wire.be_impatient(1.0)  # for its first chunk too, which is on its way
        with pytest.raises(grpc.RpcError) as failure:
            wire.registry.WritePayload(stalling(), timeout=PATIENCE)
        enough.set()
        wire.be_patient()
        error = error_of(failure.value)
        assert isinstance(error, DeadlinePassedError)
        assert error.facts["offset_bytes"] == 500
        publisher.write(chunks_of(publisher.session_id, payload_id, data, start=500))
        publisher.seal(payload_id)

    def test_needs_a_deadline(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        chunks = chunks_of(publisher.session_id, "p-none", b"x")

        with pytest.raises(RequestInvalidError, match="needs a deadline"):
            refused(lambda: wire.registry.WritePayload(iter(chunks)))

    def test_of_bytes_that_are_no_message_is_refused(self, wire: Wire) -> None:
        method: grpc.StreamUnaryMultiCallable[bytes, bytes] = wire.channel.stream_unary(
            "/teacher_logits.v1.RegistryService/WritePayload"
        )

        with pytest.raises(RequestInvalidError, match="are no message of it"):
            refused(lambda: method(iter([b"\xff\xff"]), timeout=PATIENCE))


class TestSealing:
    def test_needs_every_byte(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()
        payload_id = publisher.reserve(payload).payload_id
        publisher.write(chunks_of(publisher.session_id, payload_id, bytes_of(payload))[:1])

        with pytest.raises(PayloadInvalidError, match="has 1000 of its"):
            publisher.seal(payload_id)

    def test_refuses_rows_that_were_not_reserved_and_frees_their_room(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()

        with pytest.raises(PayloadInvalidError, match="row_offsets"):
            publisher.publish(payload, bytes(payload.size_bytes))
        assert wire.inspect().pool.used_bytes == 0
        publisher.publish(payload, bytes_of(payload))

    def test_compares_a_repeat_with_what_was_sealed(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload = a_payload()
        data = bytes_of(payload)
        digest = payload_digest(
            (c.kind.value, c.element_type.value, c.shape, data[c.offset_bytes : c.end_bytes])
            for c in payload.columns
        )
        publisher.publish(payload, data)
        used = wire.inspect().pool.used_bytes

        publisher.publish(payload, data, digest=digest)
        assert wire.inspect().pool.used_bytes == used
        with pytest.raises(PayloadConflictError, match=digest):
            publisher.publish(payload, bytes_of(payload, seed=1), digest="1" * 32)
        assert wire.inspect().pool.used_bytes == used

    def test_is_not_needed_where_the_reservation_is_abandoned(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        payload_id = publisher.reserve(a_payload()).payload_id
        request = registry_service_pb2.AbandonPayloadRequest(
            session_id=publisher.session_id, payload_id=payload_id
        )
        for _ in range(2):
            wire.registry.AbandonPayload(request, timeout=PATIENCE)

        assert wire.inspect().pool.used_bytes == 0


class TestRoom:
    def test_is_waited_for_until_readers_give_some_back(
        self, small: Wire, threads: ThreadPoolExecutor
    ) -> None:
        publisher = small.publisher(a_teacher(), streams=True)
        student = small.student(a_student(), streams=True)
        for step in (0, 1):
            publisher.publish(a_payload(step), bytes_of(a_payload(step)))
        waiting = started(threads, lambda: publisher.reserve(a_payload(2)))
        grant = student.acquire(0)
        assert not waiting.done()
        student.release(grant)

        assert waiting.result(PATIENCE).payload_id

    def test_that_does_not_come_in_time_is_told_with_numbers_and_who_is_waited_for(
        self, small: Wire
    ) -> None:
        publisher = small.publisher(a_teacher(), streams=True)
        small.student(a_student(student_id="slow"), streams=True)
        for step in (0, 1):
            publisher.publish(a_payload(step), bytes_of(a_payload(step)))
        small.be_impatient()

        with pytest.raises(DeadlinePassedError, match="slow") as late:
            publisher.reserve(a_payload(2))
        assert late.value.facts["free_bytes"] == 0
        assert late.value.facts["need_bytes"] == 4096

    def test_that_does_not_come_by_the_call_s_own_deadline_is_a_full_pool(
        self, small: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer_early(monkeypatch)
        publisher = small.publisher(a_teacher(), streams=True)
        for step in (0, 1):
            publisher.publish(a_payload(step), bytes_of(a_payload(step)))

        with pytest.raises(PoolFullError) as full:
            publisher.reserve(a_payload(2), timeout=PATIENCE)
        assert full.value.facts["need_bytes"] == 4096

    def test_of_a_call_that_was_cancelled_is_claimed_by_nobody(
        self, small: Wire, threads: ThreadPoolExecutor
    ) -> None:
        publisher = small.publisher(a_teacher(), streams=True)
        student = small.student(a_student(), streams=True)
        for step in (0, 1):
            publisher.publish(a_payload(step), bytes_of(a_payload(step)))
        request = publisher.reserve_request(a_payload(2))
        call = small.registry.ReservePayload.future(request, timeout=PATIENCE)
        while not self._is_claimed(publisher):  # until the call is in the server
            if call.done():  # our own look came first
                call = small.registry.ReservePayload.future(request, timeout=PATIENCE)
        call.cancel()
        student.release(student.acquire(0))
        while self._is_claimed(publisher):  # until its end is there too
            pass

    def _is_claimed(self, publisher: Publisher) -> bool:
        """Whether somebody has reserved step 2 and not got it."""
        try:
            publisher.reserve(a_payload(2), timeout=0.2)
        except PayloadConflictError:
            return True
        except (DeadlinePassedError, PoolFullError):
            pass
        return False

    def test_of_a_retry_is_that_of_the_first_try(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        first, second = (publisher.reserve(a_payload(), request_id="mine") for _ in range(2))

        assert first == second
        assert wire.inspect().pool.extent_count == 1


class TestWaiting:
    def test_a_student_that_comes_first_waits_for_all_publishers(
        self, wire: Wire, threads: ThreadPoolExecutor
    ) -> None:
        waiting = started(threads, lambda: wire.student(a_student(), streams=True))
        for shard in (0, 1):
            assert not waiting.done()
            wire.publisher(a_teacher(shard, of=2), streams=True)

        assert waiting.result(PATIENCE).session_id

    def test_a_student_whose_teacher_never_comes_hears_so(self, wire: Wire) -> None:
        wire.be_impatient()
        with pytest.raises(UnknownTeacherError, match="'absent'"):
            wire.student(a_student(teacher_id="absent"), streams=True)

    def test_a_student_is_told_which_publishers_are_missing(self, wire: Wire) -> None:
        wire.publisher(a_teacher(1, of=4), streams=True)
        wire.be_impatient()

        with pytest.raises(DeadlinePassedError, match="shard 0, 2, 3"):
            wire.student(a_student(), streams=True)

    def test_a_step_is_waited_for_until_its_last_shard_is_sealed(
        self, wire: Wire, threads: ThreadPoolExecutor
    ) -> None:
        publishers = [wire.publisher(a_teacher(shard, of=2), streams=True) for shard in (0, 1)]
        student = wire.student(a_student(), streams=True)
        waiting = started(threads, lambda: student.acquire(0))
        for shard, publisher in enumerate(publishers):
            assert not waiting.done()
            payload = a_payload(shard=shard, of=2)
            publisher.publish(payload, bytes_of(payload))

        assert len(waiting.result(PATIENCE).leases) == 2

    def test_a_step_that_does_not_come_is_told_with_what_it_lacks(self, wire: Wire) -> None:
        publishers = [wire.publisher(a_teacher(shard, of=2), streams=True) for shard in (0, 1)]
        student = wire.student(a_student(), streams=True)
        publishers[0].publish(a_payload(of=2), bytes_of(a_payload(of=2)))
        wire.be_impatient()

        with pytest.raises(DeadlinePassedError, match=r"step 0 .* shard.* 1"):
            student.acquire(0)

    def test_a_step_whose_publisher_dies_is_told_at_once(
        self, wire: Wire, threads: ThreadPoolExecutor
    ) -> None:
        publishers = [wire.publisher(a_teacher(shard, of=2)) for shard in (0, 1)]
        student = wire.student(a_student(), streams=True)
        publishers[0].put_slab()
        publishers[0].publish(a_payload(of=2), bytes_of(a_payload(of=2)))
        waiting = started(threads, lambda: student.acquire(0))
        publishers[0].own_line.close()  # nobody is left to say what the slab will hold

        with pytest.raises(ProducerLostError, match="shard 0"):
            waiting.result(PATIENCE)

    def test_a_drain_tells_who_waits_to_come_in_and_leaves_steps_to_be_read(
        self, tmp_path: Path, threads: ThreadPoolExecutor
    ) -> None:
        with serving(tmp_path) as wire:
            publisher = wire.publisher(a_teacher(), streams=True)
            student = wire.student(a_student(), streams=True)
            outside = a_student(teacher_id="absent")
            waiting = started(threads, lambda: wire.student(outside, streams=True))
            step = started(threads, lambda: student.acquire(0))
            wire.drain()

            with pytest.raises(DrainingError):
                waiting.result(PATIENCE)
            with pytest.raises(DrainingError, match="payloads"):
                publisher.reserve(a_payload())
            assert not step.done()
        with pytest.raises((TeacherLogitsError, grpc.RpcError)):  # at the server's end
            step.result(PATIENCE)

    def test_a_cancelled_wait_leaves_nothing_behind(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        student = wire.student(a_student(), streams=True)
        call = wire.students.AcquireStep.future(student.acquire_request(0), timeout=PATIENCE)
        call.cancel()
        payload = a_payload()
        publisher.publish(payload, bytes_of(payload))

        wire.await_that(lambda view: not view.leases)  # the step may have met the call's end
        student.release(student.acquire(0))
        wire.await_that(lambda view: view.pool.used_bytes == 0)

    def test_an_acquisition_given_up_gives_its_leases_back(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        student = wire.student(a_student(), streams=True)
        publisher.publish(a_payload(), bytes_of(a_payload()))
        student.acquire(0, request_id="mine")
        request = messages.ReleasePayloadRequest(session_id=student.session_id, request_id="mine")
        wire.students.ReleasePayload(request, timeout=PATIENCE)

        assert not wire.inspect().leases
        assert len(student.acquire(0).leases) == 1  # it was not read


class TestEnds:
    def test_a_publisher_that_streams_and_goes_silent_loses_its_payloads(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        publisher.publish(a_payload(), bytes_of(a_payload()))
        wire.clock.advance(ServerConfig().session_ttl.total_seconds())

        wire.await_that(lambda view: not view.sessions and view.pool.used_bytes == 0)

    def test_a_publisher_that_closes_leaves_its_payloads(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        data = bytes_of(a_payload())
        publisher.publish(a_payload(), data)
        publisher.reserve(a_payload(1))
        publisher.close()

        student = wire.student(a_student(), streams=True)
        assert student.read(student.acquire(0).leases[0]) == data
        assert wire.inspect().pool.extent_count == 1

    def test_rows_of_a_step_are_said_to_be_real(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(), streams=True)
        publisher.publish(a_payload(), bytes_of(a_payload()), valid_count=9)
        grant = wire.student(a_student(), streams=True).acquire(0)

        assert (grant.real_rows, grant.global_count) == (ROWS, 9)
