"""Normalising over a step against the golden answers, on as many ranks as they have.

`split/` of the .npz holds each token's loss and gradient, its rank and its micro batch;
`draft_loss_cases.pt` the arithmetic of upstream's steps, and soft cross entropies in bins.
"""

from __future__ import annotations

from typing import TypedDict, cast

import numpy as np
import pytest
import torch
from tests.cases.golden import FOLDER, arrays
from tests.client.normalisation.ranks import Meeting, on_ranks

from teacher_logits_client.losses import dense_soft_cross_entropy
from teacher_logits_client.normalisation import (
    RescaleOrder,
    StepLoss,
    StepNormaliser,
    StepReport,
)

GOLDEN = arrays("losses_golden.npz", "split/")
RANKS = int(GOLDEN["rank"].max()) + 1


class UpstreamMicroBatch(TypedDict):
    draft_numerator: float
    draft_count: float
    policy_valid_tokens: float


class UpstreamStep(TypedDict):
    """A step of upstream's: what each micro batch of each rank has, and what it comes to."""

    id: str
    ranks: list[list[UpstreamMicroBatch]]
    global_draft_count: float
    policy_count: float
    policy_scale: float
    draft_metric_scale: float
    grad_correction: float
    per_microbatch_metric: list[list[float]]
    draft_loss_step: float


class DraftCase(TypedDict):
    """Logits [N,S,V], mask and bins [N,S], weights [B]."""

    id: str
    student_logits: torch.Tensor
    teacher_logits: torch.Tensor
    mask: torch.Tensor
    bin_ids: torch.Tensor
    weights: torch.Tensor
    numerators: torch.Tensor
    counts: torch.Tensor
    normalized_loss: float
    grad_of_weighted_numerator: torch.Tensor


CASES = torch.load(FOLDER / "draft_loss_cases.pt", weights_only=True)
STEPS = cast("list[UpstreamStep]", CASES["split_cases"])
DRAFTS = cast("list[DraftCase]", CASES["cases"])
assert STEPS
assert DRAFTS


def golden_step(*, binned: bool, averaged_over: int = 1) -> tuple[list[StepReport], torch.Tensor]:
    """Each rank's report, and the sum of their gradients [5]."""
    meeting = Meeting(RANKS)
    parameters = [torch.zeros(5, dtype=torch.float64, requires_grad=True) for _ in range(RANKS)]
    weights = GOLDEN["bin_weight"].tolist() if binned else [1.0]

    def story(rank: int) -> StepReport:
        normaliser = StepNormaliser(
            StepLoss(parameters=[parameters[rank]], bin_weights=weights),
            reduction=meeting.of(rank),
            gradients_averaged_over=averaged_over,
        )
        with normaliser.begin(step=0) as step:
            for number in np.unique(GOLDEN["microbatch"][GOLDEN["rank"] == rank]):
                own = (GOLDEN["rank"] == rank) & (GOLDEN["microbatch"] == number)
                sums, counts = sums_and_counts(parameters[rank], own, binned=binned)
                step.microbatch(int(number), sums, counts).backward()
            return step.finish()

    reports = on_ranks(RANKS, story)
    gradients = [each.grad for each in parameters if each.grad is not None]
    return reports, torch.stack(gradients).sum(0)


