"""Our losses against NeMo RL's own distillation loss: its inputs, its sum, its gradient.

Upstream renormalises on the K ids both sides (`zero_outside_topk` false) or the teacher alone,
with log-probability -100 outside; `mixed` is a weighted sum of forward and reverse KL. It shifts
the token mask in the loss and divides in there; here the mask is made first, and the test divides.

Where upstream's answer is a defect by our rules it is said here: at K = 1 with both sides
renormalised it is a loss of 0 that teaches nothing, and ours is refused. Its failure on padded
packed rows (`packed_upstream_failures`) has no counterpart: ours take flat rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases.golden import tensors

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client import losses
from teacher_logits_client.losses import Tail
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets

Case = dict[str, Any]

FILE = tensors("distill_loss_cases.pt")
DENOMINATOR_EPS = FILE["defaults"]["denominator_eps"]
BLIND = {
    each["id"]
    for each in FILE["cases"]
    if each["teacher_topk_logits"].shape[-1] == 1 and not each["config"]["zero_outside_topk"]
}
"""K = 1 and both sides renormalised."""


def each(cases: list[Case]) -> pytest.MarkDecorator:
    if not cases:
        raise ValueError("no case of this kind is there")
    ids = [f"{case['id']}-{case.get('tag', 'packed')}" for case in cases]
    return pytest.mark.parametrize("case", cases, ids=ids)


def targets(logits: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> Targets:
    """Flat targets of the top-k logits [N,S,K], which say nothing of the mass outside."""
    held = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    valid = torch.arange(ids.shape[1]) < lengths.unsqueeze(1) - 1
    return Targets(
        topk_ids=ids[held].int(),
        topk_logprobs=logits[held].float().log_softmax(-1),
        log_tail=torch.full((int(held.sum()),), ABSENT_LOGPROB),
        actual_logprob=None,
        valid=valid[held],
        temperature=1.0,
        row_offsets=torch.tensor([0, *lengths.tolist()]).cumsum(0),
    )


def mask(case: Case, lengths: torch.Tensor) -> torch.Tensor:
    """Flat: position s counts as token s + 1 does."""
    tokens = case["token_mask"] * case["sample_mask"].unsqueeze(1)
    held = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    return torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)[held]


def weights(config: dict[str, Any]) -> tuple[float, float]:
    """What forward and reverse KL weigh."""
    forward = {"forward": 1.0, "reverse": 0.0}.get(config["kl_type"], config["mixed_kl_weight"])
    return forward, 1 - forward


def loss_and_gradient(
    case: Case, logits: torch.Tensor, golden: Targets, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    zero_outside = case["config"]["zero_outside_topk"]
    tails = (
        (Tail.TEACHER_RENORMALISED, Tail.NEMO_FLOOR) if zero_outside else (Tail.RENORMALISED,) * 2
    )
    leaf = logits.clone().requires_grad_()
    total = torch.zeros(())
    for loss, weight, tail in zip(
        (losses.forward_kl, losses.reverse_kl), weights(case["config"]), tails, strict=True
    ):
        if weight:
            total = total + weight * loss(leaf, golden, counted, tail=tail)[0]
    total = total / (case["global_valid_toks"] + DENOMINATOR_EPS)
    total.backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


def assert_near(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    # Both round a bf16 gradient once, from numbers that may lie on either side of half a step.
    step = torch.finfo(wanted.dtype).eps if wanted.dtype == torch.bfloat16 else 0.0
    assert got.dtype == wanted.dtype
    assert torch.allclose(got.double(), wanted.double(), atol=tolerance, rtol=max(tolerance, step))


@each([case for case in FILE["cases"] if case["id"] not in BLIND])
def test_rectangles_have_the_loss_and_gradient_of_upstream(case: Case) -> None:
    logits = case["student_logits"]
    lengths = torch.full((len(logits),), logits.shape[1])
    golden = targets(case["teacher_topk_logits"], case["teacher_topk_indices"], lengths)

    loss, gradient = loss_and_gradient(case, logits, golden, mask(case, lengths))

    assert_near(loss, case["loss"], 1e-5)
    assert_near(gradient, case["grad_student_logits"], 1e-4)


@each([case for case in FILE["cases"] if case["id"] in BLIND])
def test_a_loss_that_teaches_nothing_upstream_is_refused(case: Case) -> None:
    logits = case["student_logits"]
    lengths = torch.full((len(logits),), logits.shape[1])
    golden = targets(case["teacher_topk_logits"], case["teacher_topk_indices"], lengths)

    assert case["loss"] == 0
    assert not case["grad_student_logits"].any()
    with pytest.raises(PayloadInvalidError, match=r"K = 1, .* is 0 whatever the student says"):
        loss_and_gradient(case, logits, golden, mask(case, lengths))


@each(FILE["packed_cases"])
def test_packed_rows_have_the_loss_and_gradient_of_upstream(case: Case) -> None:
    lengths, packed = case["input_lengths"], case["packed_student_logits"]
    golden = targets(case["teacher_topk_logits"], case["teacher_topk_indices"], lengths)
    starts = case["cu_seqlens_padded"][:-1]
    places = torch.cat(
        [start + torch.arange(int(n)) for start, n in zip(starts, lengths, strict=True)]
    )
    expected = case["grad_packed_student_logits"].flatten(0, 1)

    loss, gradient = loss_and_gradient(
        case, packed.flatten(0, 1)[places], golden, mask(case, lengths)
    )

    assert_near(loss, case["loss"], 1e-5)
    assert_near(gradient, expected[places], 1e-4)
    padding = torch.ones(len(expected), dtype=torch.bool).index_fill(0, places, value=False)
    assert not expected[padding].any()


def test_no_entries_at_all_are_refused_as_upstream_does() -> None:
    assert {"k": 0} in [error["config"] for error in FILE["error_cases"]]
    nothing = torch.zeros(1, 2, 0)
    golden = targets(nothing, nothing.long(), torch.tensor([2]))

    with pytest.raises(PayloadInvalidError, match="K = 0"):
        losses.forward_kl(torch.zeros(2, 5), golden)
