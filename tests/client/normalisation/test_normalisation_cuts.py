"""Ragged rows and the client's own loss under the cuts that people train with (report R20)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.client.normalisation.ranks import Meeting, on_ranks
from torch.nn.utils.rnn import pad_sequence

from teacher_logits_client.losses import forward_kl
from teacher_logits_client.normalisation import StepLoss, StepNormaliser, StepReport
from teacher_logits_client.targets import Targets

ROWS, WIDTH, VOCABULARY_SIZE, K = 64, 6, 20, 4
#: Ranks, rows of a micro batch, micro batches of a rank.
CUTS = [(1, 64, 1), (1, 8, 8), (4, 4, 4), (8, 1, 8)]


@cache
def hidden_rows() -> list[torch.Tensor]:
    """What the student's head gets, [L,6] of each row, of 1 to 17 positions."""
    generator = torch.Generator().manual_seed(20)
    lengths = torch.randint(1, 18, (ROWS,), generator=generator).tolist()
    return [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in lengths]


def targets_of(rows: list[int]) -> Targets:
    """The top K of a teacher that is a head of its own; a row's last position is not valid."""
    head = torch.randn(
        WIDTH, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    lengths = torch.tensor([len(hidden_rows()[row]) for row in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    logprobs = (torch.cat([hidden_rows()[row] for row in rows]) @ head).log_softmax(1)
    values, ids = logprobs.topk(K, dim=1)
    valid = torch.ones(len(ids), dtype=torch.bool)
    valid[offsets[1:] - 1] = False
    return Targets(
        topk_ids=ids.int(),
        topk_logprobs=values,
        log_tail=logprobs.scatter(1, ids, -torch.inf).logsumexp(1),
        actual_logprob=None,
        valid=valid,
        temperature=1.0,
        row_offsets=offsets,
    )


def sum_and_count(head: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits [N,S,V], padded as far as these rows need it."""
    padded = pad_sequence([hidden_rows()[row] for row in rows], batch_first=True)
    return forward_kl(padded.to(head.dtype) @ head, targets_of(rows))


def a_head(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((WIDTH, VOCABULARY_SIZE), 0.1, dtype=dtype, requires_grad=True)


@cache
def whole() -> tuple[float, torch.Tensor]:
    """Loss and gradient of all rows in one batch, in float64."""
    head = a_head(torch.float64)
    loss_sum, count = sum_and_count(head, list(range(ROWS)))
    (loss_sum / count).backward()
    assert head.grad is not None
    return float((loss_sum / count).detach()), head.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("ranks", "size", "micro_batches"), CUTS)
def test_loss_and_gradient_are_those_of_one_batch(
    ranks: int, size: int, micro_batches: int, dtype: torch.dtype, tolerance: float
) -> None:
    meeting, heads = Meeting(ranks), [a_head(dtype) for _ in range(ranks)]

    def story(rank: int) -> StepReport:
        normaliser = StepNormaliser(StepLoss(parameters=[heads[rank]]), reduction=meeting.of(rank))
        with normaliser.begin(step=0) as step:
            for number in range(micro_batches):
                first = (rank * micro_batches + number) * size
                rows = list(range(first, first + size))
                step.microbatch(number, *sum_and_count(heads[rank], rows)).backward()
            return step.finish()

    reports = on_ranks(ranks, story)

    loss, gradient = whole()
    together = torch.stack([each.grad for each in heads if each.grad is not None]).sum(0)
    assert [report.loss for report in reports] == pytest.approx([loss] * ranks, rel=tolerance)
    assert torch.allclose(together.double(), gradient, rtol=tolerance, atol=tolerance)
