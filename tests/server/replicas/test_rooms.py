"""Room on the nodes of replicas: never more than there is, given back once, nobody overtaken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from teacher_logits.errors import PoolFullError
from teacher_logits_server.replicas.dispatch import Dispatch
from teacher_logits_server.replicas.instructions import Drop, Fail, Patience, Piece, Send
from teacher_logits_server.replicas.rooms import StoreRooms

PATIENCE = Patience(start=50.0, answer=20.0)
LATE = 1e9
NODES = ("a", "b")


def table(*, budgets: dict[str, int], nodes: tuple[str, ...] = NODES) -> Dispatch:
    made = Dispatch(replica_count=len(nodes), patience=PATIENCE)
    for number, node in enumerate(nodes):
        made.lies_on(number, node)
    made.opened(budgets, now=0)
    return made


def piece(key: int, stored: int = 0, *, near: str = "", tokens: int = 10) -> Piece:
    return Piece(key=key, tokens=tokens, stored_bytes=stored, near=near)


def sent(told: list[object]) -> list[tuple[int, str]]:
    """Of each pass that is sent: the key of its piece, and where room was taken for it."""
    return [(each.pieces[0].key, each.node) for each in told if isinstance(each, Send)]


def add(dispatch: Dispatch, one: Piece) -> list[tuple[int, str]]:
    return sent(list(dispatch.add([one], deadline=LATE, now=0)))


class TestPromises:
    def test_are_kept_to_all_budgets_together(self) -> None:
        rooms = StoreRooms()
        rooms.set_budgets({"a": 10, "b": 6})
        rooms.promise(10)
        with pytest.raises(PoolFullError, match="--ray-budget") as caught:
            rooms.promise(7)
        assert (caught.value.facts["free_bytes"], caught.value.retry_after is not None) == (6, True)
        rooms.leave(10)
        rooms.promise(16)

    def test_what_would_not_fit_on_every_node_stays_on_none(self) -> None:
        rooms = StoreRooms()
        assert not rooms.suits(1)
        rooms.set_budgets({"a": 10, "b": 6})
        assert rooms.suits(6)
        assert not rooms.suits(7)


class TestPasses:
    def test_of_equal_replicas_one_beside_its_reader_computes(self) -> None:
        dispatch = table(budgets={"a": 10, "b": 10})
        assert add(dispatch, piece(1, 4, near="b")) == [(1, "b")]
        assert add(dispatch, piece(2, 4, near="b")) == [(2, "a")], "the other has nothing to do"

    def test_wait_for_room_while_others_go_by(self) -> None:
        dispatch = table(budgets={"a": 5, "b": 0}, nodes=("a", "a"))
        [first] = dispatch.add([piece(1, 5)], deadline=LATE, now=0)
        assert isinstance(first, Send)
        assert add(dispatch, piece(2, 3)) == []
        assert add(dispatch, piece(3)) == [(3, "")]
        assert dispatch.room == 2, "who waits for room takes no replica's place"
        dispatch.answered(first.attempt, now=1)
        assert sent(list(dispatch.freed("a", 5, now=1))) == [(2, "a")]

    def test_are_not_overtaken_by_those_that_take_less_room(self) -> None:
        dispatch = table(budgets={"a": 5}, nodes=("a", "a"))
        [first] = dispatch.add([piece(1, 3)], deadline=LATE, now=0)
        assert isinstance(first, Send)
        assert add(dispatch, piece(2, 4)) == []
        assert add(dispatch, piece(3, 1)) == []
        assert sent(list(dispatch.freed("a", 3, now=1))) == [(2, "a"), (3, "a")]

    def test_that_come_to_nothing_give_their_room_back(self) -> None:
        dispatch = table(budgets={"a": 5, "b": 5})
        [first] = dispatch.add([piece(1, 5)], deadline=LATE, now=0)
        assert isinstance(first, Send)
        dispatch.answered(first.attempt, has_rows=False, now=1)
        assert dispatch.rooms.used("a") == 0
        assert add(dispatch, piece(2, 5)) == [(2, "a")]
        died = dispatch.died(0, 0, reason="gone", now=2)
        assert sent(list(died)) == [(2, "b")]
        assert (dispatch.rooms.used("a"), dispatch.rooms.used("b")) == (0, 5)

    def test_whose_deadline_comes_give_it_back_once_they_are_answered(self) -> None:
        dispatch = table(budgets={"a": 5}, nodes=("a",))
        add(dispatch, piece(1))
        [behind] = dispatch.add([piece(2, 5)], deadline=10, now=9)
        assert isinstance(behind, Send)
        assert [type(each) for each in dispatch.tick(now=10)] == [Drop]
        assert dispatch.rooms.used("a") == 5, "it may be computed by now"
        assert dispatch.answered(behind.attempt, now=11) == (False, [])
        assert dispatch.rooms.used("a") == 0


class Nodes(RuleBasedStateMachine):
    """Passes that stay and others, on replicas that answer, end and come back elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets = {"a": 8, "b": 5}
        self.table = table(budgets=self.budgets, nodes=("a", "a", "b"))
        self.now = 0.0
        self.keys = 0
        self.waiting: set[int] = set()
        self.under_way: dict[int, Send] = {}
        #: Rows that somebody has, and on which node they stay.
        self.rows: list[tuple[str, int]] = []

    def obey(self, told: object) -> None:
        for each in told:  # type: ignore[attr-defined]
            if isinstance(each, Send):
                self.under_way[each.attempt] = each
                self.waiting -= {p.key for p in each.pieces}
            elif isinstance(each, Fail | Drop):
                self.waiting -= {p.key for p in each.pieces}

    @rule(size=st.integers(0, 5), near=st.sampled_from(["", "a", "b"]))
    def add(self, size: int, near: str) -> None:
        self.keys += 1
        self.waiting.add(self.keys)
        one = piece(self.keys, size, near=near)
        self.obey(self.table.add([one], deadline=LATE, now=self.now))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), has_rows=st.booleans())
    def answer(self, data: st.DataObject, has_rows: bool) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.under_way)))
        done = self.under_way.pop(attempt)
        self.now += 1
        used, told = self.table.answered(attempt, has_rows=has_rows, now=self.now)
        if used and has_rows and done.node:
            self.rows.append((done.node, sum(p.stored_bytes for p in done.pieces)))
        self.obey(told)

    @precondition(lambda self: self.rows)
    @rule()
    def let_go(self) -> None:
        self.obey(self.table.freed(*self.rows.pop(), now=self.now))

    @rule(number=st.integers(0, 2))
    def end(self, number: int) -> None:
        self.now += 1
        life = self.table.replica(number).life
        lost = [a for a, s in self.under_way.items() if s.replica == number and s.life == life]
        for attempt in lost:
            self.waiting |= {p.key for p in self.under_way.pop(attempt).pieces}
        self.obey(self.table.died(number, life, reason="gone", now=self.now))

    @rule(number=st.integers(0, 2), node=st.sampled_from(NODES))
    def begin(self, number: int, node: str) -> None:
        self.now += 200
        self.obey(self.table.tick(self.now))
        self.table.lies_on(number, node)
        self.obey(self.table.started(number, self.table.replica(number).life, now=self.now))

    @invariant()
    def no_node_has_more_than_its_budget_or_than_is_there(self) -> None:
        there = dict.fromkeys(NODES, 0)
        for each in self.under_way.values():
            if each.node:
                there[each.node] += sum(p.stored_bytes for p in each.pieces)
        for node, size in self.rows:
            there[node] += size
        for node in NODES:
            assert self.table.rooms.used(node) == there[node] <= self.budgets[node]


TestNodes = Nodes.TestCase


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=30))
def test_what_is_promised_is_never_more_than_there_is(asked: list[tuple[int, bool]]) -> None:
    rooms = StoreRooms()
    has: list[int] = []
    rooms.set_budgets({"a": 30, "b": 20})
    for size, gives_back in asked:
        if gives_back and has:
            rooms.leave(has.pop())
        try:
            rooms.promise(size)
        except PoolFullError:
            continue
        has.append(size)
        assert rooms.promised_bytes == sum(has) <= rooms.budget_bytes
