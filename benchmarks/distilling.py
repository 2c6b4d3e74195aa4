"""Recipes of distillation: what a student is given of its teacher, and the loss over it.

    no_teacher      the text alone: cross-entropy on the token that comes next
    tail_bucket     the K most probable ids, and the mass outside them as one category more
    renormalised    the same ids, both sides divided by their mass on them
    sampled         M ids of a session of `Sampled`: the head as it is, the tail by chance, unbiased

Every recipe at every seed learns from the same bytes. A smaller K takes a prefix of what was
scored: what is dropped goes into the tail, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from teacher_logits_client import losses
from teacher_logits_client.losses import Tail

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits_client.demo.student import Student
    from teacher_logits_client.targets import Targets

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
    """Rows [N,S] of one batch, the teacher's K best of them, and a sample where one is learnt."""

    rows: torch.Tensor
    targets: Targets
    sampled: Targets | None = None


def loss_of(recipe: Recipe, scored: Scored) -> Callable[[torch.Tensor], SumAndCount]:
    """Return the loss that a recipe puts on the logits [N,S,V] of a batch."""
    if recipe.name == "no_teacher":
        return lambda logits: next_token_loss(logits, scored.rows)
    if recipe.name == "sampled":
        if scored.sampled is None:
            raise SystemExit("nothing was sampled for the recipe sampled")
        sampled = scored.sampled
        return lambda logits: losses.forward_kl(logits, sampled)
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