def sums_and_counts(
    parameter: torch.Tensor, own: np.ndarray, *, binned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of losses with the golden values and gradients, one number a bin."""
    each = torch.from_numpy(GOLDEN["loss"][own]) + torch.from_numpy(GOLDEN["grad"][own]) @ parameter
    mask, bins = torch.from_numpy(GOLDEN["mask"][own]), torch.from_numpy(GOLDEN["bin"][own])
    masks = [mask * (bins == b) for b in range(len(GOLDEN["bin_weight"]))] if binned else [mask]
    return torch.stack([(each * m).sum() for m in masks]), torch.stack([m.sum() for m in masks])


def assert_near(got: torch.Tensor, name: str) -> None:
    assert torch.allclose(got, torch.from_numpy(GOLDEN[name]), rtol=1e-10, atol=1e-10)


class TestSplit:
    def test_mean_loss_and_count_on_every_rank(self) -> None:
        reports, _ = golden_step(binned=False)

        for report in reports:
            assert report.loss == pytest.approx(float(GOLDEN["mean_loss"]), rel=1e-10)
            assert report.losses["loss"].counts == (float(GOLDEN["count"]),)

    def test_mean_grad(self) -> None:
        assert_near(golden_step(binned=False)[1], "mean_grad")

    @pytest.mark.parametrize("name", ["mean_of_microbatch_means", "mean_of_rank_means"])
    def test_is_no_mean_of_means(self, name: str) -> None:
        _, gradient = golden_step(binned=False)

        assert not torch.allclose(gradient, torch.from_numpy(GOLDEN[f"wrong_{name}"]), rtol=0.1)

    def test_bin_numerator_and_bin_count(self) -> None:
        report = golden_step(binned=True)[0][0].losses["loss"]

        assert_near(torch.tensor(report.sums, dtype=torch.float64), "bin_numerator")
        assert report.counts == tuple(GOLDEN["bin_count"])

    def test_weighted_loss_and_weighted_grad(self) -> None:
        reports, gradient = golden_step(binned=True)

        assert reports[0].loss == pytest.approx(float(GOLDEN["weighted_loss"]), rel=1e-10)
        assert_near(gradient, "weighted_grad")

    def test_mean_grad_where_a_framework_averages(self) -> None:
        assert_near(golden_step(binned=False, averaged_over=RANKS)[1] / RANKS, "mean_grad")


class TestWorked:
    """The example of docs/math.md, "A step in parts": rank 0 has two micro batches, rank 1 one."""

    CUTS = ((slice(0, 2), slice(2, 3)), (slice(3, 6),))

    def gradient(self, *, averaged_over: int) -> float:
        meeting = Meeting(2)
        x, mask = (torch.from_numpy(GOLDEN[f"worked_{name}"]) for name in ("x", "mask"))
        parameters = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2)]

        def story(rank: int) -> None:
            normaliser = StepNormaliser(
                StepLoss(parameters=[parameters[rank]]),
                reduction=meeting.of(rank),
                gradients_averaged_over=averaged_over,
            )
            with normaliser.begin(step=0) as step:
                for number, own in enumerate(self.CUTS[rank]):
                    loss_sum = (parameters[rank] * x[own] * mask[own]).sum()
                    step.microbatch(number, loss_sum, mask[own].sum()).backward()
                step.finish()

        on_ranks(2, story)
        return sum(float(each.grad) for each in parameters if each.grad is not None)

    def test_added_up(self) -> None:
        wanted = float(GOLDEN["worked_grad"])

        assert self.gradient(averaged_over=1) == pytest.approx(wanted, rel=1e-10)

    def test_averaged(self) -> None:
        wanted = float(GOLDEN["worked_grad"])

        assert self.gradient(averaged_over=2) / 2 == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("order", RescaleOrder)
@pytest.mark.parametrize("case", STEPS, ids=[case["id"] for case in STEPS])
class TestUpstreamSteps:
    """Policy and draft have one parameter each; a token's policy gradient is 1."""

    def run(self, case: UpstreamStep, order: RescaleOrder) -> tuple[StepReport, float, float]:
        """A rank's report, and the gradients of the policy and of the draft."""
        ranks = case["ranks"]
        meeting = Meeting(len(ranks))
        leaves = torch.ones(len(ranks), 2, dtype=torch.float64)
        parameters = [[each.clone().requires_grad_() for each in row] for row in leaves]

        def story(rank: int) -> StepReport:
            policy, draft = parameters[rank]
            normaliser = StepNormaliser(
                StepLoss(name="policy", parameters=[policy]),
                StepLoss(name="draft", parameters=[draft]),
                reduction=meeting.of(rank),
                order=order,
            )
            with normaliser.begin(step=0) as step:
                for number, each in enumerate(ranks[rank]):
                    tokens = each["policy_valid_tokens"]
                    loss = step.microbatch(number, policy * tokens, tokens, loss="policy")
                    sums, count = draft * each["draft_numerator"], each["draft_count"]
                    (loss + step.microbatch(number, sums, count, loss="draft")).backward()
                return step.finish()

        report = on_ranks(len(ranks), story)[0]
        gradients = [sum(float(each[i].grad or 0.0) for each in parameters) for i in (0, 1)]
        return report, gradients[0], gradients[1]

    def test_counts_and_draft_loss(self, case: UpstreamStep, order: RescaleOrder) -> None:
        report, _, _ = self.run(case, order)
        policy, draft = report.losses["policy"], report.losses["draft"]

        assert policy.denominator == case["policy_count"]
        assert draft.denominator == case["global_draft_count"]
        assert draft.mean == pytest.approx(case["draft_loss_step"], rel=1e-5)
        metrics = sum(sum(rank) for rank in case["per_microbatch_metric"])
        assert draft.mean == pytest.approx(metrics, rel=1e-5)

    def test_gradients(self, case: UpstreamStep, order: RescaleOrder) -> None:
        _, policy, draft = self.run(case, order)
        raw = sum(each["draft_numerator"] for rank in case["ranks"] for each in rank)

        assert policy == pytest.approx(case["policy_count"] * case["policy_scale"], rel=1e-4)
        scale = case["policy_scale"] * case["grad_correction"]
        assert draft == pytest.approx(raw * scale, rel=1e-4)
        assert scale == pytest.approx(case["draft_metric_scale"], rel=1e-5)


@pytest.mark.parametrize("tile", [3, 8192])
@pytest.mark.parametrize("case", DRAFTS, ids=[case["id"] for case in DRAFTS])
class TestDraftBins:
    """Each row of the case is a micro batch; the rows take turns on two ranks."""

    def run(self, case: DraftCase, tile: int) -> tuple[StepReport, torch.Tensor]:
        meeting = Meeting(2)
        student = [case["student_logits"].clone().requires_grad_() for _ in range(2)]
        teacher = case["teacher_logits"]

        def story(rank: int) -> StepReport:
            normaliser = StepNormaliser(
                StepLoss(parameters=[student[rank]], bin_weights=case["weights"].tolist()),
                reduction=meeting.of(rank),
            )
            with normaliser.begin(step=0) as step:
                for row in range(rank, len(teacher), 2):
                    sums, counts = dense_soft_cross_entropy(
                        student[rank][row],
                        teacher[row],
                        case["mask"][row],
                        bin_ids=case["bin_ids"][row],
                        bins=len(case["weights"]),
                        tile=tile,
                    )
                    step.microbatch(row, sums, counts).backward()
                return step.finish()

        report = on_ranks(2, story)[0]
        return report, sum(
            (each.grad for each in student if each.grad is not None), torch.zeros(())
        )

    def test_numerators_counts_and_normalized_loss(self, case: DraftCase, tile: int) -> None:
        loss = self.run(case, tile)[0].losses["loss"]

        assert loss.sums == pytest.approx(case["numerators"].tolist(), rel=1e-5)
        assert loss.counts == tuple(case["counts"].tolist())
        assert loss.mean == pytest.approx(case["normalized_loss"], rel=1e-5)

    def test_gradient(self, case: DraftCase, tile: int) -> None:
        report, gradient = self.run(case, tile)

        denominator = report.losses["loss"].denominator
        wanted = case["grad_of_weighted_numerator"].double() / (denominator or 1.0)
        assert torch.allclose(gradient.double(), wanted, rtol=1e-4, atol=1e-7)

    def test_of_the_whole_case_at_once(self, case: DraftCase, tile: int) -> None:
        leaf = case["student_logits"].clone().requires_grad_()

        sums, counts = dense_soft_cross_entropy(
            leaf,
            case["teacher_logits"],
            case["mask"],
            bin_ids=case["bin_ids"],
            bins=len(case["weights"]),
            tile=tile,
        )
        (sums * case["weights"]).sum().backward()

        assert sums.tolist() == pytest.approx(case["numerators"].tolist(), rel=1e-5)
        assert counts.tolist() == case["counts"].tolist()
        assert leaf.grad is not None
        wanted = case["grad_of_weighted_numerator"]
        assert torch.allclose(leaf.grad, wanted, rtol=1e-4, atol=1e-6)
