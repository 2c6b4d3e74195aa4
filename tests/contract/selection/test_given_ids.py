"""Given ids: their true log-probabilities, and the mass outside exactly these."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import RowStatus
from teacher_logits.selection import select_top_k
from teacher_logits.selection.given_ids import check_ids, score_given

TEMPERATURES = (1.0, 2.0, 0.5)


@st.composite
def asked(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits from flat to peaked, and distinct ids of them, some left out."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    width = draw(st.sampled_from([2, 9, 200]))
    logits = torch.randn(3, width, generator=generator) * draw(st.sampled_from([0.3, 3.0, 15.0]))
    count = draw(st.integers(1, width))
    ids = torch.rand(3, width, generator=generator).argsort(1)[:, :count]
    return logits, ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)


@given(asked())
def test_they_are_the_dense_teachers_in_the_order_given(
    made: tuple[torch.Tensor, torch.Tensor],
) -> None:
    logits, ids = made

    got = score_given(logits, ids, temperatures=TEMPERATURES)

    logprobs = logits.double().log_softmax(1)
    exact = logprobs.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
    torch.testing.assert_close(got.logprobs.double(), exact, atol=2e-6, rtol=1e-5)


@given(asked())
def test_the_tail_is_everything_else_at_every_temperature(
    made: tuple[torch.Tensor, torch.Tensor],
) -> None:
    logits, ids = made

    got = score_given(logits, ids, temperatures=TEMPERATURES)

    padded = torch.cat([logits, torch.zeros(3, 1)], 1).double()
    kept = ids.masked_fill(ids < 0, logits.shape[1])
    for column, temperature in enumerate(TEMPERATURES):
        scaled = logits.double() / temperature
        others = (padded / temperature).scatter(1, kept, -torch.inf)[:, :-1].logsumexp(1)
        exact = others - scaled.logsumexp(1)
        torch.testing.assert_close(got.log_tail[:, column].double(), exact, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(
            got.logsumexp[:, column].double(), scaled.logsumexp(1), atol=2e-6, rtol=1e-5
        )


def test_the_k_best_are_scored_as_they_are_selected() -> None:
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(1)) * 3
    best = select_top_k(logits, k=12, temperatures=TEMPERATURES)

    got = score_given(logits, best.topk_ids, temperatures=TEMPERATURES)

    torch.testing.assert_close(got.logprobs, best.topk_logprobs, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got.log_tail, best.log_tail, atol=2e-6, rtol=1e-5)


def test_an_id_named_again_is_scored_again_and_counted_once() -> None:
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(2))

    once = score_given(logits, torch.tensor([[3, 5, -1]] * 2))
    again = score_given(logits, torch.tensor([[3, 5, 3]] * 2))

    assert torch.equal(again.logprobs[:, 2], again.logprobs[:, 0])
    assert torch.equal(again.log_tail, once.log_tail)


def test_padding_columns_and_bad_positions_are_as_in_every_selection() -> None:
    logits = torch.zeros(3, 10)
    logits[:, 8:] = 70.0
    logits[1, 2], logits[2, :8] = torch.nan, -torch.inf

    got = score_given(logits, torch.tensor([[0, 1]] * 3), vocab_size=8, next_ids=torch.arange(3))

    assert got.status.tolist() == [RowStatus.OK, RowStatus.NAN, RowStatus.EMPTY_SUPPORT]
    assert got.logsumexp[0].item() == pytest.approx(torch.tensor(8.0).log().item())
    assert got.actual_logprob is not None
    for numbers in (got.logprobs, got.log_tail, got.logsumexp, got.actual_logprob):
        assert (numbers[1:] == 0).all()


class TestRefused:
    IDS = torch.tensor([[0, 1], [2, 3], [4, 4]])

    def test_an_id_twice(self) -> None:
        with pytest.raises(PayloadInvalidError, match="row 1, position 5: id 4 is given twice"):
            check_ids(self.IDS, 10, starts=[0, 2, 3], firsts=[0, 5])

    @pytest.mark.parametrize("bad", [-2, 10])
    def test_an_id_outside(self, bad: int) -> None:
        ids = self.IDS.clone()
        ids[1, 1] = bad

        with pytest.raises(PayloadInvalidError, match=f"row 0, position 1: id {bad} is outside"):
            check_ids(ids, 10, starts=[0, 2, 3], firsts=[0, 5])

    def test_ids_of_other_positions(self) -> None:
        with pytest.raises(PayloadInvalidError, match="positions"):
            score_given(torch.zeros(2, 10), self.IDS)

    def test_rows_without_positions_are_stepped_over(self) -> None:
        with pytest.raises(PayloadInvalidError, match="row 2, position 0: id 4"):
            check_ids(self.IDS, 10, starts=[0, 2, 2, 3], firsts=[0, 0, 0])
