"""Ids that stand twice in a position are found, wherever they stand and whatever K is."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.distinct import repeats


@st.composite
def positions(draw: st.DrawFn) -> torch.Tensor:
    k = draw(st.integers(1, 40))
    most = draw(st.sampled_from([k, 3 * k, 200_000]))
    row = st.lists(st.integers(-1, most), min_size=k, max_size=k)
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=6)), dtype=torch.int32)


@given(positions())
def test_they_are_those_of_which_a_set_is_smaller(ids: torch.Tensor) -> None:
    there = [[each for each in row if each >= 0] for row in ids.tolist()]

    assert repeats(ids).tolist() == [len(set(row)) < len(row) for row in there]


def test_no_positions_have_none() -> None:
    assert repeats(torch.zeros(0, 8, dtype=torch.int32)).shape == (0,)
