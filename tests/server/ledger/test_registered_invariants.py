"""Any order of publishers, students and their ends: rows, room and steps keep their promises."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, TypeVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.server.ledger.registering import PAGE, House, Limits, Publisher, student, teacher

from teacher_logits.errors import (
    NotAllowedError,
    PayloadConflictError,
    PayloadRetiredError,
    PoolFullError,
    ProducerLostError,
    ReservationLapsedError,
    SessionExpiredError,
    SessionRefusedError,
)
from teacher_logits.grid import BatchGrid, rows_of_rank
from teacher_logits.terms import RoomFreed, SlabsGone, StepFailure, StepGrant, StepWithdrawn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits.payload import Extent
    from teacher_logits.terms import Reservation

T = TypeVar("T")
GBS = 12


def drawn(data: st.DataObject, things: Iterable[T]) -> T:
    """One of the things, drawn by its place: ids are random, and examples must not be."""
    listed = list(things)
    return listed[data.draw(st.integers(0, len(listed) - 1))]


@dataclass(kw_only=True)
class Reader:
    session_id: str
    student_id: str
    dp: int
    rank: int
    local: bool
    #: Leases out: lease id -> payload id; and the grant of each.
    leases: dict[str, str] = field(default_factory=dict)
    grants: list[tuple[StepGrant, set[str]]] = field(default_factory=list)
    #: Steps that it was told of before they were sealed.
    announced: dict[int, StepGrant] = field(default_factory=dict)
    #: Steps of which it wants to hear nothing before they are sealed.
    declined: set[int] = field(default_factory=set)
    #: Steps that it gave up when they were withdrawn already, and it had not heard of that.
    crossed: set[int] = field(default_factory=set)
    closed: bool = False
    died: bool = False


@dataclass(kw_only=True)
class Written:
    """A sealed payload, until its room is free."""

    payload_id: str
    publisher: Publisher
    step: int
    extent: Extent


class Registered(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house = House(limits=Limits(pool_size_bytes=24 * PAGE, slab_size_bytes=8 * PAGE))
        self.ledger = self.house.ledger
        self.publishers: dict[int, Publisher] = {}
        self.readers: list[Reader] = []
        #: Payloads that nobody was told to be free; by id.
        self.written: dict[str, Written] = {}
        #: Payloads that are announced, by id.
        self.drafts: dict[str, Written] = {}
        self.doubted: list[tuple[str, str, str]] = []
        self.pins: list[tuple[str, ExitStack]] = []
        self.page = 0
        #: Sessions of publishers that have closed or died.
        self.gone: set[str] = set()
        self.complete: set[int] = set()

    @initialize(
        local=st.lists(st.booleans(), min_size=1, max_size=3),
        student_dp=st.sampled_from([1, 2, 3, 4]),
    )
    def begin(self, local: list[bool], student_dp: int) -> None:
        self.dp, self.student_dp = len(local), student_dp
        for shard, each in enumerate(local):
            self.publish(shard, local=each)
        for rank in range(student_dp):
            self.admit("a", rank, local=rank != 1)
            if rank < self.dp:
                self.write(self.publishers[rank], 0)

    def publish(self, shard: int, *, local: bool) -> None:
        profile = teacher(dp=self.dp, gbs=GBS, shard=shard)
        self.publishers[shard] = self.house.publish_as(profile, local=local)

    def admit(self, name: str, rank: int, *, local: bool) -> None:
        profile = student(dp=self.student_dp, gbs=GBS, rank=rank, student_id=name)
        session_id = self.house.read_as(profile, local=local)
        self.readers.append(
            Reader(
                session_id=session_id,
                student_id=name,
                dp=self.student_dp,
                rank=rank,
                local=local,
            )
        )

    # Publishers

    @rule(data=st.data(), local=st.booleans())
    def come(self, data: st.DataObject, local: bool) -> None:
        missing = [shard for shard in range(self.dp) if shard not in self.publishers]
        shard = drawn(data, missing or range(self.dp))
        if shard in self.publishers:
            profile = teacher(dp=self.dp, gbs=GBS, shard=shard)
            with pytest.raises(SessionRefusedError, match="shard_taken"):
                self.house.publish_as(profile, local=local)
            return
        self.publish(shard, local=local)

    @precondition(lambda self: self.publishers)
    @rule(data=st.data(), step=st.integers(0, 3))
    def register_one(self, data: st.DataObject, step: int) -> None:
        self.write(drawn(data, self.publishers.values()), step)

    @rule(step=st.integers(0, 3), ahead=st.booleans())
    def register_all(self, step: int, ahead: bool) -> None:
        if ahead:
            self.announce(step, wanted=True)
            for reader in self.living():
                self.hear_reader(reader)
            for payload_id in [each for each, draft in self.drafts.items() if draft.step == step]:
                self.seal(payload_id)
        for publisher in self.publishers.values():
            self.write(publisher, step)

    def write(self, publisher: Publisher, step: int) -> None:
        made = self.reserve(publisher, step)
        if made is None:
            return
        if publisher.streams:
            try:
                extent = self.house.take_room(publisher, made.payload_id)
            except PoolFullError:
                self.ledger.abandon_payload(publisher.session_id, made.payload_id)
                return
            self.house.write(publisher, made.payload_id)
            self.house.seal(publisher, made.payload_id)
        else:
            self.page += 1
            extent = self.house.extent(publisher, page=self.page)
            self.house.seal(publisher, made.payload_id, extent=extent)
        self.written[made.payload_id] = Written(
            payload_id=made.payload_id, publisher=publisher, step=step, extent=extent
        )

    def reserve(self, publisher: Publisher, step: int) -> Reservation | None:
        try:
            made = self.house.reserve(publisher, step)
        except (PayloadRetiredError, PayloadConflictError):  # retired, or announced already
            return None
        if made.is_repeat:
            self.ledger.abandon_payload(publisher.session_id, made.payload_id)
            return None
        return made

    @rule(step=st.integers(0, 3), wanted=st.booleans())
    def announce_all(self, step: int, wanted: bool) -> None:
        self.announce(step, wanted=wanted)

    def announce(self, step: int, *, wanted: bool) -> None:
        for reader in self.living() if wanted else ():
            self.want_one(reader, step, 1)
        for publisher in self.publishers.values():
            made = None if publisher.streams else self.reserve(publisher, step)
            if made is not None:
                self.page += 1
                extent = self.house.extent(publisher, page=self.page)
                self.ledger.announce_payload(
                    publisher.session_id, made.payload_id, extent=extent, valid_count=None
                )
                self.drafts[made.payload_id] = Written(
                    payload_id=made.payload_id, publisher=publisher, step=step, extent=extent
                )

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), how=st.sampled_from(["seal", "seal all", "abandon"]))
    def end_announced(self, data: st.DataObject, how: str) -> None:
        for reader in self.living():
            self.hear_reader(reader)
        one = drawn(data, self.drafts)
        for payload_id in list(self.drafts) if how == "seal all" else [one]:
            if how == "abandon":
                self.abandon(payload_id)
            else:
                self.seal(payload_id)

    def abandon(self, payload_id: str) -> None:
        draft = self.drafts.pop(payload_id)
        self.ledger.abandon_payload(draft.publisher.session_id, payload_id)

    def seal(self, payload_id: str) -> None:
        draft = self.drafts.pop(payload_id)
        try:
            self.house.seal(draft.publisher, payload_id, extent=draft.extent)
        except ReservationLapsedError:
            return
        self.written[payload_id] = draft

    @precondition(lambda self: any(reader.announced for reader in self.living()))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        reader = drawn(data, [each for each in self.living() if each.announced])
        self.give_up_one(reader, drawn(data, reader.announced))

    @precondition(lambda self: self.publishers)
    @rule(data=st.data(), step=st.integers(0, 3), abandoned=st.booleans())
    def give_up_all(self, data: st.DataObject, step: int, abandoned: bool) -> None:
        """All who are told of a step give it up, where wanted just after it was withdrawn."""
        self.announce(step, wanted=True)
        for reader in self.living():
            self.hear_reader(reader)
        drafts = [each for each, draft in self.drafts.items() if draft.step == step]
        if abandoned and drafts:
            self.abandon(drawn(data, drafts))
        for reader in self.living():
            if step in reader.announced:
                self.give_up_one(reader, step)

    def give_up_one(self, reader: Reader, step: int) -> None:
        lease_id = reader.announced.pop(step).leases[0].lease_id
        stands = self.ledger.was_announced(reader.session_id, lease_id)
        self.ledger.give_up_announced(reader.session_id, lease_id)
        (reader.declined if stands else reader.crossed).add(step)

    @precondition(lambda self: len(self.publishers) == self.dp)
    @rule(data=st.data(), how=st.sampled_from(["close", "die", "line", "child"]))
    def go(self, data: st.DataObject, how: str) -> None:
        shard = drawn(data, self.publishers)
        publisher = self.publishers.pop(shard)
        self.hear(publisher)
        self.gone.add(publisher.session_id)
        self.drafts = {i: d for i, d in self.drafts.items() if d.publisher is not publisher}
        if how == "close" or publisher.streams:
            self.ledger.close_session(publisher.session_id)
            self.ledger.close_session(publisher.session_id)
        if how == "child" and not publisher.streams:
            self.ledger.process_died(publisher.session_id)
        elif how != "close":
            self.ledger.line_ended(publisher.session_id, process_alive=how == "line")
        self.doubted = [each for each in self.doubted if self.may_be_overwritten(each[2])]

    def may_be_overwritten(self, payload_id: str) -> bool:
        """Whether somebody is there who may write to a payload's room once it is free."""
        publisher = self.written[payload_id].publisher
        return publisher.streams or publisher.session_id not in self.gone

    def hear(self, publisher: Publisher) -> None:
        for each in self.ledger.take_mail(publisher.session_id):
            assert isinstance(each, RoomFreed)
            for payload_id in each.payload_ids:
                self.house.freed[payload_id] += 1
                assert self.written.pop(payload_id).publisher == publisher
                assert payload_id not in self.held()

    # Readers

    @precondition(lambda self: len(self.publishers) == self.dp)
    @rule(data=st.data(), local=st.booleans(), name=st.sampled_from("ab"))
    def read(self, data: st.DataObject, local: bool, name: str) -> None:
        there = {each.rank for each in self.living() if each.student_id == name}
        missing = [rank for rank in range(self.student_dp) if rank not in there]
        if missing:
            self.admit(name, drawn(data, missing), local=local)
            return
        with pytest.raises(SessionRefusedError, match="rank_taken"):
            self.admit(name, drawn(data, range(self.student_dp)), local=local)

    def living(self) -> list[Reader]:
        return [reader for reader in self.readers if not reader.closed]

    def granted(self, reader: Reader, grant: StepGrant) -> None:
        """Whatever is granted is the rank's rows, each once, in global order, and readable."""
        grid = BatchGrid(global_batch_size=GBS, data_parallel_size=reader.dp, micro_batch_size=1)
        mine = rows_of_rank(grid, reader.rank)
        rows: list[int] = []
        for lease in grant.leases:
            payload = lease.payload
            held = range(payload.first_row, payload.first_row + payload.row_count)
            shown = [row for row in held if row in mine]
            if lease.extent is None:
                assert list(held) == shown, "a streamed lease has rows of another rank"
            else:
                assert lease.extent == self.written[payload.payload_id].extent
                if not reader.closed:
                    self.ledger.may_open(reader.session_id, lease.extent.slab_id)
            rows += shown
            reader.leases[lease.lease_id] = payload.payload_id
        assert rows == list(mine)
        reader.grants.append((grant, {lease.lease_id for lease in grant.leases}))

    @precondition(lambda self: self.living())
    @rule(data=st.data(), step=st.integers(0, 3))
    def take(self, data: st.DataObject, step: int) -> None:
        self.take_one(drawn(data, self.living()), step)

    def take_one(self, reader: Reader, step: int) -> None:
        try:
            grant = self.ledger.take_step(reader.session_id, self.house.name(), step)
        except (PayloadRetiredError, ProducerLostError):
            return
        if grant is not None:
            self.granted(reader, grant)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), first=st.integers(0, 3), count=st.integers(1, 3))
    def want(self, data: st.DataObject, first: int, count: int) -> None:
        self.want_one(drawn(data, self.living()), first, count)

    def want_one(self, reader: Reader, first: int, count: int) -> None:
        self.ledger.want_steps(reader.session_id, first, count)
        reader.declined &= {*range(first, first + count)}
        self.hear_reader(reader, asked=first)

    def hear_reader(self, reader: Reader, *, asked: int | None = None) -> None:
        sent = Counter[int]()
        for _ in range(2):
            for each in self.ledger.take_mail(reader.session_id):
                if isinstance(each, SlabsGone):
                    lies_in = {self.written[held].extent.slab_id for held in self.held()}
                    assert not lies_in & set(each.slab_ids)
                    continue
                if isinstance(each, StepWithdrawn):
                    terms = reader.announced.pop(each.step, None)
                    assert (terms is None) == (each.step in reader.crossed)
                    reader.crossed.discard(each.step)
                    continue
                assert isinstance(each, StepGrant | StepFailure)
                sent[each.step] += 1
                if isinstance(each, StepGrant) and each.awaited:
                    assert each.step not in reader.announced
                    assert each.step not in reader.declined
                    reader.announced[each.step] = each
                elif isinstance(each, StepGrant):
                    assert each.step not in reader.announced
                    self.granted(reader, each)
                else:
                    assert asked in (None, each.step)
        assert max(sent.values(), default=0) <= 1
        assert not reader.crossed, "a step was withdrawn, and its reader is not told"

    @precondition(lambda self: self.living())
    @rule(step=st.integers(0, 3), keep=st.integers(0, 1))
    def read_all(self, step: int, keep: bool) -> None:
        for reader in self.living():
            self.take_one(reader, step)
        for reader in self.readers[keep:]:
            for grant, lease_ids in reader.grants:
                for lease_id in lease_ids & set(reader.leases) if grant.step == step else ():
                    del reader.leases[lease_id]
                    self.ledger.release(reader.session_id, lease_id)

    @precondition(lambda self: any(reader.leases for reader in self.readers))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = drawn(data, [each for each in self.readers if each.leases])
        lease_id = drawn(data, reader.leases)
        del reader.leases[lease_id]
        self.ledger.release(reader.session_id, lease_id, unread=data.draw(st.booleans()))
        if not reader.closed:
            self.ledger.release(reader.session_id, lease_id)
        for other in self.living():
            if other is not reader and other.leases:
                foreign = next(iter(other.leases))
                try:
                    self.ledger.release(reader.session_id, foreign)
                except (NotAllowedError, SessionExpiredError):
                    continue
                raise AssertionError("a session returned another's lease")

    @precondition(lambda self: any(r.leases and not r.closed for r in self.readers))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        reader = drawn(data, [each for each in self.living() if each.leases])
        lease_id = drawn(data, reader.leases)
        stack = ExitStack()
        pinned = stack.enter_context(self.ledger.pin(reader.session_id, lease_id))
        assert pinned.extent == self.written[pinned.payload.payload_id].extent
        end = max(each.source_offset_bytes + each.size_bytes for each in pinned.segments)
        assert end <= pinned.extent.size_bytes
        self.pins.append((pinned.payload.payload_id, stack))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        _, stack = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        stack.close()

    @precondition(lambda self: len(self.living()) > 1)
    @rule(data=st.data(), how=st.sampled_from(["close", "die", "line", "cut", "reclaim", "child"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        reader = drawn(data, self.readers)
        shares = [
            (reader.session_id, lease_id, payload_id)
            for lease_id, payload_id in reader.leases.items()
            if self.may_be_overwritten(payload_id)
        ]
        if how in ("close", "child") and reader.local:
            if how == "close":
                self.ledger.close_session(reader.session_id)
            else:
                self.ledger.process_died(reader.session_id)
            reader.closed, reader.died = True, reader.died or how == "child"
            return
        self.readers.remove(reader)
        if how == "reclaim" and not reader.closed:
            self.ledger.reclaim_session(reader.session_id)
        elif reader.local:
            lives = how in ("line", "cut")
            self.ledger.line_ended(reader.session_id, process_alive=lives, is_cut=how == "cut")
            if how == "cut" or (how == "line" and (reader.died or not reader.closed)):
                self.doubted += shares
        else:
            self.ledger.close_session(reader.session_id)

    @precondition(lambda self: self.doubted)
    @rule(data=st.data())
    def return_after_all(self, data: st.DataObject) -> None:
        session_id, lease_id, _ = self.doubted.pop(data.draw(st.integers(0, len(self.doubted) - 1)))
        self.ledger.release(session_id, lease_id)

    # What always holds

    def held(self) -> set[str]:
        """Payloads whose room somebody may be looking at."""
        return {
            *(payload_id for reader in self.readers for payload_id in reader.leases.values()),
            *(payload_id for payload_id, _ in self.pins),
            *(payload_id for _, _, payload_id in self.doubted),
        }

    @invariant()
    def a_step_that_was_announced_is_granted_whole_with_its_last_seal(self) -> None:
        out = {lease.lease_id for lease in self.ledger.view().leases}
        for reader in self.readers:
            for step, terms in list(reader.announced.items()):
                told = {lease.lease_id for lease in terms.leases}
                if told & out:
                    assert told <= out
                    del reader.announced[step]
                    self.granted(reader, terms)

    @invariant()
    def room_is_told_to_be_free_once_and_not_while_it_is_held(self) -> None:
        for publisher in self.publishers.values():
            self.hear(publisher)
        assert max(self.house.freed.values(), default=0) <= 1

    @invariant()
    def what_is_held_is_there(self) -> None:
        view = self.ledger.view()
        there = {lease.payload_id for lease in view.leases}
        assert there == {
            *(payload_id for reader in self.readers for payload_id in reader.leases.values()),
            *(payload_id for _, _, payload_id in self.doubted),
        }
        for payload_id in self.held():
            written = self.written[payload_id]
            if written.publisher.streams:
                assert self.house.slots.lets_in(written.extent)

    @invariant()
    def room_is_taken_apart(self) -> None:
        streamed = [w.extent for w in self.written.values() if w.publisher.streams]
        live = [extent for extent in streamed if self.house.slots.lets_in(extent)]
        for one, other in combinations(live, 2):
            apart = (
                one.slab_id != other.slab_id
                or one.offset_bytes + one.size_bytes <= other.offset_bytes
                or other.offset_bytes + other.size_bytes <= one.offset_bytes
            )
            assert apart, f"{one} and {other} overlap"
        pool = self.ledger.view().pool
        assert pool.used_bytes + pool.quarantined_bytes == sum(e.size_bytes for e in live)

    @invariant()
    def steps_that_every_rank_has_read_are_gone(self) -> None:
        for step in self.ledger.view().steps:
            has_reader = any(not reader.closed or reader.leases for reader in self.readers)
            if step.stage == "complete" and has_reader:
                assert step.waiting_ranks, f"step {step.step} waits for nobody and is kept"

    def teardown(self) -> None:
        for _, stack in self.pins:
            stack.close()
        for reader in self.readers:
            self.ledger.close_session(reader.session_id)
            self.ledger.line_ended(reader.session_id, process_alive=False)
        for session_id, lease_id, _ in self.doubted:
            self.ledger.release(session_id, lease_id)
        for publisher in self.publishers.values():
            self.ledger.close_session(publisher.session_id)
            self.ledger.line_ended(publisher.session_id, process_alive=False)
        for session_id in self.gone:
            self.ledger.line_ended(session_id, process_alive=False)
        view = self.ledger.view()
        assert not view.leases
        assert not view.sessions


Registered.TestCase.settings = settings(stateful_step_count=50, max_examples=60)
TestRegistered = Registered.TestCase


class TheFirst:
    """Draws for rules: the first of whatever there is."""

    def draw(self, strategy: st.SearchStrategy[int]) -> int:
        return 0


class TestFoundOnce:
    def test_a_reader_gives_up_what_was_withdrawn_before_it_hears_of_that(self) -> None:
        machine, first = Registered(), cast("st.DataObject", TheFirst())
        machine.begin(local=[True], student_dp=1)
        machine.announce_all(1, wanted=False)
        machine.want(first, first=1, count=1)
        machine.go(first, how="close")
        machine.give_up(first)
        machine.register_all(0, ahead=True)
        machine.come(first, local=True)
        machine.register_all(1, ahead=True)
        machine.teardown()
