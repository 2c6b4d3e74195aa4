"""Losses on golden samples: unbiased weights of ids, by threshold and with replacement.

A truncated cross entropy is linear in the weights, so its gradient is q Σw - w, and what it is
off by is what the sample is off by.
"""

from __future__ import annotations

import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits_client import losses
from teacher_logits_client.losses import Tail
from teacher_logits_client.targets import Targets

GOLDEN = {
    key: torch.from_numpy(value) for key, value in arrays("losses_golden.npz", "samp/").items()
}
TEACHER = GOLDEN["logits"]
SAMPLES = [
    "pps",
    *sorted(
        key.removesuffix("_weight")
        for key in GOLDEN
        if key.startswith("rs_") and key.endswith("_weight")
    ),
]


def spread(name: str) -> torch.Tensor:
    """The weight of every id [P,V], 0 where it was not drawn."""
    if name != "pps":
        return GOLDEN[f"{name}_weight"]
    return torch.zeros_like(TEACHER).scatter(1, GOLDEN["pps_ids"].long(), GOLDEN["pps_weight"])


def targets_of(name: str) -> Targets:
    """The ids that were drawn, as many columns as the widest position has."""
    weights = spread(name)
    width = int((weights > 0).sum(1).max())
    values, ids = weights.topk(width, dim=1)
    return Targets(
        topk_ids=ids.masked_fill(values == 0, -1).int(),
        topk_logprobs=values.log().clamp_min(-1e4),
        log_tail=torch.zeros(len(weights), dtype=weights.dtype),
        actual_logprob=None,
        valid=torch.ones(len(weights), dtype=torch.bool),
        temperature=1.0,
        row_offsets=torch.tensor([0, len(weights)]),
    )


def student() -> torch.Tensor:
    return TEACHER.flip(1) / 2


@pytest.mark.parametrize("name", SAMPLES)
class TestSamples:
    def test_loss_is_linear_in_the_weights(self, name: str) -> None:
        loss, count = losses.soft_cross_entropy(student(), targets_of(name), tail=Tail.TRUNCATED)

        expected = -(spread(name) * student().log_softmax(1)).sum()
        assert torch.allclose(loss, expected, rtol=1e-10)
        assert int(count) == len(TEACHER)

    def test_gradient_is_off_by_what_the_sample_is_off_by(self, name: str) -> None:
        weights, leaf = spread(name), student().requires_grad_()
        losses.soft_cross_entropy(leaf, targets_of(name), tail=Tail.TRUNCATED)[0].backward()

        q = student().softmax(1)
        assert leaf.grad is not None
        expected = q * weights.sum(1, keepdim=True) - weights
        assert torch.allclose(leaf.grad, expected, rtol=1e-10, atol=1e-10)


def test_a_threshold_sample_weighs_1_and_errs_by_less_than_its_threshold() -> None:
    weights, teacher = spread("pps"), TEACHER.softmax(1)

    assert torch.allclose(weights.sum(1), torch.ones(len(weights), dtype=weights.dtype))
    assert ((weights - teacher).abs() <= GOLDEN["pps_tau"].unsqueeze(1) + 1e-12).all()
