"""Forward KL with the tail as a bucket against the golden answers: every `tail_fkl` there is.

`tok` is a position's divergence without T²; `dz` the gradient of their sum in the raw logits;
`scalar`, `dh`, `dW`, `db` are of T² times the masked mean, through student logits h Wᵀ + b.
"""

import numpy as np
import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits_client.losses import forward_kl
from teacher_logits_client.targets import Targets

FILE = "losses_golden.npz"
LOSS, RAGGED = arrays(FILE, "loss/"), arrays(FILE, "ragged/")
KGEV, EXTREME = arrays(FILE, "kgev_loss/"), arrays(FILE, "extreme/")
TEMPERATURES = sorted({key.split("/")[0] for key in LOSS if key.endswith("/tail_fkl/tok")})
DENSE = {"ragged": (RAGGED, LOSS["student_logits"]), "kgev_loss": (KGEV, KGEV["student_logits"])}


def targets(
    ids: np.ndarray, logprobs: np.ndarray, log_tail: np.ndarray, temperature: float = 1.0
) -> Targets:
    """Flat targets of the golden teacher, at full precision."""
    count = int(np.prod(ids.shape[:-1]))
    return Targets(
        topk_ids=torch.from_numpy(ids).view(count, -1),
        topk_logprobs=torch.from_numpy(logprobs).view(count, -1),
        log_tail=torch.from_numpy(log_tail).view(count),
        actual_logprob=None,
        valid=torch.ones(count, dtype=torch.bool),
        temperature=temperature,
        row_offsets=torch.tensor([0, count]),
    )


def dense_targets(group: dict[str, np.ndarray]) -> Targets:
    """From the teacher's dense logits and the ids that are kept, -1 for none."""
    logprobs = torch.from_numpy(group["teacher_logits"]).double().log_softmax(-1).flatten(0, -2)
    ids = torch.from_numpy(group["idx"]).flatten(0, -2).long()
    kept = torch.zeros(len(ids), logprobs.shape[1] + 1, dtype=torch.bool)
    kept.scatter_(1, ids.where(ids >= 0, logprobs.shape[1]), torch.tensor(True).expand(ids.shape))
    tail = logprobs.masked_fill(kept[:, :-1], -torch.inf).logsumexp(1)
    chosen = logprobs.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
    return targets(group["idx"].reshape(len(ids), -1), chosen.numpy(), tail.numpy())


def loss_targets(name: str) -> Targets:
    logprobs, log_tail = LOSS[f"{name}/teacher_logprob"], LOSS[f"{name}/teacher_log_tail"]
    return targets(LOSS["idx"], logprobs, log_tail, float(name[1:]))


def each_position(logits: torch.Tensor, golden: Targets) -> torch.Tensor:
    """The divergence of every position by itself, without T²."""
    masks = torch.eye(len(golden.topk_ids))
    values = [forward_kl(logits, golden, mask)[0] for mask in masks]
    return torch.stack(values) / golden.temperature**2


def gradient(logits: torch.Tensor, golden: Targets) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    forward_kl(leaf, golden)[0].backward()
    assert leaf.grad is not None
    return leaf.grad / golden.temperature**2


def assert_near(got: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    wanted = torch.from_numpy(expected).reshape(got.shape)
    assert torch.allclose(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", TEMPERATURES)
class TestLoss:
    def student(self) -> torch.Tensor:
        return torch.from_numpy(LOSS["student_logits"])

    def test_tok(self, name: str) -> None:
        got = each_position(self.student(), loss_targets(name))

        assert_near(got, LOSS[f"{name}/tail_fkl/tok"], 1e-10)

    def test_dz(self, name: str) -> None:
        got = gradient(self.student(), loss_targets(name))

        assert_near(got, LOSS[f"{name}/tail_fkl/dz"], 1e-10)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_scalar_dh_dw_and_db(self, name: str, dtype: torch.dtype) -> None:
        hidden, weight, bias = (
            torch.from_numpy(LOSS[field]).to(dtype).requires_grad_()
            for field in ("hidden", "W", "b")
        )
        mask = torch.from_numpy(LOSS["mask"])
        logits = hidden @ weight.T + bias

        loss_sum, count = forward_kl(logits, loss_targets(name), mask)
        (loss_sum / count).backward()

        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        assert_near((loss_sum / count).detach(), LOSS[f"{name}/tail_fkl/scalar"], tolerance)
        for leaf, field in ((hidden, "dh"), (weight, "dW"), (bias, "db")):
            assert leaf.grad is not None
            assert_near(leaf.grad, LOSS[f"{name}/tail_fkl/{field}"], tolerance)


@pytest.mark.parametrize("group", DENSE)
class TestDenseTeachers:
    """Entries that are absent beside an id 0 that is not, and K at least the vocabulary."""

    def test_tok(self, group: str) -> None:
        golden, student = DENSE[group]
        got = each_position(torch.from_numpy(student), dense_targets(golden))

        assert_near(got, golden["tail_fkl/tok"], 1e-10)

    def test_dz(self, group: str) -> None:
        golden, student = DENSE[group]
        got = gradient(torch.from_numpy(student), dense_targets(golden))

        assert_near(got, golden["tail_fkl/dz"], 1e-10)


class TestExtreme:
    """Tails down to 1e-14, in fp32: whatever clamps or takes 1 minus a sum fails here."""

    def golden(self) -> Targets:
        return targets(EXTREME["idx"], EXTREME["logprob"], EXTREME["log_tail"])

    def student(self) -> torch.Tensor:
        return torch.from_numpy(EXTREME["student_logits"]).float()

    def test_tok(self) -> None:
        got = each_position(self.student(), self.golden())

        assert got.dtype == torch.float32
        assert_near(got, EXTREME["tail_fkl/tok"], 1e-5)

    def test_dz(self) -> None:
        assert_near(gradient(self.student(), self.golden()), EXTREME["tail_fkl/dz"], 1e-5)
