"""Fair turns: sessions that wait for the same teacher get the same tokens of it."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_logits.errors import LimitReachedError
from teacher_logits_server.batching import Batching

if TYPE_CHECKING:
    from collections.abc import Sequence

SOON = 10.0


class Table:
    """A batching table, and what has run in it by session."""

    def __init__(
        self, *, max_batch_tokens: int = 100, waiting: int = 2000, of_session: int = 2000
    ) -> None:
        self.batching = Batching(
            max_batch_tokens=max_batch_tokens,
            max_waiting_requests=waiting,
            max_session_requests=of_session,
        )
        self.sessions: list[str] = []
        self.rows: list[Sequence[int]] = []
        self.ran: Counter[str] = Counter()
        self.left: dict[int, int] = {}

    def add(self, session_id: str, *row_tokens: int) -> int:
        ticket = len(self.sessions)
        self.batching.add(ticket, row_tokens, deadline=SOON, session_id=session_id)
        self.sessions.append(session_id)
        self.rows.append(row_tokens)
        self.left[ticket] = len(row_tokens)
        return ticket

    def turn(self) -> list[str]:
        """Run a pass; return whose rows were in it."""
        pieces = self.batching.take()
        for each in pieces:
            rows = self.rows[each.ticket][each.first_row : each.first_row + each.row_count]
            self.ran[self.sessions[each.ticket]] += sum(rows)
            self.left[each.ticket] -= each.row_count
        return [self.sessions[each.ticket] for each in pieces]

    def waiting(self) -> set[str]:
        return {self.sessions[ticket] for ticket, count in self.left.items() if count}


def test_one_request_runs_in_the_next_pass_beside_ten_thousand_of_another_session() -> None:
    table = Table(waiting=1024)
    for _ in range(10_000):
        with suppress(LimitReachedError):
            table.add("hog", 50)
    table.turn()

    table.add("guest", 50)

    assert table.turn() == ["guest", "hog"]


def test_a_long_request_lets_others_in_between_its_passes() -> None:
    table = Table()
    table.add("long", *[100] * 8)
    table.turn()

    table.add("short", 100)

    assert [table.turn() for _ in range(3)] == [["short"], ["long"], ["long"]]


def test_who_was_idle_has_no_credit() -> None:
    table = Table()
    table.add("idle", 100)
    table.turn()
    for _ in range(50):
        table.add("busy", 100)
    for _ in range(20):
        table.turn()

    for _ in range(10):
        table.add("idle", 100)

    assert Counter(name for _ in range(10) for name in table.turn()) == {"idle": 5, "busy": 5}


def test_who_has_just_had_much_does_not_come_first_for_asking_one_at_a_time() -> None:
    table = Table()
    for _ in range(50):
        table.add("many", 100)
    table.turn()
    order = []
    for _ in range(6):
        table.add("single", 100)
        order += table.turn() + table.turn()

    assert Counter(order) == {"single": 6, "many": 6}


def test_a_session_alone_is_served_in_the_order_of_arrival() -> None:
    table = Table(max_batch_tokens=1)
    tickets = [table.add("only", 1 + number % 3) for number in range(20)]

    assert [table.batching.take()[0].ticket for _ in tickets] == tickets


def test_a_session_with_nothing_waiting_is_taken_though_the_queue_is_full() -> None:
    table = Table(waiting=2)
    table.add("hog", 50)
    table.add("hog", 50)
    with pytest.raises(LimitReachedError, match="--max-waiting-requests"):
        table.add("hog", 50)

    table.add("guest", 50)

    with pytest.raises(LimitReachedError):
        table.add("guest", 50)


def test_a_session_has_so_many_requests_at_most_running_ones_too() -> None:
    table = Table(of_session=2)
    table.add("a", 50)
    table.turn()
    table.add("a", 50)

    with pytest.raises(LimitReachedError, match="--max-session-requests") as refused:
        table.add("a", 50)
    table.add("b", 50)

    assert refused.value.facts == {
        "limit_name": "session_requests",
        "count": 2,
        "limit": 2,
        "flag": "--max-session-requests",
    }
    assert refused.value.retry_after is not None


requests = st.lists(st.integers(0, 60), min_size=1, max_size=6)
sessions = st.dictionaries(
    st.sampled_from("abcd"), st.lists(requests, min_size=1, max_size=6), min_size=2
)


@settings(max_examples=50)
@given(sessions, st.integers(1, 100))
def test_while_they_wait_no_session_is_ahead_by_more_than_two_passes(
    asked: dict[str, list[list[int]]], max_batch_tokens: int
) -> None:
    table = Table(max_batch_tokens=max_batch_tokens)
    for session_id, each in asked.items():
        for rows in each:
            table.add(session_id, *rows)
    largest = max(max_batch_tokens, *(max(rows) for each in asked.values() for rows in each))
    while len(table.waiting()) == len(asked):
        assert table.turn()
        if len(table.waiting()) == len(asked):
            ran = [table.ran[session_id] for session_id in asked]
            assert max(ran) - min(ran) <= 2 * largest
    while table.turn():
        pass
    assert table.ran == {name: sum(map(sum, each)) for name, each in asked.items()}
