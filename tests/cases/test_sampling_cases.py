"""Sampled targets against the golden answers: group samp/, and a sample's losses of group loss/.

float64 throughout, to 1e-10; ids exact.
"""

import numpy as np
import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits.selection.sampling import Sample, sample_threshold, sample_with_replacement
from teacher_logits.selection.uniforms import uniforms
from teacher_logits_client import losses
from teacher_logits_client.targets import Targets

SAMP, LOSS = arrays("losses_golden.npz", "samp/"), arrays("losses_golden.npz", "loss/")
LOGITS = torch.from_numpy(SAMP["logits"])
POSITIONS, DRAWS = SAMP["uniform"].shape
ROW_UID = 7
POWERS = sorted({key.split("_")[1] for key in SAMP if key.startswith("rs_t")})


def drawn() -> torch.Tensor:
    return uniforms(
        int(SAMP["seed"]),
        torch.tensor([[ROW_UID]]),
        torch.arange(POSITIONS).unsqueeze(1),
        torch.arange(DRAWS),
    )


def sample(u: torch.Tensor | None = None) -> Sample:
    first = drawn()[:, 0] if u is None else u
    return sample_threshold(LOGITS, m=int(SAMP["pps_m"]), uniforms=first)


def assert_near(got: torch.Tensor, expected: np.ndarray) -> None:
    torch.testing.assert_close(got, torch.from_numpy(expected), atol=1e-10, rtol=0)


def dense(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    width = LOGITS.shape[1]
    out = torch.zeros(len(ids), width + 1, dtype=torch.float64)
    ids = ids.long()
    return out.scatter_add_(1, ids.masked_fill(ids < 0, width), weights)[:, :width]


def test_uniform() -> None:
    assert torch.equal(drawn(), torch.from_numpy(SAMP["uniform"]))


def test_pps_ids_and_weight() -> None:
    got = sample()

    assert torch.equal(got.ids, torch.from_numpy(SAMP["pps_ids"]))
    assert_near(got.weights, SAMP["pps_weight"])


def test_pps_head_and_tau() -> None:
    got = sample()

    assert got.heads.tolist() == SAMP["pps_head"].tolist()
    assert_near(got.thresholds, SAMP["pps_tau"])


def test_pps_total_variance() -> None:
    got, p = sample(), LOGITS.softmax(1)
    in_head = dense(got.ids[:, :0], got.weights[:, :0])
    for row, count in enumerate(got.heads.tolist()):
        in_head[row, got.ids[row, :count].long()] = 1.0

    each = torch.where(in_head > 0, 0.0, p * (got.thresholds.unsqueeze(1) - p))

    assert_near(each.sum(1), SAMP["pps_total_variance"])


def test_pps_mean_over_a_grid_of_uniforms_is_the_distribution() -> None:
    grid, p = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000, LOGITS.softmax(1)
    total = torch.zeros_like(p)
    for row in range(len(LOGITS)):
        logits = LOGITS[row : row + 1].expand(len(grid), -1)
        got = sample_threshold(logits, m=int(SAMP["pps_m"]), uniforms=grid)
        total[row] = dense(got.ids, got.weights).mean(0)

    assert float((total - p).abs().max()) <= 1.01 * float(SAMP["pps_mean_error_grid4000"]) + 1e-4


@pytest.mark.parametrize("power", POWERS)
def test_rs_count_and_weight(power: str) -> None:
    ids, weights = sample_with_replacement(LOGITS, uniforms=drawn(), power=float(power[1:]))

    found = dense(ids, weights)
    assert torch.equal(found > 0, torch.from_numpy(SAMP[f"rs_{power}_count"]) > 0)
    assert_near(found, SAMP[f"rs_{power}_weight"])


@pytest.mark.parametrize("power", POWERS)
def test_rs_total_variance(power: str) -> None:
    """Of the estimate by its definition; what is drawn is tested above."""
    p = LOGITS.softmax(1)
    q = (LOGITS * float(power[1:])).softmax(1)

    assert_near((p * p / DRAWS * (1 / q - 1)).sum(1), SAMP[f"rs_{power}_total_variance"])


class TestLosses:
    def targets(self) -> tuple[Targets, torch.Tensor]:
        teacher = torch.from_numpy(LOSS["teacher_logits"]).double()
        logprobs = teacher.view(-1, teacher.shape[-1]).log_softmax(1)
        entropy = -(logprobs.exp() * logprobs).sum(1)
        ids = torch.from_numpy(LOSS["sampled/ids"]).view(len(entropy), -1)
        weights = torch.from_numpy(LOSS["sampled/weight"]).view_as(ids)
        found = Targets(
            topk_ids=ids,
            topk_logprobs=weights.log(),
            log_tail=torch.full((len(entropy),), -1e4, dtype=torch.float64),
            actual_logprob=None,
            valid=torch.ones(len(entropy), dtype=torch.bool),
            temperature=1.0,
            row_offsets=torch.tensor([0, len(entropy)]),
            sampled=True,
            entropy=entropy,
        )
        student = torch.from_numpy(LOSS["student_logits"]).view(len(entropy), -1)
        return found, student.clone().requires_grad_()

    @pytest.mark.parametrize(
        ("name", "loss"),
        [("sampled_kl", losses.forward_kl), ("sampled_ce", losses.soft_cross_entropy)],
    )
    def test_value_and_gradient(self, name: str, loss: object) -> None:
        targets, student = self.targets()

        total, count = loss(student, targets)  # type: ignore[operator]
        total.backward()
        total = total.detach()

        assert int(count) == len(student)
        tok, dz = LOSS[f"T1.0/{name}/tok"], LOSS[f"T1.0/{name}/dz"]
        assert total.item() == pytest.approx(float(tok.sum()), abs=1e-9)
        assert student.grad is not None
        assert_near(student.grad.view(dz.shape), dz)
