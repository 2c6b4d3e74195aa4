"""Who computes what over replicas that die, hang and come back: nothing lost, nothing doubled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from teacher_logits_server.replicas.dispatch import PASSES_A_REPLICA, Dispatch
from teacher_logits_server.replicas.instructions import (
    Drop,
    Fail,
    Instruction,
    Kill,
    Patience,
    Piece,
    Send,
    Start,
)
from teacher_logits_server.replicas.lives import State

SOON, LATE = 100.0, 1e9
PATIENCE = Patience(start=50.0, answer=20.0)


def table(replica_count: int = 2) -> Dispatch:
    return Dispatch(replica_count=replica_count, patience=PATIENCE)


def one(key: int, tokens: int = 10) -> list[Piece]:
    return [Piece(key=key, tokens=tokens)]


def sends(instructions: list[Instruction]) -> list[Send]:
    return [each for each in instructions if isinstance(each, Send)]


def where(instructions: list[Instruction]) -> list[tuple[int, list[int]]]:
    """Of each pass that is sent: the replica, and the keys of its pieces."""
    return [(each.replica, [p.key for p in each.pieces]) for each in sends(instructions)]


class TestLoad:
    def test_a_pass_goes_to_the_replica_with_the_fewest_tokens_outstanding(self) -> None:
        dispatch = table()
        assert where(dispatch.add(one(1, 100), deadline=LATE, now=0)) == [(0, [1])]
        assert where(dispatch.add(one(2, 10), deadline=LATE, now=0)) == [(1, [2])]
        assert where(dispatch.add(one(3, 50), deadline=LATE, now=0)) == [(1, [3])]
        assert dispatch.outstanding(1) == (2, 60)

    def test_a_replica_has_one_pass_behind_the_one_that_it_computes_and_no_more(self) -> None:
        dispatch = table(1)
        assert dispatch.room == PASSES_A_REPLICA
        sent = [dispatch.add(one(key), deadline=LATE, now=0) for key in range(3)]
        assert [where(each) for each in sent] == [[(0, [0])], [(0, [1])], []]
        assert dispatch.room == 0
        [first] = sends(sent[0])
        used, then = dispatch.answered(first.attempt, now=1)
        assert used
        assert where(then) == [(0, [2])]

    def test_passes_are_over_in_any_order(self) -> None:
        dispatch = table()
        attempts = [sends(dispatch.add(one(k), deadline=LATE, now=0))[0].attempt for k in range(4)]
        for attempt in reversed(attempts):
            assert dispatch.answered(attempt, now=1) == (True, [])
        assert dispatch.outstanding(0) == dispatch.outstanding(1) == (0, 0)


class TestDeath:
    def test_a_dead_replica_is_started_anew_and_its_pieces_are_each_retried_alone(self) -> None:
        dispatch = table()
        dispatch.add([Piece(key=1, tokens=5), Piece(key=2, tokens=5)], deadline=LATE, now=0)
        told = dispatch.died(0, 0, reason="gone", now=1)
        assert told[0] == Start(replica=0, life=2)
        assert where(told) == [(1, [1])]
        [retry] = sends(told)
        assert where(dispatch.add(one(3), deadline=LATE, now=1)) == []  # it has 1 for itself
        used, then = dispatch.answered(retry.attempt, now=2)
        assert used
        assert where(then) == [(1, [2])]
        assert where(dispatch.started(0, 2, now=3)) == [(0, [3])]

    def test_a_second_loss_fails_the_piece_and_nothing_else(self) -> None:
        dispatch = table()
        dispatch.add([Piece(key=1, tokens=5), Piece(key=2, tokens=5)], deadline=LATE, now=0)
        dispatch.died(0, 0, reason="gone", now=1)
        told = dispatch.died(1, 1, reason="out of memory", now=2)
        [failed] = [each for each in told if isinstance(each, Fail)]
        assert ([p.key for p in failed.pieces], failed.reason, failed.lost) == (
            [1],
            "out of memory",
            2,
        )
        assert where(dispatch.started(0, 2, now=3)) == [(0, [2])]

    def test_what_a_former_life_says_is_no_news(self) -> None:
        dispatch = table()
        [sent] = sends(dispatch.add(one(1), deadline=LATE, now=0))
        [_, retry] = dispatch.died(0, 0, reason="gone", now=1)
        assert dispatch.died(0, 0, reason="gone", now=1) == []
        assert dispatch.start_failed(0, 0, reason="no", now=1) == []
        assert dispatch.answered(sent.attempt, now=1) == (False, [])
        assert dispatch.started(0, 0, now=1) == []
        assert isinstance(retry, Send)
        assert dispatch.answered(retry.attempt, now=2)[0]

    def test_one_that_dies_again_and_again_is_started_after_longer_and_longer_pauses(self) -> None:
        dispatch = table(1)
        now, life, pauses = 0.0, 0, []
        for _ in range(5):
            told = dispatch.died(0, life, reason="gone", now=now)
            died = now
            while not (begun := [each for each in told if isinstance(each, Start)]):
                due = dispatch.next_due
                assert due is not None
                now = due
                told = dispatch.tick(now)
            pauses.append(now - died)
            life = begun[0].life
            dispatch.started(0, life, now=now)
        assert pauses == [0, 1, 2, 4, 8]
        assert dispatch.replica(0).restarts == 5

    def test_an_answer_ends_the_pauses(self) -> None:
        dispatch = table(1)
        [begun] = dispatch.died(0, 0, reason="gone", now=0)
        assert isinstance(begun, Start)
        dispatch.started(0, begun.life, now=1)
        [sent] = sends(dispatch.add(one(1), deadline=LATE, now=1))
        dispatch.answered(sent.attempt, now=2)
        told = dispatch.died(0, begun.life, reason="gone", now=3)
        assert [type(each) for each in told] == [Start]


class TestNobodyLeft:
    def test_when_all_are_down_what_waits_fails_with_the_reason_and_so_does_what_comes(
        self,
    ) -> None:
        dispatch = table()
        lives = {}
        for number in (0, 1):
            for each in dispatch.died(number, number, reason="gone", now=1):
                if isinstance(each, Start):
                    lives[number] = each.life
        assert dispatch.refusal is None  # they are being started
        assert dispatch.add(one(1), deadline=LATE, now=1) == []
        assert dispatch.start_failed(0, lives[0], reason="no such model", now=2) == []
        told = dispatch.start_failed(1, lives[1], reason="no such model", now=2)
        assert [(type(each), getattr(each, "reason", "")) for each in told] == [
            (Fail, "no such model")
        ]
        assert dispatch.refusal == "no such model"
        assert [type(e) for e in dispatch.add(one(2), deadline=LATE, now=3)] == [Fail]

    def test_one_that_is_down_is_tried_again_and_serves_when_it_is_there(self) -> None:
        dispatch = table(1)
        [begun] = dispatch.died(0, 0, reason="gone", now=0)
        assert isinstance(begun, Start)
        dispatch.start_failed(0, begun.life, reason="no room", now=1)
        due = dispatch.next_due
        assert due is not None
        [again] = dispatch.tick(due)
        assert isinstance(again, Start)
        assert dispatch.refusal == "no room"
        dispatch.started(0, again.life, now=due + 1)
        assert dispatch.refusal is None
        assert where(dispatch.add(one(1), deadline=LATE, now=due + 1)) == [(0, [1])]

    def test_a_start_that_takes_too_long_is_ended(self) -> None:
        dispatch = table(1)
        [begun] = dispatch.died(0, 0, reason="gone", now=0)
        assert isinstance(begun, Start)
        assert dispatch.tick(PATIENCE.start) == [Kill(replica=0, life=begun.life)]
        assert "did not start" in str(dispatch.refusal)


class TestHanging:
    def test_one_that_does_not_answer_by_the_deadline_takes_no_more_and_loses_the_rest(
        self,
    ) -> None:
        dispatch = table()
        dispatch.add(one(1, 10), deadline=SOON, now=0)
        dispatch.add(one(2, 99), deadline=LATE, now=0)
        dispatch.add(one(3, 10), deadline=LATE, now=0)
        assert dispatch.next_due == SOON
        told = dispatch.tick(SOON)
        assert told[0] == Drop(pieces=(Piece(key=1, tokens=10),))
        assert dispatch.replica(0).state is State.UNRESPONSIVE
        assert dispatch.outstanding(0) == (0, 0)
        [busy] = range(1, 2)
        assert dispatch.outstanding(busy) == (1, 99)
        told = dispatch.died(busy, busy, reason="gone", now=SOON + 1)
        assert [e for e in told if isinstance(e, Fail)] == []  # 3 waits, lost once

    def test_an_answer_that_comes_late_is_not_used_and_shows_that_it_lives(self) -> None:
        dispatch = table()
        [sent] = sends(dispatch.add(one(1), deadline=SOON, now=0))
        dispatch.tick(SOON)
        assert dispatch.answered(sent.attempt, now=SOON + 1) == (False, [])
        assert dispatch.replica(0).state is State.READY

    def test_one_that_stays_silent_is_ended_and_started_anew(self) -> None:
        dispatch = table()
        dispatch.add(one(1), deadline=SOON, now=0)
        dispatch.tick(SOON)
        assert dispatch.next_due == SOON + PATIENCE.answer
        told = dispatch.tick(SOON + PATIENCE.answer)
        assert told == [Kill(replica=0, life=0), Start(replica=0, life=2)]

    def test_a_pass_whose_deadline_comes_behind_another_says_nothing_against_its_replica(
        self,
    ) -> None:
        dispatch = table(1)
        [first] = sends(dispatch.add(one(1), deadline=LATE, now=0))
        [second] = sends(dispatch.add(one(2), deadline=SOON, now=0))
        assert dispatch.tick(SOON) == [Drop(pieces=second.pieces)]
        assert dispatch.replica(0).state is State.READY
        dispatch.answered(first.attempt, now=SOON + 1)
        assert dispatch.answered(second.attempt, now=SOON + 2) == (False, [])
        assert dispatch.replica(0).state is State.READY

    def test_what_waits_past_its_deadline_is_not_sent(self) -> None:
        dispatch = table(1)
        [first] = sends(dispatch.add(one(1), deadline=LATE, now=0))
        dispatch.add(one(2), deadline=LATE, now=0)
        dispatch.add(one(3), deadline=SOON, now=0)
        _, told = dispatch.answered(first.attempt, now=SOON)
        assert told == [Drop(pieces=(Piece(key=3, tokens=10),))]


@dataclass
class Rig:
    """A dispatch table and all that was heard of it, driven by whatever hypothesis thinks of."""

    dispatch: Dispatch
    now: float = 0.0
    keys: int = 0
    sent: Counter[int] = field(default_factory=Counter)
    over: Counter[int] = field(default_factory=Counter)
    under_way: dict[int, Send] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    starting: dict[int, int] = field(default_factory=dict)

    def obey(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Send):
                self.under_way[each.attempt] = each
                self.sent.update(p.key for p in each.pieces)
                assert each.replica in self.lives
            elif isinstance(each, Fail | Drop):
                self.over.update(p.key for p in each.pieces)
            elif isinstance(each, Kill):
                self.lives.pop(each.replica, None)
                self.starting.pop(each.replica, None)
                self.silence(each.replica)
            elif isinstance(each, Start):
                assert each.replica not in self.lives
                self.starting[each.replica] = each.life

    def silence(self, replica: int) -> None:
        """What a replica had under way is never answered."""
        self.under_way = {a: s for a, s in self.under_way.items() if s.replica != replica}

    def add(self, sizes: list[int], patience: float) -> None:
        pieces = []
        for tokens in sizes:
            pieces.append(Piece(key=self.keys, tokens=tokens))
            self.keys += 1
        self.obey(self.dispatch.add(pieces, deadline=self.now + patience, now=self.now))

    def answer(self, which: int) -> None:
        if not self.under_way:
            return
        attempt = sorted(self.under_way)[which % len(self.under_way)]
        sent = self.under_way.pop(attempt)
        used, then = self.dispatch.answered(attempt, now=self.now)
        if used:
            self.over.update(p.key for p in sent.pieces)
        self.obey(then)

    def die(self, which: int) -> None:
        if not self.lives:
            return
        replica = sorted(self.lives)[which % len(self.lives)]
        life = self.lives.pop(replica)
        self.silence(replica)
        self.obey(self.dispatch.died(replica, life, reason="gone", now=self.now))

    def start(self, which: int, *, works: bool) -> None:
        if not self.starting:
            return
        replica = sorted(self.starting)[which % len(self.starting)]
        life = self.starting.pop(replica)
        if works:
            self.lives[replica] = life
            self.obey(self.dispatch.started(replica, life, now=self.now))
        else:
            told = self.dispatch.start_failed(replica, life, reason="no room", now=self.now)
            self.obey(told)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.dispatch.tick(self.now))

    def look(self) -> None:
        assert all(count <= 2 for count in self.sent.values()), "sent a third time"
        assert all(count == 1 for count in self.over.values()), "over twice"
        assert self.dispatch.room >= 0


events = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 99), min_size=1, max_size=3)),
    st.tuples(st.just("answer"), st.integers(0, 9)),
    st.tuples(st.just("die"), st.integers(0, 9)),
    st.tuples(st.just("start"), st.integers(0, 9)),
    st.tuples(st.just("fail"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.integers(0, 70)),
)


@given(st.integers(1, 4), st.lists(events, max_size=40))
def test_whatever_dies_every_piece_is_over_once_and_sent_twice_at_most(
    replica_count: int, happenings: list[tuple[str, object]]
) -> None:
    rig = Rig(table(replica_count), lives={number: number for number in range(replica_count)})
    for name, value in happenings:
        if isinstance(value, list):
            rig.add(value, patience=30.0)
        elif not isinstance(value, int):
            raise TypeError(value)
        elif name == "answer":
            rig.answer(value)
        elif name == "die":
            rig.die(value)
        elif name == "wait":
            rig.wait(float(value))
        else:
            rig.start(value, works=name == "start")
        rig.look()
    # Let all of it come to its end.
    while len(rig.over) < rig.keys:
        due = rig.dispatch.next_due
        assert due is not None, "something is left, and nothing will happen"
        rig.wait(max(0.0, due - rig.now))
        rig.look()
    assert sorted(rig.over) == list(range(rig.keys))
