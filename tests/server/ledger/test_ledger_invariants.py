"""Pool and ledger under any order of events: no byte is given out twice, lost, or let go early.

A model keeps, by the rules of `handshake` and `registry` alone, who holds what; the control
pages are replaced by a watcher that follows each slot's numbers.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.some_payload import some_payload

from teacher_logits import keys
from teacher_logits.clock import ManualClock
from teacher_logits.errors import PayloadRetiredError, PoolFullError, SessionExpiredError
from teacher_logits.grid import BatchGrid
from teacher_logits.payload import Extent
from teacher_logits.pool import Growth
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.transport import Transport, proof_of
from teacher_logits_server.ledger import Ledger
from teacher_logits_server.limit_settings import LimitSettings
from teacher_logits_server.publishers.engines import EngineTeacher

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = 4096
EPOCH = "0123456789ab"
SECRET, CHALLENGE = b"secret", b"challenge"
TTL, OPENING_TTL = 30.0, 10.0
TEACHER = TeacherProfile(
    teacher_id="teacher", vocabulary_size=100, head_rows=100, top_k=64, max_row_tokens=512
)
STUDENT = StudentProfile(
    batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1), top_k=8
)


@dataclass(frozen=True, kw_only=True)
class Limits(LimitSettings):
    session_ttl: timedelta = timedelta(seconds=TTL)
    renew_interval: timedelta = timedelta(seconds=10)
    opening_ttl: timedelta = timedelta(seconds=OPENING_TTL)
    default_wait: timedelta = timedelta(seconds=20)
    max_sessions: int = 1000
    max_request_tokens: int = 4096
    pool_size_bytes: int = 24 * PAGE
    slab_size_bytes: int = 8 * PAGE
    max_quarantine: float = 0.5
    keep_steps: int = 0
    keep_deserted: timedelta = timedelta(seconds=60)


T = TypeVar("T")


def drawn(data: st.DataObject, things: Iterable[T]) -> T:
    """One of the things, drawn by its place: ids are random, and examples must not be."""
    listed = list(things)
    return listed[data.draw(st.integers(0, len(listed) - 1))]


class Watcher:
    """Control pages: each slot's numbers rise, and say which extents are taken and readable."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], int] = {}
        self.taken: dict[tuple[str, int], Extent] = {}

    def mark(self, extent: Extent, generation: int) -> None:
        slot = (extent.slab_id, extent.slot)
        before = self.numbers.get(slot, 1)
        assert extent.generation % 2 == 0, "an extent's own number is the readable one"
        if generation == extent.generation - 1:
            assert slot not in self.taken, "a slot is reserved while it is taken"
            assert generation >= before, "a generation fell"
            self.taken[slot] = extent
        else:
            assert self.taken[slot] == extent, "a slot was marked for another extent"
            assert generation > before, "a generation did not rise"
        if generation == extent.generation + 1:
            del self.taken[slot]
        self.numbers[slot] = generation

    def readable(self) -> list[Extent]:
        return [e for slot, e in self.taken.items() if self.numbers[slot] == e.generation]


@dataclass(kw_only=True)
class ModelSession:
    session_id: str
    #: None while opening.
    transport: Transport | None = None
    has_line: bool = False
    heard_at: float
    closed: bool = False

    @property
    def shares_memory(self) -> bool:
        return self.transport in (Transport.LOCAL, Transport.SHARED_MEMORY)


@dataclass(kw_only=True)
class ModelPayload:
    payload_id: str
    extent: Extent
    leases: Counter[str] = field(default_factory=Counter)
    pins: int = 0
    doubts: int = 0

    @property
    def is_held(self) -> bool:
        return bool(self.leases.total() or self.pins or self.doubts)

    @property
    def is_in_quarantine(self) -> bool:
        return bool(self.doubts) and not self.leases.total() and not self.pins


@dataclass(frozen=True, kw_only=True)
class ModelLease:
    lease_id: str
    session_id: str
    payload: ModelPayload


