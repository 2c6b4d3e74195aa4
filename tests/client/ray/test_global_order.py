"""Handles of many workers by row, where workers are missing or disagree."""

from __future__ import annotations

import pytest

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.ray.global_order import RankHandles, in_global_order


def told(*ranks: tuple[int, str]) -> list[RankHandles[str]]:
    return [RankHandles(data_parallel_rank=rank, handles=tuple(rows)) for rank, rows in ranks]


def test_rows_come_by_rank_and_handles_as_workers_answered() -> None:
    rows = in_global_order(told((1, "ef"), (0, "ab"), (0, "cd")))

    assert rows == [("a", "c"), ("b", "d"), ("e",), ("f",)]


def test_no_answer_is_no_row() -> None:
    assert in_global_order([]) == []


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        (told((0, "ab"), (2, "cd")), None),
        (told((0, "ab")), 2),
        (told((0, "ab"), (1, "cd")), 1),
        (told((-1, "ab"), (0, "cd")), None),
    ],
    ids=["a gap", "the last is missing", "one too many", "below 0"],
)
def test_a_rank_that_is_missing_or_too_many_is_named(
    ranks: list[RankHandles[str]], size: int | None
) -> None:
    with pytest.raises(PayloadInvalidError, match="rank"):
        in_global_order(ranks, data_parallel_size=size)


def test_workers_of_a_rank_hold_as_many_rows() -> None:
    with pytest.raises(PayloadInvalidError) as refusal:
        in_global_order(told((0, "ab"), (0, "c")))

    assert refusal.value.facts == {"data_parallel_rank": 0, "row_counts": "[1, 2]"}
