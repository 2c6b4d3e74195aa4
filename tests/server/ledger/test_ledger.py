"""The ledger: admission to release over one lock, with what each end does to the room."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.server.ledger.registering import Limits, Slots

from teacher_logits import keys
from teacher_logits.clock import ManualClock
from teacher_logits.errors import (
    DrainingError,
    EpochChangedError,
    LeaseLostError,
    LimitReachedError,
    NoCommonTransportError,
    NotAllowedError,
    PayloadInvalidError,
    PayloadRetiredError,
    PoolFullError,
    RequestInvalidError,
    SessionExpiredError,
    SessionRefusedError,
    TeacherLogitsError,
    UnknownTeacherError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.payload import Extent, Payload
from teacher_logits.pool import Growth
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.terms import Check, LeaseTerms, SessionTerms, Verdict
from teacher_logits.transport import (
    Locality,
    Refusal,
    RefusalReason,
    Transport,
    proof_of,
)
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.ledger import Ledger, OpenedSession
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.requests import LIMIT
from teacher_logits_server.services.student import release

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits_server.limits import Limits as WhatLimitsAre

PAGE = 4096
EPOCH = "0123456789ab"
SECRET = b"secret of this process"
CHALLENGE = b"what the broker wrote"
TEACHER = TeacherProfile(
    teacher_id="teacher", vocabulary_size=100, head_rows=128, top_k=64, max_row_tokens=512
)
STUDENT = StudentProfile(
    batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1), top_k=8
)
ALL = frozenset({Transport.LOCAL, Transport.SHARED_MEMORY, Transport.STREAM})


@dataclass(frozen=True, kw_only=True)
class SmallLimits(Limits):
    max_sessions: int = 8
    pool_size_bytes: int = 16 * PAGE


class House:
    """A ledger with its clock and its slots, and the steps that every test takes."""

    def __init__(self, **changes: object) -> None:
        self.clock = ManualClock()
        self.slots = Slots()
        given: dict[str, object] = {
            "epoch": EPOCH,
            "limits": SmallLimits(),
            "engines": (EngineTeacher(profile=TEACHER),),
            "clock": self.clock,
            "slots": self.slots,
            "offered": ALL,
            "local_secret": SECRET,
        }
        self.ledger = Ledger(**{**given, **changes})  # type: ignore[arg-type]
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"n{self._count}"

    def open(self, student: StudentProfile = STUDENT, request_id: str = "") -> OpenedSession:
        return self.ledger.open_session(
            request_id=request_id or self.name(),
            protocol_version=PROTOCOL_VERSION,
            profile=student,
        )

    def line(self, opened: OpenedSession, pid: int = 42) -> None:
        self.ledger.check_hello(opened.terms.session_id, opened.nonce)
        self.ledger.line_opened(opened.terms.session_id, pid=pid, challenge=CHALLENGE)

    def prove(
        self, opened: OpenedSession, *transports: Transport, failures: tuple[Refusal, ...] = ()
    ) -> SessionTerms:
        challenges = {Transport.SHARED_MEMORY: CHALLENGE, Transport.LOCAL: SECRET}
        proofs = {t: proof_of(challenges[t], nonce=opened.nonce, transport=t) for t in transports}
        return self.ledger.prove_locality(opened.terms.session_id, proofs=proofs, failures=failures)

    def streaming(self, student: StudentProfile = STUDENT) -> str:
        return self.prove(self.open(student)).session_id

    def sharing(self, student: StudentProfile = STUDENT) -> str:
        opened = self.open(student)
        self.line(opened)
        return self.prove(opened, Transport.SHARED_MEMORY).session_id

    def in_process(self) -> str:
        return self.prove(self.open(), Transport.LOCAL).session_id

    def room(self, pages: int = 1) -> Extent:
        answer = self.ledger.reserve(pages * PAGE)
        if isinstance(answer, Growth):
            self.ledger.add_slab(self.name(), answer.size_bytes)
            answer = self.ledger.reserve(pages * PAGE)
        assert isinstance(answer, Extent)
        return answer

    def payload(self, extent: Extent, **changes: object) -> Payload:
        given: dict[str, object] = {
            "payload_id": keys.new_id("p", EPOCH),
            "teacher_id": "teacher",
            "teacher_revision": "",
            "first_row": 0,
            "row_count": 1,
            "position_count": 1,
            "top_k": 8,
            "temperatures": (1.0,),
            "vocabulary_size": 100,
            "columns": (),
            "size_bytes": extent.size_bytes,
        }
        return Payload(**{**given, **changes})  # type: ignore[arg-type]

    def publish(
        self, session_id: str, *, pages: int = 1, request_id: str = "", **changes: object
    ) -> tuple[LeaseTerms, Extent]:
        extent = self.room(pages)
        lease = self.ledger.publish(
            session_id=session_id,
            request_id=request_id or self.name(),
            payload=self.payload(extent, **changes),
            extent=extent,
        )
        return lease, extent

    def acquire(self, session_id: str, lease: LeaseTerms, request_id: str = "") -> LeaseTerms:
        return self.ledger.acquire(
            session_id=session_id,
            request_id=request_id or self.name(),
            payload_id=lease.payload.payload_id,
        )

    def used(self) -> tuple[int, int]:
        """Pages in use and in quarantine."""
        pool = self.ledger.view().pool
        return pool.used_bytes // PAGE, pool.quarantined_bytes // PAGE


@pytest.fixture
def house() -> House:
    return House()


class TestOpening:
    def test_gives_terms_and_a_nonce_and_settles_nothing(self, house: House) -> None:
        opened = house.open()

        assert opened.terms.session_id.startswith(f"s-{EPOCH}-")
        assert opened.terms.ttl == timedelta(seconds=30)
        assert opened.terms.max_request_tokens == 4096
        assert opened.terms.vocabulary_size == 100
        assert opened.terms.settlements == ()
        assert len(opened.nonce) == 32

    def test_a_server_config_will_do_for_the_limits(self) -> None:
        limits: WhatLimitsAre = ServerConfig()

        opened = House(limits=limits).open()

        assert opened.terms.ttl == ServerConfig().session_ttl

    def test_shows_the_teachers_own_checks(self) -> None:
        causality = Check(name="causality", verdict=Verdict.PASSED, detail="probed")

        opened = House(engines=(EngineTeacher(profile=TEACHER, checks=(causality,)),)).open()

        assert opened.terms.checks[-1] == causality

    def test_a_retry_gets_the_same_session_and_nonce(self, house: House) -> None:
        first = house.open(request_id="once")

        assert house.open(request_id="once") == first
        assert len(house.ledger.view().sessions) == 1

    def test_names_every_broken_rule(self, house: House) -> None:
        student = replace(STUDENT, top_k=65, engine="other")

        with pytest.raises(SessionRefusedError) as caught:
            house.open(student)

        assert [v.rule for v in caught.value.violations] == ["top_k_too_large", "engine_mismatch"]
        assert house.ledger.view().sessions == ()

    def test_refuses_an_unknown_teacher(self, house: House) -> None:
        with pytest.raises(UnknownTeacherError, match="teacher"):
            house.open(replace(STUDENT, teacher_id="other"))

    @pytest.mark.parametrize("bad", ["", " ", "a b", "x" * 129, "-"])
    def test_refuses_a_request_id_or_student_id_that_is_no_name(
        self, house: House, bad: str
    ) -> None:
        with pytest.raises(RequestInvalidError, match="request id"):
            house.ledger.open_session(
                request_id=bad, protocol_version=PROTOCOL_VERSION, profile=STUDENT
            )
        with pytest.raises(RequestInvalidError, match="student id"):
            house.open(replace(STUDENT, student_id=bad))

    def test_refuses_one_session_too_many(self) -> None:
        house = House(limits=SmallLimits(max_sessions=1))
        house.open()

        with pytest.raises(LimitReachedError, match="--max-sessions"):
            house.open()


class TestProving:
    def test_settles_on_shared_memory_by_the_line(self, house: House) -> None:
        opened = house.open()
        house.line(opened)

        (settlement,) = house.prove(opened, Transport.SHARED_MEMORY).settlements

        assert settlement.writer_id == "server"
        assert settlement.transport is Transport.SHARED_MEMORY
        assert [(r.transport, r.reason) for r in settlement.refusals] == [
            (Transport.LOCAL, RefusalReason.OTHER_PROCESS),
            (Transport.CUDA_IPC, RefusalReason.NOT_OFFERED),
        ]

    def test_settles_on_the_writers_own_tensors_by_the_secret(self, house: House) -> None:
        (settlement,) = house.prove(house.open(), Transport.LOCAL).settlements

        assert settlement.transport is Transport.LOCAL
        assert settlement.refusals == ()

    def test_streams_what_is_not_proven_and_says_why(self, house: House) -> None:
        failure = Refusal(
            transport=Transport.SHARED_MEMORY,
            reason=RefusalReason.BROKER_UNREACHABLE,
            message="No such file or directory",
        )

        (settlement,) = house.prove(house.open(), failures=(failure,)).settlements

        assert settlement.transport is Transport.STREAM
        assert failure in settlement.refusals

    def test_a_wrong_proof_is_no_proof(self, house: House) -> None:
        opened = house.open()
        house.line(opened)

        terms = house.ledger.prove_locality(
            opened.terms.session_id,
            proofs={Transport.SHARED_MEMORY: b"guessed", Transport.LOCAL: b""},
            failures=[],
        )

        (settlement,) = terms.settlements
        assert settlement.transport is Transport.STREAM
        reasons = {r.transport: r.reason for r in settlement.refusals}
        assert reasons[Transport.SHARED_MEMORY] is RefusalReason.PROOF_WRONG
        assert reasons[Transport.LOCAL] is RefusalReason.PROOF_WRONG

    def test_another_sessions_proof_is_no_proof(self, house: House) -> None:
        mine, theirs = house.open(), house.open()
        house.line(mine)
        house.line(theirs)
        stolen = proof_of(CHALLENGE, nonce=theirs.nonce, transport=Transport.SHARED_MEMORY)

        terms = house.ledger.prove_locality(
            mine.terms.session_id, proofs={Transport.SHARED_MEMORY: stolen}, failures=[]
        )

        assert terms.settlements[0].transport is Transport.STREAM

    def test_a_proof_without_a_line_is_no_proof(self, house: House) -> None:
        terms = house.prove(house.open(), Transport.SHARED_MEMORY)

        assert terms.settlements[0].transport is Transport.STREAM

    def test_what_the_broker_says_of_the_line_wins_over_what_the_client_says(
        self, house: House
    ) -> None:
        opened = house.open()
        refusal = Refusal(
            transport=Transport.SHARED_MEMORY,
            reason=RefusalReason.PEER_UNPROVEN,
            message="no pidfd",
        )
        house.ledger.line_unproven(opened.terms.session_id, refusal)

        terms = house.prove(
            opened, failures=(replace(refusal, reason=RefusalReason.PLATFORM, message="?"),)
        )

        assert refusal in terms.settlements[0].refusals

    def test_what_a_client_says_is_cut_short(self, house: House) -> None:
        failure = Refusal(
            transport=Transport.SHARED_MEMORY,
            reason=RefusalReason.PLATFORM,
            message="x" * 1_000_000,
        )

        terms = house.prove(house.open(), failures=(failure,))

        assert max(len(r.message) for r in terms.settlements[0].refusals) <= 300

    def test_what_the_client_met_says_more_than_that_its_line_ended(self, house: House) -> None:
        """Which of the two comes first is chance: a client closes a line that is no use to it."""
        opened = house.open()
        house.line(opened)
        house.ledger.line_ended(opened.terms.session_id, process_alive=True)
        failure = Refusal(
            transport=Transport.SHARED_MEMORY,
            reason=RefusalReason.SLAB_NOT_MAPPABLE,
            message="no descriptor came",
        )

        terms = house.prove(opened, failures=(failure,))

        assert failure in terms.settlements[0].refusals

    def test_a_line_that_ended_before_the_proof_proves_nothing(self, house: House) -> None:
        opened = house.open()
        house.line(opened)
        house.ledger.line_ended(opened.terms.session_id, process_alive=True)

        (settlement,) = house.prove(opened, Transport.SHARED_MEMORY).settlements

        assert settlement.transport is Transport.STREAM
        assert any("line ended" in r.message for r in settlement.refusals)

    def test_happens_once_and_a_retry_gets_the_same(self, house: House) -> None:
        opened = house.open()
        house.line(opened)
        first = house.prove(opened, Transport.SHARED_MEMORY)

        assert house.prove(opened) == first

    def test_who_insists_on_locality_is_refused_with_the_reasons(self, house: House) -> None:
        opened = house.open(replace(STUDENT, locality=Locality.REQUIRE))

        with pytest.raises(SessionRefusedError) as caught:
            house.prove(opened)

        (violation,) = caught.value.violations
        assert violation.rule == "not_proven_local"
        assert violation.facts["shared_memory"] == "PROOF_MISSING"
        with pytest.raises(SessionExpiredError):
            house.ledger.terms(opened.terms.session_id)

    def test_who_insists_and_wants_only_streaming_is_refused_too(self, house: House) -> None:
        student = replace(STUDENT, locality=Locality.REQUIRE, transports=(Transport.STREAM,))

        with pytest.raises(SessionRefusedError, match="wants no transport that shares memory"):
            house.prove(house.open(student))

    def test_who_insists_and_proves_it_is_admitted(self, house: House) -> None:
        opened = house.open(replace(STUDENT, locality=Locality.REQUIRE))
        house.line(opened)

        terms = house.prove(opened, Transport.SHARED_MEMORY)

        assert terms.settlements[0].transport is Transport.SHARED_MEMORY

    def test_nothing_wanted_left_ends_the_session_with_every_refusal(self, house: House) -> None:
        opened = house.open(
            replace(STUDENT, transports=(Transport.SHARED_MEMORY, Transport.CUDA_IPC))
        )

        with pytest.raises(NoCommonTransportError) as caught:
            house.prove(opened)

        assert caught.value.facts == {
            "shared_memory": "PROOF_MISSING",
            "cuda_ipc": "NOT_OFFERED",
        }
        with pytest.raises(SessionExpiredError):
            house.ledger.renew(opened.terms.session_id)

    def test_who_wants_local_alone_from_elsewhere_is_told_what_would_work(
        self, house: House
    ) -> None:
        opened = house.open(replace(STUDENT, transports=(Transport.LOCAL,)))

        with pytest.raises(NoCommonTransportError, match="allow 'shared_memory' or 'stream'"):
            house.prove(opened)

    def test_who_wants_no_transport_is_told_that_the_list_is_empty(self, house: House) -> None:
        opened = house.open(replace(STUDENT, transports=()))

        with pytest.raises(NoCommonTransportError, match="its list of transports is empty"):
            house.prove(opened)

    def test_local_is_not_offered_without_a_secret(self) -> None:
        house = House(local_secret=b"")

        (settlement,) = house.prove(house.open(), Transport.LOCAL).settlements

        assert settlement.refusals[0].reason is RefusalReason.NOT_OFFERED

    def test_the_hello_takes_the_right_nonce_once(self, house: House) -> None:
        opened = house.open()

        with pytest.raises(NotAllowedError):
            house.ledger.check_hello(opened.terms.session_id, b"wrong")
        house.ledger.check_hello(opened.terms.session_id, opened.nonce)
        with pytest.raises(NotAllowedError):
            house.ledger.check_hello(opened.terms.session_id, opened.nonce)


class TestRoom:
    def test_readers_are_barred_from_reserved_room_and_let_in_when_it_is_sealed(
        self, house: House
    ) -> None:
        session = house.sharing()
        extent = house.room()
        slot = (extent.slab_id, extent.slot)
        assert house.slots.marks[slot] == extent.generation - 1

        lease = house.ledger.publish(
            session_id=session, request_id="r", payload=house.payload(extent), extent=extent
        )
        assert house.slots.marks[slot] == extent.generation

        house.ledger.release(session, lease.lease_id)
        assert house.slots.marks[slot] == extent.generation + 1

    def test_a_reservation_given_back_is_free(self, house: House) -> None:
        house.ledger.give_back(house.room(3))

        assert house.used() == (0, 0)

    def test_a_full_pool_says_when_to_come_again(self, house: House) -> None:
        house.room(16)

        with pytest.raises(PoolFullError) as caught:
            house.ledger.reserve(PAGE)

        assert caught.value.retry_after is not None
        assert caught.value.facts["free_bytes"] == 0

    def test_a_payload_that_can_never_fit_is_refused_before_it_is_computed(
        self, house: House
    ) -> None:
        house.ledger.check_fits(16 * PAGE)
        with pytest.raises(PayloadInvalidError, match=r"never.*--pool-size") as caught:
            house.ledger.check_fits(16 * PAGE + 1)
        assert caught.value.retry_after is None

    def test_idle_slabs_are_dropped_and_named_once(self, house: House) -> None:
        extent = house.room()
        assert house.ledger.take_idle_slabs() == []
        house.ledger.give_back(extent)

        assert house.ledger.take_idle_slabs() == [extent.slab_id]
        assert house.ledger.take_idle_slabs() == []

    def test_freed_room_is_told_outside_the_lock(self, house: House) -> None:
        told: list[tuple[int, int]] = []
        house.ledger.on_room_freed(lambda: told.append(house.used()))
        extent = house.room()
        told.clear()

        house.ledger.give_back(extent)

        assert told == [(0, 0)]

    def test_freed_room_is_told_even_where_the_step_fails(self, house: House) -> None:
        told: list[str] = []
        session = house.streaming()
        extent = house.room()
        house.ledger.close_session(session)
        house.ledger.on_room_freed(lambda: told.append("freed"))

        with pytest.raises(SessionExpiredError):
            house.ledger.publish(
                session_id=session, request_id="r", payload=house.payload(extent), extent=extent
            )

        assert told == ["freed"]
        assert house.used() == (0, 0)

    def test_nothing_is_told_where_nothing_came_free(self, house: House) -> None:
        told: list[str] = []
        session = house.streaming()
        house.room()
        house.ledger.on_room_freed(lambda: told.append("freed"))

        house.ledger.renew(session)
        house.ledger.lease_count()

        assert told == []

    def test_more_than_half_in_quarantine_refuses_new_payloads(self, house: House) -> None:
        quarantined(house, pages=8)
        house.ledger.give_back(house.room())
        quarantined(house, pages=1)

        with pytest.raises(PoolFullError, match="quarantine") as caught:
            house.ledger.reserve(PAGE)

        assert caught.value.facts["quarantined_bytes"] == 9 * PAGE
        assert caught.value.retry_after is not None

    def test_what_can_never_fit_is_not_told_to_wait(self, house: House) -> None:
        quarantined(house, pages=9)

        with pytest.raises(PayloadInvalidError, match="never") as caught:
            house.ledger.reserve(17 * PAGE)

        assert caught.value.retry_after is None


def quarantined(house: House, *, pages: int) -> None:
    session = house.sharing()
    house.publish(session, pages=pages)
    house.ledger.line_ended(session, process_alive=True)


class TestLeases:
    def test_say_where_the_bytes_are_to_those_who_share_memory_only(self, house: House) -> None:
        lease, extent = house.publish(house.sharing())

        assert lease.extent == extent
        assert house.acquire(house.in_process(), lease).extent == extent
        assert house.acquire(house.streaming(), lease).extent is None

    def test_a_retry_of_a_request_finds_its_lease(self, house: House) -> None:
        session = house.streaming()
        assert house.ledger.find_request(session, "r") is None

        lease, _ = house.publish(session, request_id="r")

        assert house.ledger.find_request(session, "r") == lease
        assert house.ledger.find_request(house.streaming(), "r") is None

    def test_a_request_answered_twice_keeps_the_first_answer_and_its_room_alone(
        self, house: House
    ) -> None:
        session = house.streaming()
        first, _ = house.publish(session, request_id="r")

        second, _ = house.publish(session, request_id="r")

        assert second == first
        assert house.used() == (1, 0)

    def test_a_retry_of_an_acquire_gets_the_same_lease(self, house: House) -> None:
        lease, _ = house.publish(house.streaming())
        other = house.streaming()

        assert house.acquire(other, lease, "r") == house.acquire(other, lease, "r")
        assert house.ledger.lease_count() == 2

    def test_one_request_cannot_lease_two_payloads(self, house: House) -> None:
        session = house.streaming()
        first, _ = house.publish(session)
        second, _ = house.publish(session)
        house.acquire(session, first, "r")

        with pytest.raises(RequestInvalidError, match="fresh id"):
            house.acquire(session, second, "r")

    def test_room_is_free_when_the_last_of_several_is_gone(self, house: House) -> None:
        session, other = house.sharing(), house.streaming()
        first, _ = house.publish(session)
        second = house.acquire(other, first)

        house.ledger.release(session, first.lease_id)
        assert house.used() == (1, 0)
        house.ledger.release(other, second.lease_id)
        assert house.used() == (0, 0)

    def test_a_payload_without_leases_gives_no_more(self, house: House) -> None:
        session = house.streaming()
        lease, _ = house.publish(session)
        house.ledger.release(session, lease.lease_id)

        with pytest.raises(PayloadRetiredError):
            house.acquire(session, lease)

    def test_returning_one_twice_is_fine(self, house: House) -> None:
        session = house.streaming()
        lease, _ = house.publish(session)

        house.ledger.release(session, lease.lease_id)
        house.ledger.release(session, lease.lease_id)

        assert house.used() == (0, 0)

    def test_another_sessions_cannot_be_returned_nor_read(self, house: House) -> None:
        lease, _ = house.publish(house.streaming())
        thief = house.streaming()

        with pytest.raises(NotAllowedError):
            house.ledger.release(thief, lease.lease_id)
        with pytest.raises(NotAllowedError), house.ledger.pin(thief, lease.lease_id):
            pass
        assert house.used() == (1, 0)

    def test_one_that_comes_after_its_sessions_end_is_too_late(self, house: House) -> None:
        session = house.streaming()
        lease, _ = house.publish(session)
        house.clock.advance(30)
        house.ledger.sweep()

        with pytest.raises(SessionExpiredError, match="nothing is left to return"):
            house.ledger.release(session, lease.lease_id)

    @pytest.mark.parametrize(
        ("changes", "asks"),
        [
            ({"top_k": 7}, "top_k"),
            ({"top_k": 9}, "top_k"),
            ({"vocabulary_size": 101}, "vocabulary_size"),
            ({"temperatures": (1.0, 3.0)}, "temperatures"),
            ({"temperatures": (1.0, 2.0, 3.0)}, "temperatures"),
        ],
    )
    def test_a_payload_made_for_another_session_must_suit_this_one(
        self, house: House, changes: dict[str, object], asks: str
    ) -> None:
        lease, _ = house.publish(house.streaming(), **changes)  # type: ignore[arg-type]
        session = house.streaming(replace(STUDENT, temperatures=(2.0,)[: asks == "temperatures"]))

        with pytest.raises(PayloadInvalidError, match=asks) as refusal:
            house.acquire(session, lease)
        assert {f"payload_{asks}", f"session_{asks}"} == set(refusal.value.facts)


class TestPins:
    def test_show_the_payload_and_where_it_lies(self, house: House) -> None:
        session = house.streaming()
        lease, extent = house.publish(session)

        with house.ledger.pin(session, lease.lease_id) as pinned:
            assert (pinned.payload, pinned.extent) == (lease.payload, extent)

    @pytest.mark.parametrize("end", ["release", "close", "sweep"])
    def test_keep_the_room_whatever_becomes_of_the_lease(self, house: House, end: str) -> None:
        session = house.streaming()
        lease, extent = house.publish(session)
        ends: dict[str, Callable[[], object]] = {
            "release": lambda: house.ledger.release(session, lease.lease_id),
            "close": lambda: house.ledger.close_session(session),
            "sweep": lambda: (house.clock.advance(30), house.ledger.sweep()),
        }

        with house.ledger.pin(session, lease.lease_id):
            ends[end]()
            assert house.used() == (1, 0)
            assert house.slots.lets_in(extent)

        assert house.used() == (0, 0)

    def test_let_go_when_the_reader_fails(self, house: House) -> None:
        session = house.streaming()
        lease, _ = house.publish(session)

        def read() -> None:
            with house.ledger.pin(session, lease.lease_id):
                house.ledger.release(session, lease.lease_id)
                raise RuntimeError("broken pipe")

        with pytest.raises(RuntimeError, match="broken pipe"):
            read()
        assert house.used() == (0, 0)

    def test_need_a_lease(self, house: House) -> None:
        session = house.streaming()
        lease, _ = house.publish(session)
        house.ledger.release(session, lease.lease_id)

        with pytest.raises(LeaseLostError), house.ledger.pin(session, lease.lease_id):
            pass


class TestTheEndOfASession:
    def test_frees_what_is_streamed_when_its_ttl_passes(self, house: House) -> None:
        session = house.streaming()
        house.publish(session)
        house.clock.advance(29)
        assert house.ledger.sweep() == []
        house.clock.advance(1)

        assert house.ledger.sweep() == [session]
        assert house.used() == (0, 0)

    def test_renewal_puts_it_off(self, house: House) -> None:
        session = house.streaming()
        house.clock.advance(20)
        assert house.ledger.renew(session) is False
        house.clock.advance(20)

        assert house.ledger.sweep() == []

    def test_a_returned_lease_puts_it_off(self, house: House) -> None:
        session = house.streaming()
        lease, _ = house.publish(session)
        house.clock.advance(20)
        house.ledger.release(session, lease.lease_id)
        house.clock.advance(20)

        assert house.ledger.sweep() == []

    def test_renewal_does_not_undo_it(self, house: House) -> None:
        session = house.streaming()
        house.clock.advance(30)

        with pytest.raises(SessionExpiredError):
            house.ledger.renew(session)
        house.ledger.sweep()
        with pytest.raises(SessionExpiredError):
            house.ledger.renew(session)

    def test_a_returned_lease_does_not_undo_it_either(self, house: House) -> None:
        session = house.in_process()
        lease, _ = house.publish(session)
        house.clock.advance(30)

        house.ledger.release(session, lease.lease_id)

        with pytest.raises(SessionExpiredError):
            house.ledger.renew(session)

    def test_frees_shared_room_when_the_process_is_dead_and_its_line_ended(
        self, house: House
    ) -> None:
        session = house.sharing()
        house.publish(session)

        house.ledger.line_ended(session, process_alive=False)

        assert house.used() == (0, 0)
        assert house.ledger.view().sessions == ()

    def test_keeps_shared_room_in_quarantine_when_the_process_lives(self, house: House) -> None:
        session = house.sharing()
        _, extent = house.publish(session)

        house.ledger.line_ended(session, process_alive=True)

        assert house.used() == (0, 1)
        assert house.slots.lets_in(extent)
        (lease,) = house.ledger.view().leases
        assert lease.quarantined
        assert house.ledger.lease_count() == 0

    def test_frees_room_in_quarantine_when_it_is_returned_after_all(self, house: House) -> None:
        session = house.sharing()
        lease, _ = house.publish(session)
        house.ledger.line_ended(session, process_alive=True)

        house.ledger.release(session, lease.lease_id)

        assert house.used() == (0, 0)
        assert house.ledger.view().sessions == ()

    def test_room_that_another_session_reads_is_used_and_not_in_quarantine(
        self, house: House
    ) -> None:
        gone, other = house.sharing(), house.streaming()
        lease, _ = house.publish(gone)
        kept = house.acquire(other, lease)

        house.ledger.line_ended(gone, process_alive=True)
        assert house.used() == (1, 0)
        house.ledger.release(other, kept.lease_id)
        assert house.used() == (0, 1)

    def test_quarantines_room_of_this_process_when_its_ttl_passes(self, house: House) -> None:
        session = house.in_process()
        house.publish(session)
        house.clock.advance(30)

        assert house.ledger.sweep() == [session]
        assert house.used() == (0, 1)

    def test_an_ended_session_may_do_nothing(self, house: House) -> None:
        session = house.sharing()
        lease, _ = house.publish(session)
        house.ledger.line_ended(session, process_alive=True)
        steps: list[Callable[[], object]] = [
            lambda: house.ledger.renew(session),
            lambda: house.ledger.profile(session),
            lambda: house.ledger.terms(session),
            lambda: house.ledger.find_request(session, "r"),
            lambda: house.acquire(session, lease),
            lambda: house.publish(session),
            lambda: house.ledger.may_open(session, lease.writer_id),
            lambda: house.ledger.pin(session, lease.lease_id).__enter__(),
        ]

        for step in steps:
            with pytest.raises(SessionExpiredError):
                step()

    def test_a_session_with_a_line_ends_by_its_line_alone(self, house: House) -> None:
        session = house.sharing()
        house.clock.advance(1e9)

        assert house.ledger.sweep() == []
        house.ledger.renew(session)

    def test_a_streaming_session_does_not_mind_the_end_of_its_line(self, house: House) -> None:
        opened = house.open(replace(STUDENT, transports=(Transport.STREAM,)))
        house.line(opened)
        session = house.prove(opened).session_id

        house.ledger.line_ended(session, process_alive=False)

        house.ledger.renew(session)

    def test_the_end_of_an_unknown_line_is_nothing(self, house: House) -> None:
        house.ledger.line_ended(keys.new_id("s", EPOCH), process_alive=False)

    def test_an_opening_session_ends_in_time(self, house: House) -> None:
        session = house.open().terms.session_id
        house.clock.advance(10)

        assert house.ledger.sweep() == [session]
        with pytest.raises(SessionExpiredError):
            house.ledger.prove_locality(session, proofs={}, failures=[])


class TestClosing:
    def test_frees_what_is_streamed(self, house: House) -> None:
        session = house.streaming()
        house.publish(session)

        house.ledger.close_session(session)

        assert house.used() == (0, 0)

    def test_twice_is_fine(self, house: House) -> None:
        for session in (house.streaming(), house.sharing()):
            house.ledger.close_session(session)
            house.ledger.close_session(session)

    def test_of_an_ended_session_leaves_its_room_in_quarantine(self, house: House) -> None:
        session = house.sharing()
        house.publish(session)
        house.ledger.line_ended(session, process_alive=True)

        house.ledger.close_session(session)

        assert house.used() == (0, 1)

    def test_keeps_shared_room_until_it_is_returned(self, house: House) -> None:
        session = house.sharing()
        lease, _ = house.publish(session)

        house.ledger.close_session(session)
        assert house.used() == (1, 0)
        with pytest.raises(SessionExpiredError):
            house.acquire(session, lease)

        house.ledger.release(session, lease.lease_id)
        assert house.used() == (0, 0)

    @pytest.mark.parametrize(
        ("alive", "is_cut", "pages"),
        [(False, False, (0, 0)), (True, False, (0, 0)), (True, True, (0, 1))],
    )
    def test_shared_room_not_returned_shares_the_fate_of_the_line(
        self, house: House, alive: bool, is_cut: bool, pages: tuple[int, int]
    ) -> None:
        session = house.sharing()
        house.publish(session)
        house.ledger.close_session(session)

        house.ledger.line_ended(session, process_alive=alive, is_cut=is_cut)

        assert house.used() == pages

    def test_leaves_nothing_once_the_line_has_ended_too(self, house: House) -> None:
        session = house.sharing()
        house.ledger.close_session(session)
        assert [each.session_id for each in house.ledger.view().sessions] == [session]

        house.ledger.line_ended(session, process_alive=True)

        assert house.ledger.view().sessions == ()

    def test_of_a_session_in_this_process_leaves_nothing_once_all_is_returned(
        self, house: House
    ) -> None:
        session = house.in_process()
        lease, _ = house.publish(session)
        house.ledger.close_session(session)

        house.ledger.release(session, lease.lease_id)

        assert house.ledger.view().sessions == ()
        assert house.used() == (0, 0)


class TestEpochs:
    def test_every_id_of_an_older_server_says_so(self, house: House) -> None:
        session = house.sharing()
        old_session, old = keys.new_id("s", "older"), keys.new_id("x", "older")
        steps: list[Callable[[], object]] = [
            lambda: house.ledger.check_hello(old_session, b""),
            lambda: house.ledger.prove_locality(old_session, proofs={}, failures=[]),
            lambda: house.ledger.renew(old_session),
            lambda: house.ledger.close_session(old_session),
            lambda: house.ledger.profile(old_session),
            lambda: house.ledger.terms(old_session),
            lambda: house.ledger.find_request(old_session, "r"),
            lambda: house.ledger.may_open(old_session, "slab"),
            lambda: house.ledger.acquire(
                session_id=old_session, request_id="r", payload_id=keys.new_id("p", EPOCH)
            ),
            lambda: house.ledger.acquire(session_id=session, request_id="r", payload_id=old),
            lambda: house.ledger.release(old_session, keys.new_id("l", EPOCH)),
            lambda: house.ledger.release(session, old),
            lambda: house.ledger.pin(session, old).__enter__(),
        ]

        for step in steps:
            with pytest.raises(EpochChangedError, match="restarted"):
                step()

    def test_an_id_that_never_was_has_ended(self, house: House) -> None:
        for never in (keys.new_id("s", EPOCH), "", "nonsense", "s-"):
            with pytest.raises(SessionExpiredError):
                house.ledger.renew(never)


class TestSlabs:
    def test_are_for_those_who_share_memory(self, house: House) -> None:
        slab_id = house.room().slab_id

        house.ledger.may_open(house.sharing(), slab_id)
        with pytest.raises(NotAllowedError, match="streaming"):
            house.ledger.may_open(house.streaming(), slab_id)
        with pytest.raises(NotAllowedError, match="ProveLocality"):
            house.ledger.may_open(house.open().terms.session_id, slab_id)

    def test_must_be_in_use(self, house: House) -> None:
        extent = house.room()
        session = house.sharing()
        house.ledger.give_back(extent)
        house.ledger.take_idle_slabs()

        with pytest.raises(NotAllowedError, match="no slab"):
            house.ledger.may_open(session, extent.slab_id)


class TestDraining:
    def test_takes_no_new_sessions_and_lets_the_old_run_out(self, house: House) -> None:
        session = house.streaming()
        opened = house.open(request_id="before")

        house.ledger.drain()

        assert house.ledger.draining
        with pytest.raises(DrainingError):
            house.open()
        assert house.open(request_id="before") == opened
        assert house.ledger.renew(session) is True
        lease, _ = house.publish(session)
        house.acquire(session, lease)
        house.ledger.release(session, lease.lease_id)
        assert house.ledger.lease_count() == 1


class TestTheView:
    def test_shows_sessions_leases_and_the_pool(self, house: House) -> None:
        opened = house.open(replace(STUDENT, student_id="run-7"))
        house.line(opened, pid=4711)
        session = house.prove(opened, Transport.SHARED_MEMORY).session_id
        house.clock.advance(5)
        lease, _ = house.publish(session, pages=2)
        house.clock.advance(2)

        view = house.ledger.view()

        (shown,) = view.sessions
        assert shown.session_id == session
        assert shown.student_id == "run-7"
        assert shown.teacher_id == "teacher"
        assert shown.settlements[0].transport is Transport.SHARED_MEMORY
        assert (shown.liveness, shown.pid) == ("line", 4711)
        assert (shown.age, shown.silent) == (timedelta(seconds=7), timedelta(seconds=7))
        assert (shown.lease_count, shown.leased_bytes) == (1, 2 * PAGE)
        (leased,) = view.leases
        assert leased.lease_id == lease.lease_id
        assert leased.age == timedelta(seconds=2)
        assert view.pool.used_bytes == 2 * PAGE
        assert not view.draining

    def test_counts_silence_from_the_last_sign_of_life(self, house: House) -> None:
        session = house.streaming()
        house.clock.advance(20)
        house.ledger.renew(session)
        house.clock.advance(3)

        (shown,) = house.ledger.view().sessions

        assert shown.silent == timedelta(seconds=3)
        assert shown.liveness == "ttl"


def test_threads_share_the_ledger_without_losing_room() -> None:
    house = House(limits=SmallLimits(pool_size_bytes=64 * PAGE, slab_size_bytes=64 * PAGE))
    house.ledger.give_back(house.room())
    sessions = [house.streaming() for _ in range(4)]
    failures: list[BaseException] = []

    def work(session: str, name: str) -> None:
        try:
            for turn in range(200):
                extent = house.ledger.reserve(PAGE)
                assert isinstance(extent, Extent)
                lease = house.ledger.publish(
                    session_id=session,
                    request_id=f"{name}-{turn}",
                    payload=house.payload(extent),
                    extent=extent,
                )
                with house.ledger.pin(session, lease.lease_id) as pinned:
                    assert house.slots.lets_in(pinned.room)
                house.ledger.release(session, lease.lease_id)
        except (AssertionError, TeacherLogitsError) as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(session, f"t{index}"))
        for index, session in enumerate(sessions)
    ]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that they do get into each other's way
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)

    assert failures == []
    assert house.used() == (0, 0)


class TestGivingARequestUp:
    def test_gives_back_what_it_was_granted(self, house: House) -> None:
        session = house.sharing()
        house.publish(session, request_id="mine")

        house.ledger.release_request(session, "mine")
        house.ledger.release_request(session, "mine")

        assert house.used() == (0, 0)
        assert house.ledger.lease_count() == 0

    def test_leaves_the_room_free_whenever_its_answer_comes(self, house: House) -> None:
        session = house.sharing()
        house.ledger.release_request(session, "mine")

        with pytest.raises(RequestInvalidError, match="given up"):
            house.publish(session, request_id="mine")

        assert house.used() == (0, 0)

    def test_grants_nothing_to_a_retry(self, house: House) -> None:
        session = house.sharing()
        lease, _ = house.publish(session)
        house.ledger.release_request(session, "mine")

        with pytest.raises(RequestInvalidError, match="given up"):
            house.acquire(session, lease, request_id="mine")
        with pytest.raises(RequestInvalidError, match="given up"):
            house.ledger.find_request(session, "mine")

    def test_frees_what_its_session_left_in_quarantine(self, house: House) -> None:
        session = house.sharing()
        house.publish(session, request_id="mine")
        house.ledger.line_ended(session, process_alive=True)
        assert house.used() == (0, 1)

        house.ledger.release_request(session, "mine")

        assert house.used() == (0, 0)

    def test_touches_no_request_of_another_session(self, house: House) -> None:
        house.publish(house.sharing(), request_id="mine")

        house.ledger.release_request(house.sharing(), "mine")

        assert house.used() == (1, 0)

    def test_is_told_that_its_session_has_ended(self, house: House) -> None:
        session = house.streaming()
        house.ledger.close_session(session)

        with pytest.raises(SessionExpiredError):
            house.ledger.release_request(session, "mine")

    def test_is_remembered_for_the_last_4096_of_a_session(self, house: House) -> None:
        session = house.streaming()
        for count in range(LIMIT + 1):
            house.ledger.release_request(session, f"r{count}")

        assert house.ledger.find_request(session, "r0") is None
        with pytest.raises(RequestInvalidError, match="given up"):
            house.ledger.find_request(session, "r1")


def test_an_id_is_good_for_one_request_and_its_retries(house: House) -> None:
    session = house.streaming()
    house.ledger.note_request(session, "mine", b"one")
    house.ledger.note_request(session, "mine", b"one")

    with pytest.raises(RequestInvalidError, match="other rows"):
        house.ledger.note_request(session, "mine", b"another")


class TestAnIdThatWasUsedBefore:
    """Whoever asks for other rows under it never gets the lease of the first request."""

    @staticmethod
    def leased(house: House, digest: bytes = b"first") -> str:
        """A session whose request ``mine`` was scored, and is leased."""
        session, extent = house.sharing(), house.room()
        house.ledger.note_request(session, "mine", digest)
        house.ledger.publish(
            session_id=session,
            request_id="mine",
            payload=house.payload(extent),
            extent=extent,
            digest=digest,
        )
        return session

    def test_is_refused_to_other_rows_as_long_as_the_lease_lives(self, house: House) -> None:
        session = self.leased(house)
        for count in range(LIMIT + 1):  # more than a session remembers
            house.ledger.note_request(session, f"r{count}", b"other")

        assert house.ledger.find_request(session, "mine", b"first") is not None
        with pytest.raises(RequestInvalidError, match="other rows"):
            house.ledger.note_request(session, "mine", b"another")
        with pytest.raises(RequestInvalidError, match="other rows"):
            house.ledger.find_request(session, "mine", b"another")
        house.ledger.note_request(session, "mine", b"first")  # a retry of what was leased

    def test_is_refused_to_an_answer_that_comes_late_and_its_room_is_free(
        self, house: House
    ) -> None:
        session, extent = self.leased(house), house.room()

        with pytest.raises(RequestInvalidError, match="other rows"):
            house.ledger.publish(
                session_id=session,
                request_id="mine",
                payload=house.payload(extent),
                extent=extent,
                digest=b"another",
            )

        assert house.used() == (1, 0)

    def test_by_an_acquire_is_refused_to_a_request_for_scores(self, house: House) -> None:
        session, other = house.sharing(), house.sharing()
        lease, _ = house.publish(session)
        house.acquire(other, lease, request_id="mine")

        with pytest.raises(RequestInvalidError, match="another call"):
            house.ledger.note_request(other, "mine", b"first")
        with pytest.raises(RequestInvalidError, match="another call"):
            house.ledger.find_request(other, "mine", b"first")

    def test_by_a_request_for_scores_is_refused_to_an_acquire(self, house: House) -> None:
        session = self.leased(house)
        lease, _ = house.publish(session)

        with pytest.raises(RequestInvalidError, match="another call"):
            house.acquire(session, lease, request_id="mine")


def test_the_last_lease_and_its_request_can_be_returned_in_one_call(house: House) -> None:
    session = house.sharing()
    lease, _ = house.publish(session, request_id="mine")
    house.ledger.close_session(session)
    house.ledger.line_ended(session, process_alive=True, is_cut=True)

    release(
        house.ledger,
        messages.ReleasePayloadRequest(
            session_id=session, lease_id=lease.lease_id, request_id="mine"
        ),
    )

    assert house.used() == (0, 0)
    assert house.ledger.view().sessions == ()