class House(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.watcher = Watcher()
        self.ledger = Ledger(
            epoch=EPOCH,
            limits=Limits(),
            engines=(EngineTeacher(profile=TEACHER),),
            clock=self.clock,
            slots=self.watcher,
            offered=frozenset({Transport.LOCAL, Transport.SHARED_MEMORY, Transport.STREAM}),
            local_secret=SECRET,
        )
        self.sessions: dict[str, ModelSession] = {}
        self.ended: list[str] = []
        self.reserved: list[Extent] = []
        self.payloads: list[ModelPayload] = []
        self.leases: dict[str, ModelLease] = {}
        self.doubted: dict[str, ModelLease] = {}
        self.pins: list[tuple[ModelPayload, ExitStack]] = []
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"n{self._count}"

    # The model's own rules

    def working(self) -> list[str]:
        return [s.session_id for s in self.sessions.values() if s.transport and not s.closed]

    def lend(self, session_id: str, lease_id: str, payload: ModelPayload) -> None:
        lease = ModelLease(lease_id=lease_id, session_id=session_id, payload=payload)
        self.leases[lease_id] = lease
        payload.leases[session_id] += 1

    def end_session(self, session_id: str, *, doubtful: bool) -> None:
        del self.sessions[session_id]
        self.ended.append(session_id)
        for lease in [x for x in self.leases.values() if x.session_id == session_id]:
            del self.leases[lease.lease_id]
            lease.payload.leases[session_id] -= 1
            if doubtful:
                self.doubted[lease.lease_id] = lease
                lease.payload.doubts += 1

    # Events

    @rule(kind=st.sampled_from(["opening", "stream", "line", "in process"]))
    def open(self, kind: str) -> None:
        opened = self.ledger.open_session(
            request_id=self.name(), protocol_version=PROTOCOL_VERSION, profile=STUDENT
        )
        session_id = opened.terms.session_id
        session = ModelSession(session_id=session_id, heard_at=self.clock.now())
        self.sessions[session_id] = session
        if kind == "opening":
            return
        proofs = {}
        if kind == "line":
            self.ledger.check_hello(session_id, opened.nonce)
            self.ledger.line_opened(session_id, pid=1, challenge=CHALLENGE)
            session.has_line = True
            transport, read = Transport.SHARED_MEMORY, CHALLENGE
            proofs[transport] = proof_of(read, nonce=opened.nonce, transport=transport)
        if kind == "in process":
            transport, read = Transport.LOCAL, SECRET
            proofs[transport] = proof_of(read, nonce=opened.nonce, transport=transport)
        terms = self.ledger.prove_locality(session_id, proofs=proofs, failures=[])
        session.transport = terms.settlements[0].transport

    @rule(pages=st.integers(1, 9))
    def reserve(self, pages: int) -> None:
        try:
            answer = self.ledger.reserve(pages * PAGE)
            if isinstance(answer, Growth):
                self.ledger.add_slab(self.name(), answer.size_bytes)
                answer = self.ledger.reserve(pages * PAGE)
        except PoolFullError:
            return
        assert isinstance(answer, Extent)
        assert answer.size_bytes == pages * PAGE
        self.reserved.append(answer)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        extent = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.ledger.give_back(extent)

    @rule()
    def drop_idle_slabs(self) -> None:
        used = {extent.slab_id for extent in self.watcher.taken.values()}

        assert not used & set(self.ledger.take_idle_slabs())

    @precondition(lambda self: self.reserved and (self.working() or self.ended))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        extent = self.reserved.pop()
        session_id = drawn(data, [*self.working(), *self.ended])
        payload = some_payload(
            payload_id=keys.new_id("p", EPOCH),
            top_k=8,
            vocabulary_size=100,
            size_bytes=extent.size_bytes,
        )
        publish = partial(
            self.ledger.publish, session_id=session_id, request_id=self.name(), extent=extent
        )
        if session_id in self.ended:
            with pytest.raises(SessionExpiredError):
                publish(payload=payload)
            return
        lease = publish(payload=payload)
        assert (lease.extent == extent) == self.sessions[session_id].shares_memory
        sealed = ModelPayload(payload_id=payload.payload_id, extent=extent)
        self.payloads.append(sealed)
        self.lend(session_id, lease.lease_id, sealed)

    @precondition(lambda self: self.payloads and self.working())
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        payload = drawn(data, self.payloads)
        session_id = drawn(data, self.working())
        acquire = {
            "session_id": session_id,
            "request_id": self.name(),
            "payload_id": payload.payload_id,
        }
        if not payload.leases.total():
            with pytest.raises(PayloadRetiredError):
                self.ledger.acquire(**acquire)
            return
        self.lend(session_id, self.ledger.acquire(**acquire).lease_id, payload)
        self.sessions[session_id].heard_at = self.clock.now()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(drawn(data, self.leases))
        session = self.sessions[lease.session_id]
        lease.payload.leases[lease.session_id] -= 1
        self.ledger.release(lease.session_id, lease.lease_id)
        if not session.closed:
            session.heard_at = self.clock.now()
            self.ledger.release(lease.session_id, lease.lease_id)
        elif not session.has_line and not self.held_by(lease.session_id):
            self.end_session(lease.session_id, doubtful=False)

    def held_by(self, session_id: str) -> int:
        return sum(payload.leases[session_id] for payload in self.payloads)

    @precondition(lambda self: self.doubted)
    @rule(data=st.data())
    def return_after_all(self, data: st.DataObject) -> None:
        lease = self.doubted.pop(drawn(data, self.doubted))
        lease.payload.doubts -= 1
        self.ledger.release(lease.session_id, lease.lease_id)

    @precondition(lambda self: any(x.session_id in self.working() for x in self.leases.values()))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        working = self.working()
        readable = [x for x in self.leases.values() if x.session_id in working]
        lease = drawn(data, readable)
        stack = ExitStack()
        pinned = stack.enter_context(self.ledger.pin(lease.session_id, lease.lease_id))
        assert pinned.extent == lease.payload.extent
        lease.payload.pins += 1
        self.pins.append((lease.payload, stack))
        self.sessions[lease.session_id].heard_at = self.clock.now()

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        payload, stack = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        payload.pins -= 1
        stack.close()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session_id = drawn(data, self.sessions)
        session = self.sessions[session_id]
        self.ledger.close_session(session_id)
        session.closed = True
        nothing_left = not session.has_line and not self.held_by(session_id)
        if not session.shares_memory or nothing_left:
            self.end_session(session_id, doubtful=False)

    @precondition(lambda self: any(s.has_line for s in self.sessions.values()))
    @rule(data=st.data(), process_alive=st.booleans())
    def end_line(self, data: st.DataObject, process_alive: bool) -> None:
        lined = [s.session_id for s in self.sessions.values() if s.has_line]
        session_id = drawn(data, lined)
        was_closed = self.sessions[session_id].closed  # a client ends its line with its last view
        self.ledger.line_ended(session_id, process_alive=process_alive)
        self.end_session(session_id, doubtful=process_alive and not was_closed)

    @rule(seconds=st.sampled_from([1.0, OPENING_TTL, TTL]))
    def wait_and_sweep(self, seconds: float) -> None:
        now = self.clock.advance(seconds)
        expected = {
            s.session_id
            for s in self.sessions.values()
            if not s.has_line
            and now - s.heard_at >= (TTL if s.transport or s.closed else OPENING_TTL)
        }
        for session_id in expected:
            with pytest.raises(SessionExpiredError):
                self.ledger.renew(session_id)

        assert set(self.ledger.sweep()) == expected

        for session_id in [s for s in self.sessions if s in expected]:
            self.end_session(session_id, doubtful=self.sessions[session_id].shares_memory)

    @precondition(lambda self: self.working())
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        session_id = drawn(data, self.working())
        self.ledger.renew(session_id)
        self.sessions[session_id].heard_at = self.clock.now()

    # What always holds

    @invariant()
    def taken_extents_lie_apart(self) -> None:
        for one, other in combinations(self.watcher.taken.values(), 2):
            apart = (
                one.slab_id != other.slab_id
                or one.offset_bytes + one.size_bytes <= other.offset_bytes
                or other.offset_bytes + other.size_bytes <= one.offset_bytes
            )
            assert apart, f"{one} and {other} overlap"

    @invariant()
    def room_is_taken_exactly_while_it_is_reserved_or_held(self) -> None:
        self.payloads = [payload for payload in self.payloads if payload.is_held]
        held = [payload.extent for payload in self.payloads]

        assert Counter(self.watcher.taken.values()) == Counter(self.reserved + held)
        assert Counter(self.watcher.readable()) == Counter(held)

    @invariant()
    def bytes_add_up(self) -> None:
        pool = self.ledger.view().pool
        quarantined = sum(p.extent.size_bytes for p in self.payloads if p.is_in_quarantine)
        taken = sum(extent.size_bytes for extent in self.watcher.taken.values())

        assert pool.quarantined_bytes == quarantined
        assert pool.used_bytes == taken - quarantined
        assert pool.used_bytes + pool.quarantined_bytes + pool.free_bytes == pool.budget_bytes
        assert taken <= pool.committed_bytes <= pool.budget_bytes
        assert pool.extent_count == len(self.watcher.taken)

    @invariant()
    def every_lease_is_there_until_it_ends(self) -> None:
        shown = {lease.lease_id: lease.quarantined for lease in self.ledger.view().leases}
        assert shown == dict.fromkeys(self.leases, False) | dict.fromkeys(self.doubted, True)
        assert self.ledger.lease_count() == len(self.leases)

    @invariant()
    def ended_sessions_never_come_back(self) -> None:
        for session_id in self.ended:
            with pytest.raises(SessionExpiredError):
                self.ledger.renew(session_id)
            self.ledger.close_session(session_id)

    def teardown(self) -> None:
        for _, stack in self.pins:
            stack.close()


House.TestCase.settings = settings(stateful_step_count=40, max_examples=60)
TestHouse = House.TestCase
