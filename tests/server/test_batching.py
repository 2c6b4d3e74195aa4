"""Batching: first come, first served, in passes of a bounded size, and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import LimitReachedError
from teacher_logits_server.batching import Batching, Late, Piece
from teacher_logits_server.room_turns import MAX_OVERTAKINGS

SOON = 10.0


def batching(max_batch_tokens: int = 100, max_waiting_requests: int = 8) -> Batching:
    return Batching(
        max_batch_tokens=max_batch_tokens,
        max_waiting_requests=max_waiting_requests,
        max_session_requests=100,
    )


def piece(ticket: int, first_row: int, row_count: int) -> Piece:
    return Piece(ticket=ticket, first_row=first_row, row_count=row_count)


def test_requests_that_fit_run_together_in_the_order_they_came() -> None:
    table = batching()
    table.add(0, [20, 20], deadline=SOON)
    table.add(1, [20], deadline=SOON)
    assert table.take() == [piece(0, 0, 2), piece(1, 0, 1)]
    assert table.take() == []


def test_padding_counts_as_tokens() -> None:
    table = batching()
    table.add(0, [10], deadline=SOON)
    table.add(1, [60], deadline=SOON)  # beside it the first would be padded to 60
    assert table.take() == [piece(0, 0, 1)]
    assert table.take() == [piece(1, 0, 1)]


def test_a_row_longer_than_a_pass_runs_alone() -> None:
    table = batching()
    table.add(0, [500, 1], deadline=SOON)
    assert table.take() == [piece(0, 0, 1)]
    assert table.take() == [piece(0, 1, 1)]


def test_a_large_request_takes_several_passes_and_the_next_one_fills_the_last() -> None:
    table = batching()
    table.add(0, [50, 50, 50], deadline=SOON)
    table.add(1, [50], deadline=SOON)
    assert table.take() == [piece(0, 0, 2)]
    assert table.take() == [piece(0, 2, 1), piece(1, 0, 1)]


def test_rows_without_tokens_cost_nothing() -> None:
    table = batching()
    table.add(0, [50, 0, 50, 0], deadline=SOON)
    assert table.take() == [piece(0, 0, 4)]


def test_what_waits_and_what_runs_is_counted() -> None:
    table = batching()
    table.add(0, [60, 60], deadline=SOON)
    table.add(1, [70], deadline=SOON)
    table.take()
    assert (table.waiting_requests, table.waiting_tokens, table.running_requests) == (2, 130, 0)
    table.take()
    assert (table.waiting_requests, table.waiting_tokens, table.running_requests) == (1, 70, 1)
    table.drop(0)
    assert (table.waiting_requests, table.waiting_tokens, table.running_requests) == (1, 70, 0)


def test_one_request_more_than_may_wait_is_refused_with_the_numbers() -> None:
    table = batching(max_waiting_requests=2)
    table.add(0, [1], deadline=SOON)
    table.add(1, [1], deadline=SOON)
    with pytest.raises(LimitReachedError, match="--max-waiting-requests") as refused:
        table.add(2, [1], deadline=SOON)
    assert (refused.value.facts["count"], refused.value.facts["limit"]) == (2, 2)
    assert refused.value.retry_after is not None


def test_requests_in_a_pass_do_not_count_as_waiting() -> None:
    table = batching(max_waiting_requests=1)
    table.add(0, [1], deadline=SOON)
    table.take()
    table.add(1, [1], deadline=SOON)
    assert table.waiting_requests == 1


def test_a_dropped_request_is_not_taken_and_dropping_twice_is_fine() -> None:
    table = batching()
    table.add(0, [1], deadline=SOON)
    table.drop(0)
    table.drop(0)
    assert table.take() == []


def test_the_late_are_forgotten_and_named_with_what_they_waited_for() -> None:
    table = batching()
    table.add(0, [1], deadline=1.0)
    table.add(1, [1], deadline=2.0)
    table.add(2, [1], deadline=3.0)
    table.take()
    table.park(1, freed_count=table.freed_count)
    assert table.next_deadline == 1.0
    assert table.expire(2.0) == [
        Late(ticket=0, waited_for_room=False),
        Late(ticket=1, waited_for_room=True),
    ]
    assert table.expire(2.0) == []
    assert table.next_deadline == 3.0


def test_a_parked_request_waits_for_room_while_others_run() -> None:
    table = batching()
    table.add(0, [10, 10], deadline=SOON)
    table.add(1, [10], deadline=SOON)
    table.take()
    table.park(0, freed_count=table.freed_count)
    table.seat(1)
    assert table.waiting_tokens == 20
    assert table.take() == []
    table.room_freed()
    assert table.take() == [piece(0, 0, 2)]


def test_room_that_came_free_while_it_was_asked_for_is_not_missed() -> None:
    table = batching()
    table.add(0, [10], deadline=SOON)
    table.take()
    before = table.freed_count
    table.room_freed()
    table.park(0, freed_count=before)
    assert table.take() == [piece(0, 0, 1)]


def test_nobody_passes_a_parked_request_for_ever() -> None:
    table = batching(max_waiting_requests=MAX_OVERTAKINGS + 3)
    table.add(0, [10], deadline=SOON, size_bytes=2)
    table.take()
    table.park(0, freed_count=table.freed_count)
    for ticket in range(1, MAX_OVERTAKINGS + 1):
        table.add(ticket, [10], deadline=SOON)
        assert table.take() == [piece(ticket, 0, 1)]
        table.seat(ticket)
    table.add(MAX_OVERTAKINGS + 1, [10], deadline=SOON)
    assert table.take() == []
    table.room_freed()
    assert table.take() == [piece(0, 0, 1), piece(MAX_OVERTAKINGS + 1, 0, 1)]


def test_who_waits_for_room_of_one_pool_holds_up_nobody_of_another() -> None:
    table = batching()
    table.add(0, [10], deadline=SOON, size_bytes=1, pool="device")
    assert table.take() == [piece(0, 0, 1)]
    table.park(0, freed_count=table.freed_count)
    for ticket in range(1, MAX_OVERTAKINGS + 3):
        table.add(ticket, [10], deadline=SOON, size_bytes=100, pool="host")
        assert table.take() == [piece(ticket, 0, 1)]
        assert table.may_seat(ticket)
        table.seat(ticket)
        table.drop(ticket)
    table.add(99, [10], deadline=SOON, size_bytes=1, pool="device")
    assert table.take() == []


def test_a_request_with_room_goes_on_behind_a_parked_one_that_nobody_may_pass() -> None:
    table = batching(max_waiting_requests=MAX_OVERTAKINGS + 3)
    table.add(0, [10], deadline=SOON, size_bytes=2)
    table.take()
    table.park(0, freed_count=table.freed_count)
    for ticket in range(1, MAX_OVERTAKINGS):
        table.add(ticket, [10], deadline=SOON)
        table.take()
        table.seat(ticket)
    table.add(MAX_OVERTAKINGS, [100, 100], deadline=SOON)
    table.take()
    table.seat(MAX_OVERTAKINGS)
    assert table.take() == [piece(MAX_OVERTAKINGS, 1, 1)]


def test_a_parked_request_is_passed_only_by_those_that_need_less_room() -> None:
    table = batching()
    table.add(0, [10], deadline=SOON, size_bytes=20)
    table.take()
    table.park(0, freed_count=table.freed_count)
    table.add(1, [10], deadline=SOON, size_bytes=20)
    table.add(2, [10], deadline=SOON, size_bytes=19)
    assert table.take() == [piece(2, 0, 1)]


def test_room_that_comes_free_within_a_pass_is_left_to_who_came_first() -> None:
    table = batching()
    table.add(0, [10], deadline=SOON, size_bytes=20)
    table.add(1, [10], deadline=SOON, size_bytes=20)
    table.add(2, [10], deadline=SOON, size_bytes=10)
    assert len(table.take()) == 3
    before = table.freed_count
    table.room_freed()
    table.park(0, freed_count=before)
    assert not table.may_seat(1)
    assert table.may_seat(2)
    table.seat(2)
    assert table.take() == [piece(0, 0, 1), piece(1, 0, 1)]
    table.seat(0)
    assert table.may_seat(1)


row_tokens = st.lists(st.integers(0, 60), min_size=1, max_size=8)


@given(st.lists(row_tokens, max_size=12), st.integers(1, 100))
def test_every_row_runs_once_in_order_and_no_pass_is_too_large(
    requests: list[list[int]], max_batch_tokens: int
) -> None:
    table = batching(max_batch_tokens, max_waiting_requests=100)
    for ticket, rows in enumerate(requests):
        table.add(ticket, rows, deadline=SOON)
    taken: list[tuple[int, int]] = []
    while pieces := table.take():
        rows_of_pass = [
            (each.ticket, row)
            for each in pieces
            for row in range(each.first_row, each.first_row + each.row_count)
        ]
        costs = [requests[ticket][row] for ticket, row in rows_of_pass if requests[ticket][row]]
        assert len(costs) <= 1 or len(costs) * max(costs) <= max_batch_tokens
        taken += rows_of_pass
    assert taken == [(t, row) for t, rows in enumerate(requests) for row in range(len(rows))]
    assert table.waiting_tokens == 0
