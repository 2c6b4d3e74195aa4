"""Recipes of distillation: what a student is given of its teacher, and the loss over it.

    no_teacher      the text alone: cross-entropy on the token that comes next
    tail_bucket     the K most probable ids, and the mass outside them as one category more
    renormalised    the same ids, both sides divided by their mass on them
    sampled         M ids by threshold sampling: the head as it is, the tail by chance, unbiased

The teacher's rows are scored once, and every recipe at every seed learns from the same bytes. A
smaller K takes a prefix of what was scored: what is dropped goes into the tail, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from teacher_logits_client import losses
from teacher_logits_client.losses import Tail
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from teacher_logits_client.demo.student import Student

SumAndCount = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A name, and K or M: the ids a position that the student is given, 0 without a teacher."""

    name: str
    k: int

    def __str__(self) -> str:
        return f"{self.name} {self.k}" if self.k else self.name


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """Rows [N,S] of one batch, what the teacher says of them, and what it says by chance."""

    rows: torch.Tensor
    targets: Targets
    sampled: Targets | None


def loss_of(recipe: Recipe, scored: Scored) -> Callable[[torch.Tensor], SumAndCount]:
    """Return the loss that a recipe puts on the logits [N,S,V] of a batch."""
    if recipe.name == "no_teacher":
        return lambda logits: next_token_loss(logits, scored.rows)
    if recipe.name == "sampled":
        if scored.sampled is None:
            raise SystemExit("nothing was sampled for the recipe sampled")
        sampled = scored.sampled
        return lambda logits: losses.soft_cross_entropy(logits, sampled, tail=Tail.TRUNCATED)
    targets = prefix(scored.targets, recipe.k)
    tail = {"tail_bucket": Tail.BUCKET, "renormalised": Tail.RENORMALISED}[recipe.name]
    return lambda logits: losses.forward_kl(logits, targets, tail=tail)


def next_token_loss(logits: torch.Tensor, rows: torch.Tensor) -> SumAndCount:
    """Return the cross-entropy of the text itself, summed, and its tokens."""
    ahead = logits[:, :-1].flatten(0, 1).float()
    total = torch.nn.functional.cross_entropy(ahead, rows[:, 1:].flatten(), reduction="sum")
    return total, torch.tensor(len(ahead))


def prefix(targets: Targets, k: int) -> Targets:
    """Return the first K entries, the others folded into the tail: exact, since all are true."""
    if k == targets.topk_ids.shape[-1]:
        return targets
    rest = torch.cat([targets.topk_logprobs[:, k:], targets.log_tail.unsqueeze(1)], 1)
    return replace(
        targets,
        topk_ids=targets.topk_ids[:, :k].contiguous(),
        topk_logprobs=targets.topk_logprobs[:, :k].contiguous(),
        log_tail=rest.logsumexp(1),
    )


def threshold_sample(
    logits: torch.Tensor, size: int, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [P,M] and the logs of their weights, whose expectation is the distribution.

    ``logits`` [P,V], ``uniforms`` fp64 [P], one a position. The h most probable ids have their
    own probability, the others one weight each, the threshold: math note 1.6.
    """
    probabilities = logits.float().softmax(1)
    top, ids = probabilities.topk(size, dim=1)
    upto = probabilities.cumsum(1, dtype=torch.float64)  # fp32 would drift
    top = top.double()
    left = upto[:, -1:] - (top.cumsum(1) - top)  # S: the mass from the h-th on
    wanted = torch.arange(size, 0, -1, dtype=torch.float64)  # M - h
    exact = (top * wanted > left).int().cumprod(1).sum(1).clamp_max(size - 1)
    in_head = torch.arange(size) < exact.unsqueeze(1)
    tail = probabilities.scatter_(1, ids, torch.where(in_head, 0.0, top).float())
    upto = torch.cumsum(tail, 1, dtype=torch.float64, out=upto)
    threshold = upto[:, -1:] / wanted[exact].unsqueeze(1)
    picks = (torch.arange(size) - exact.unsqueeze(1) + uniforms.unsqueeze(1)) * threshold
    # Just below the whole, where the sum's last digit would put the last pick behind all ids.
    picks = picks.clamp_min(0.0).minimum(torch.nextafter(upto[:, -1:], torch.zeros(1).double()))
    picked = torch.searchsorted(upto, picks, right=True)
    return torch.where(in_head, ids, picked), torch.where(in_head, top, threshold).log()


def sampled_targets(
    of: Targets, chunks: Iterable[torch.Tensor], *, size: int, chance: torch.Generator
) -> Targets:
    """Return targets of sampled ids at the positions of others, from the teacher's logits."""
    parts = []
    for logits in chunks:
        uniforms = torch.rand(len(logits), generator=chance, dtype=torch.float64)
        parts.append(threshold_sample(logits, size, uniforms))
    return replace(
        of,
        topk_ids=torch.cat([ids for ids, _ in parts]).int(),
        topk_logprobs=torch.cat([logs for _, logs in parts]).float(),
        log_tail=torch.full_like(of.log_tail, ABSENT_LOGPROB),
    )


@dataclass(frozen=True, kw_only=True)
class HeldOutQuality:
    """On held-out text: KL (teacher ‖ student) a position, in nats, and perplexity."""

    divergence: float
    perplexity: float


@torch.no_grad()
def measure(student: Student, held_out: list[Scored]) -> HeldOutQuality:
    """Measure a student on rows that it has not seen, with all entries and the tail as a bucket."""
    sums = torch.zeros(4, dtype=torch.float64)
    for scored in held_out:
        logits = student.logits(scored.rows)
        both = (
            *losses.forward_kl(logits, scored.targets),
            *next_token_loss(logits, scored.rows),
        )
        sums += torch.stack([each.double() for each in both])
    divergence, positions, surprise, tokens = sums.tolist()
    return HeldOutQuality(
        divergence=divergence / positions,
        perplexity=float(torch.tensor(surprise / tokens, dtype=torch.float64).exp()),
    )
