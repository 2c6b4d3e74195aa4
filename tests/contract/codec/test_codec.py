"""Codec: what 16 bits and a change of temperature do to log-probabilities, and its mending."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.codec import (
    entry_tolerance,
    log_total,
    normalisation_tolerance,
    renormalise,
    retemper,
)
from teacher_logits.selection import Selection, select_top_k

LOSSY = [torch.float16, torch.bfloat16]


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    """Of rows from flat to peaked, of which some have fewer finite entries than are kept."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    width, k = draw(st.sampled_from([1, 8, 300, 2000])), draw(st.sampled_from([1, 8, 64]))
    rows = torch.randn(4, width, generator=generator) * draw(st.sampled_from([0.0, 1.0, 6.0]))
    rows[0, 1:] = -torch.inf
    return select_top_k(rows, k=k, temperatures=(1.0, 0.5, 2.0))


class TestRenormalise:
    @given(selections(), st.sampled_from(LOSSY))
    def test_entries_and_tail_sum_to_one_again(
        self, selection: Selection, dtype: torch.dtype
    ) -> None:
        logprobs, tail = renormalise(selection.topk_logprobs.to(dtype), selection.log_tail[:, 0])

        assert logprobs.dtype == tail.dtype == torch.float32
        total = logprobs.double().exp().sum(1) + tail.double().exp()
        assert torch.allclose(total, torch.ones(4, dtype=torch.float64), atol=1e-6)

    @given(selections(), st.sampled_from(LOSSY))
    def test_the_loss_of_an_encoding_is_half_its_error_squared_at_most(
        self, selection: Selection, dtype: torch.dtype
    ) -> None:
        true = torch.cat([selection.topk_logprobs, selection.log_tail[:, :1]], 1).double()
        stored = selection.topk_logprobs.to(dtype)
        got = torch.cat(
            [renormalise(stored, true[:, -1])[0], renormalise(stored, true[:, -1])[1][:, None]], 1
        ).double()
        here = true > -torch.inf
        worst = (stored.double() - true[:, :-1])[here[:, :-1]].abs().max()

        divergence = torch.where(here, true.exp() * (true - got), 0.0).sum(1)

        assert (divergence > -1e-6).all()
        assert (divergence <= worst**2 / 2 + 1e-6).all()

    @given(selections())
    def test_what_is_not_there_stays_so(self, selection: Selection) -> None:
        logprobs, tail = renormalise(selection.topk_logprobs, selection.log_tail[:, 0])

        assert torch.equal(logprobs == -torch.inf, selection.topk_logprobs == -torch.inf)
        assert torch.equal(tail == -torch.inf, selection.log_tail[:, 0] == -torch.inf)

    def test_a_position_without_anything_makes_no_nan(self) -> None:
        nothing = torch.full((1, 3), -torch.inf)

        logprobs, tail = renormalise(nothing, nothing[:, 0])

        assert torch.equal(logprobs, nothing)
        assert tail.tolist() == [-torch.inf]


class TestRetemper:
    @given(selections(), st.sampled_from([1, 2]))
    def test_entries_and_that_temperatures_tail_sum_to_one(
        self, selection: Selection, column: int
    ) -> None:
        normalisers = selection.logsumexp
        logprobs = retemper(
            selection.topk_logprobs, normalisers[:, 0], normalisers[:, column], (1, 0.5, 2)[column]
        )

        total = log_total(logprobs, selection.log_tail[:, column])

        assert torch.allclose(total, torch.zeros(4), atol=2e-5)


class TestTolerances:
    @given(selections(), st.sampled_from([torch.float32, *LOSSY]))
    def test_an_honest_encoding_is_within_both(
        self, selection: Selection, dtype: torch.dtype
    ) -> None:
        stored, tail = selection.topk_logprobs.to(dtype), selection.log_tail[:, 0]
        here = stored > -torch.inf

        error = (stored.float() - selection.topk_logprobs).abs()

        assert (error[here] <= entry_tolerance(stored)[here]).all()
        assert (log_total(stored, tail).abs() <= normalisation_tolerance(stored, tail)).all()

    def test_a_flat_row_is_within_although_all_its_roundings_agree(self) -> None:
        selection = select_top_k(torch.zeros(1, 1300), k=1300)
        stored, tail = selection.topk_logprobs.bfloat16(), selection.log_tail[:, 0]

        assert 0.01 < log_total(stored, tail).abs() <= normalisation_tolerance(stored, tail)

    @pytest.mark.parametrize("dtype", [torch.float32, *LOSSY])
    def test_a_tenth_of_the_mass_too_much_is_within_none(self, dtype: torch.dtype) -> None:
        stored = torch.tensor([[0.6, 0.3]]).log().to(dtype)
        tail = torch.tensor([0.2]).log()

        assert log_total(stored, tail).abs() > normalisation_tolerance(stored, tail)
