"""Every loss on every tail against the golden answers of the mathematics.

A name there is `family_divergence`: `full` has every id among the K, `tail` the rest as a
bucket, `renorm` both sides renormalised, `trenorm` the teacher alone, `trunc` neither.

`tok` is a position's divergence without T²; `dz` the gradient of their sum in the raw logits;
`scalar`, `dh`, `dW`, `db` are of T² times the masked mean, through student logits h Wᵀ + b.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from tests.cases.golden import arrays

from teacher_logits_client import losses
from teacher_logits_client.losses import Tail
from teacher_logits_client.targets import Targets

Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]

FILE = "losses_golden.npz"
LOSS, RAGGED = arrays(FILE, "loss/"), arrays(FILE, "ragged/")
KGEV, EXTREME = arrays(FILE, "kgev_loss/"), arrays(FILE, "extreme/")
TEMPERATURES = sorted({key.split("/")[0] for key in LOSS if key.endswith("/tail_fkl/tok")})
DENSE = {"ragged": (RAGGED, LOSS["student_logits"]), "kgev_loss": (KGEV, KGEV["student_logits"])}
TAILS = {
    "full": Tail.BUCKET,
    "tail": Tail.BUCKET,
    "renorm": Tail.RENORMALISED,
    "trenorm": Tail.TEACHER_RENORMALISED,
    "trunc": Tail.TRUNCATED,
}
DIVERGENCES: dict[str, Loss] = {
    "fkl": losses.forward_kl,
    "rkl": losses.reverse_kl,
    "jsd_b0.1": partial(losses.generalised_jsd, beta=0.1),
    "jsd_b0.5": losses.generalised_jsd,
    "jsd_b0.9": partial(losses.generalised_jsd, beta=0.9),
    "skl_a0.1": losses.skew_kl,
    "srkl_a0.1": losses.skew_reverse_kl,
    "tvd": losses.total_variation,
    "ce": losses.soft_cross_entropy,
}


def names(group: dict[str, np.ndarray], prefix: str = "") -> list[str]:
    """The losses that the group has answers of, under `prefix`."""
    fields = (key.removeprefix(prefix) for key in group if key.startswith(prefix))
    return sorted({field.split("/")[0] for field in fields if field.endswith("/tok")})


def loss_of(name: str) -> Loss:
    """The loss that a golden name stands for; one that is not known is an error."""
    if name == "trenorm_rklfloor100":
        return partial(losses.reverse_kl, tail=Tail.NEMO_FLOOR)
    family, divergence = name.split("_", 1)
    return partial(DIVERGENCES[divergence], tail=TAILS[family])


NAMES = [name for name in names(LOSS, "T1.0/") if not name.startswith("sampled_")]
EACH = [(group, name) for group, (golden, _) in DENSE.items() for name in names(golden)]


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


def loss_targets(at: str, name: str) -> Targets:
    temperature = float(at[1:])
    if name.startswith("full_"):
        logits = torch.from_numpy(LOSS["teacher_logits"]).double().flatten(0, 1)
        logprobs = (logits / temperature).log_softmax(1).numpy()
        ids = np.broadcast_to(np.arange(logits.shape[1]), logprobs.shape).copy()
        return targets(ids, logprobs, np.full(len(logprobs), -np.inf), temperature)
    logprobs, log_tail = LOSS[f"{at}/teacher_logprob"], LOSS[f"{at}/teacher_log_tail"]
    return targets(LOSS["idx"], logprobs, log_tail, temperature)


def each_position(loss: Loss, logits: torch.Tensor, golden: Targets) -> torch.Tensor:
    """The divergence of every position by itself, without T²."""
    masks = torch.eye(len(golden.topk_ids))
    values = [loss(logits, golden, mask)[0] for mask in masks]
    return torch.stack(values) / golden.temperature**2


def gradient(loss: Loss, logits: torch.Tensor, golden: Targets) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    loss(leaf, golden)[0].backward()
    assert leaf.grad is not None
    return leaf.grad / golden.temperature**2


def assert_near(got: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    wanted = torch.from_numpy(expected).reshape(got.shape)
    assert torch.allclose(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", TEMPERATURES)
class TestLoss:
    def student(self) -> torch.Tensor:
        return torch.from_numpy(LOSS["student_logits"])

    def test_tok(self, at: str, name: str) -> None:
        got = each_position(loss_of(name), self.student(), loss_targets(at, name))

        assert_near(got, LOSS[f"{at}/{name}/tok"], 1e-10)

    def test_dz(self, at: str, name: str) -> None:
        got = gradient(loss_of(name), self.student(), loss_targets(at, name))

        assert_near(got, LOSS[f"{at}/{name}/dz"], 1e-10)

    @pytest.mark.parametrize("logits_of", [torch.nn.functional.linear, losses.from_hidden])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_scalar_dh_dw_and_db(
        self, at: str, name: str, dtype: torch.dtype, logits_of: Callable[..., torch.Tensor]
    ) -> None:
        hidden, weight, bias = (
            torch.from_numpy(LOSS[field]).to(dtype).requires_grad_()
            for field in ("hidden", "W", "b")
        )
        mask = torch.from_numpy(LOSS["mask"])
        logits = logits_of(hidden, weight, bias)

        loss_sum, count = loss_of(name)(logits, loss_targets(at, name), mask)
        (loss_sum / count).backward()

        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        assert_near((loss_sum / count).detach(), LOSS[f"{at}/{name}/scalar"], tolerance)
        for leaf, field in ((hidden, "dh"), (weight, "dW"), (bias, "db")):
            assert leaf.grad is not None
            assert_near(leaf.grad, LOSS[f"{at}/{name}/{field}"], tolerance)


class TestSampledIds:
    """Unbiased weights of sampled ids: a truncated cross entropy, which is linear in them."""

    LOSS = staticmethod(partial(losses.soft_cross_entropy, tail=Tail.TRUNCATED))

    def golden(self) -> Targets:
        weights = LOSS["sampled/weight"]
        with np.errstate(divide="ignore"):
            return targets(LOSS["sampled/ids"], np.log(weights), np.full(weights.shape[:-1], 0.0))

    def test_tok(self) -> None:
        got = each_position(self.LOSS, torch.from_numpy(LOSS["student_logits"]), self.golden())
        log_p = torch.from_numpy(LOSS["teacher_logits"]).double().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).flatten()

        assert_near(got, LOSS["T1.0/sampled_ce/tok"], 1e-10)
        # The KL there takes the entropy of the whole teacher off, which has no gradient.
        assert_near(got - entropy, LOSS["T1.0/sampled_kl/tok"], 1e-10)

    @pytest.mark.parametrize("name", ["sampled_ce", "sampled_kl"])
    def test_dz(self, name: str) -> None:
        got = gradient(self.LOSS, torch.from_numpy(LOSS["student_logits"]), self.golden())

        assert_near(got, LOSS[f"T1.0/{name}/dz"], 1e-10)


@pytest.mark.parametrize(("group", "name"), EACH)
class TestDenseTeachers:
    """Entries that are absent beside an id 0 that is not, and K at least the vocabulary."""

    def test_tok(self, group: str, name: str) -> None:
        golden, student = DENSE[group]
        got = each_position(loss_of(name), torch.from_numpy(student), dense_targets(golden))

        assert_near(got, golden[f"{name}/tok"], 1e-10)

    def test_dz(self, group: str, name: str) -> None:
        golden, student = DENSE[group]
        got = gradient(loss_of(name), torch.from_numpy(student), dense_targets(golden))

        assert_near(got, golden[f"{name}/dz"], 1e-10)


@pytest.mark.parametrize("name", names(EXTREME))
class TestExtreme:
    """Tails down to 1e-14, in fp32: whatever clamps or takes 1 minus a sum fails here."""

    def golden(self) -> Targets:
        return targets(EXTREME["idx"], EXTREME["logprob"], EXTREME["log_tail"])

    def student(self) -> torch.Tensor:
        return torch.from_numpy(EXTREME["student_logits"]).float()

    def test_tok(self, name: str) -> None:
        got = each_position(loss_of(name), self.student(), self.golden())

        assert got.dtype == torch.float32
        assert_near(got, EXTREME[f"{name}/tok"], 1e-5)

    def test_dz(self, name: str) -> None:
        got = gradient(loss_of(name), self.student(), self.golden())

        assert_near(got, EXTREME[f"{name}/dz"], 1e-5)
