"""What floats torch makes when it is not told has no say in any loss, nor in its gradients.

Scripts set it, to bfloat16 for the models that they make, or to float64.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from teacher_logits_client import Targets, losses, select_top_k

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHANCE = torch.Generator().manual_seed(0)
TEACHER = 3 * torch.randn(5, 40, generator=CHANCE)
HIDDEN, WEIGHT = torch.randn(5, 7, generator=CHANCE), torch.randn(40, 7, generator=CHANCE)
BINS = torch.tensor([0, 1, 1, 0, 2])

SPARSE: dict[str, Callable[..., Any]] = {
    "forward_kl": losses.forward_kl,
    "reverse_kl": losses.reverse_kl,
    "nemo_floor": partial(losses.reverse_kl, tail=losses.Tail.NEMO_FLOOR),
    "jsd": partial(losses.generalised_jsd, beta=0.5),
    "skew": partial(losses.skew_kl, alpha=0.1),
    "skew_reverse": partial(losses.skew_reverse_kl, alpha=0.1),
    "total_variation": losses.total_variation,
    "cross_entropy": losses.soft_cross_entropy,
    "mse": losses.logprob_mse,
}
DENSE: dict[str, Callable[..., Any]] = {
    "dense_kl": losses.dense_forward_kl,
    "dense_cross_entropy": partial(losses.dense_soft_cross_entropy, bin_ids=BINS, bins=3),
}


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def unusual(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def some_targets() -> Targets:
    kept = select_top_k(TEACHER, k=3)
    return Targets(
        topk_ids=kept.topk_ids,
        topk_logprobs=kept.topk_logprobs,
        log_tail=kept.log_tail[:, 0],
        actual_logprob=None,
        temperature=1.0,
        valid=torch.ones(5, dtype=torch.bool),
        row_offsets=torch.tensor([0, 5]),
    )


def found_by(name: str, *, dtype: torch.dtype, from_hidden: bool) -> list[torch.Tensor]:
    hidden, weight = (each.to(dtype, copy=True).requires_grad_() for each in (HIDDEN, WEIGHT))
    logits = losses.from_hidden(hidden, weight) if from_hidden else hidden @ weight.t()
    if name in SPARSE:
        loss_sum, count = SPARSE[name](logits, some_targets())
    else:
        loss_sum, count = DENSE[name](logits, TEACHER.to(dtype))
    loss_sum.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss_sum.detach(), count, hidden.grad, weight.grad]


@pytest.mark.parametrize(
    ("name", "from_hidden"),
    [*((name, False) for name in [*SPARSE, *DENSE]), *((name, True) for name in SPARSE)],
)
def test_the_default_dtype_changes_no_bit(
    name: str, from_hidden: bool, unusual: torch.dtype
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(torch.float32)
        wanted = found_by(name, dtype=dtype, from_hidden=from_hidden)
        torch.set_default_dtype(unusual)

        found = found_by(name, dtype=dtype, from_hidden=from_hidden)

        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_the_mean_over_entries_has_the_digits_of_its_logits() -> None:
    """A third in fp32 would cost those of fp64 half of theirs."""
    targets, student = some_targets(), (HIDDEN @ WEIGHT.t()).double()
    kept = student.log_softmax(1).gather(1, targets.topk_ids.long())
    wanted = (kept - targets.topk_logprobs).square().mean(1).sum()

    loss_sum, _ = losses.logprob_mse(student, targets)

    assert float(loss_sum) == pytest.approx(float(wanted), rel=1e-14)
