"""Zigzag: the ranks of a context hold every position once, and each as much work."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.zigzag import zigzag_positions


@given(st.integers(1, 8), st.integers(0, 5))
def test_every_position_is_some_ranks_and_all_have_equal_work(size: int, part: int) -> None:
    length = 2 * size * part
    held = [
        [position for run in zigzag_positions(length, rank=rank, size=size) for position in run]
        for rank in range(size)
    ]

    assert sorted(chain(*held)) == list(range(length))
    # A causal position costs as many as stand before it.
    assert len({sum(positions) for positions in held}) == 1


def test_a_single_rank_holds_rows_of_any_length() -> None:
    assert zigzag_positions(7, rank=0, size=1) == (range(7),)


@pytest.mark.parametrize("length", [-4, 6, 2.5])
def test_a_row_that_is_not_padded_is_refused(length: int) -> None:
    with pytest.raises(PayloadInvalidError, match="pad it to a multiple of 4"):
        zigzag_positions(length, rank=0, size=2)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0.5, 2)])
def test_a_rank_that_is_none_is_refused(rank: int, size: int) -> None:
    with pytest.raises(PayloadInvalidError, match="give a rank"):
        zigzag_positions(8, rank=rank, size=size)
