"""Every loss by its definition, in float64 and by plain autograd: what the tests hold ours against.

Nothing is shared with what is tested: categories are laid out in full where a tail needs them,
[P,V], and each sum is written as it stands in the books.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from teacher_logits_client import losses
from teacher_logits_client.losses import Tail
from teacher_logits_client.targets import Targets

Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Terms = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def targets_of(
    teacher: torch.Tensor, *, k: int, temperature: float = 1.0, width: int | None = None
) -> Targets:
    """From dense float64 logits [P,V], by the definition."""
    logprobs = (teacher.double() / temperature).log_softmax(1)
    kept = min(k, teacher.shape[1])
    values, ids = logprobs.topk(kept, dim=1)
    tail = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
    ids = ids.masked_fill(values == -torch.inf, -1)
    spare = (width or kept) - kept
    count = len(teacher)
    return Targets(
        topk_ids=torch.nn.functional.pad(ids, (0, spare), value=-1).int(),
        topk_logprobs=torch.nn.functional.pad(values, (0, spare), value=-1e4).clamp_min(-1e4),
        log_tail=tail.clamp_min(-1e4),
        actual_logprob=None,
        valid=torch.ones(count, dtype=torch.bool),
        temperature=temperature,
        row_offsets=torch.tensor([0, count]),
    )


def normal(*shape: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return log_p.exp() * (log_p - log_q)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return log_q.exp() * (log_q - log_p)


def jensen_shannon(beta: float, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)


def skew_kl(alpha: float, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    p, q = log_p.exp(), log_q.exp()
    return p * (log_p - (alpha * p + (1 - alpha) * q).log())


def skew_reverse_kl(alpha: float, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    p, q = log_p.exp(), log_q.exp()
    return q * (log_q - ((1 - alpha) * p + alpha * q).log())


def total_variation(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() - log_q.exp()).abs() / 2


def soft_cross_entropy(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return -log_p.exp() * log_q


BY_DEFINITION: dict[str, tuple[Loss, Terms]] = {
    "forward_kl": (losses.forward_kl, forward_kl),
    "reverse_kl": (losses.reverse_kl, reverse_kl),
    "jsd 0.5": (losses.generalised_jsd, partial(jensen_shannon, 0.5)),
    "jsd 0.1": (partial(losses.generalised_jsd, beta=0.1), partial(jensen_shannon, 0.1)),
    "skew_kl": (partial(losses.skew_kl, alpha=0.3), partial(skew_kl, 0.3)),
    "skew_reverse_kl": (
        partial(losses.skew_reverse_kl, alpha=0.3),
        partial(skew_reverse_kl, 0.3),
    ),
    "total_variation": (losses.total_variation, total_variation),
    "soft_cross_entropy": (losses.soft_cross_entropy, soft_cross_entropy),
}
"""Each loss that takes a tail, and what it sums; at shares other than the defaults as well."""

BUCKETS = [(name, Tail.BUCKET) for name in BY_DEFINITION]
REFUSED = [("reverse_kl", Tail.TEACHER_RENORMALISED)] + [
    (name, Tail.NEMO_FLOOR) for name in BY_DEFINITION if name != "reverse_kl"
]
ALL = [pair for pair in product(BY_DEFINITION, Tail) if pair not in REFUSED]
"""Every loss with every tail that it takes."""


def loss_of(name: str, tail: Tail) -> Loss:
    return partial(BY_DEFINITION[name][0], tail=tail)


def by_definition(name: str, tail: Tail, student: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Each position's loss [P], times T²; the student has no -inf, every entry is finite."""
    log_p, log_q, there = categories(tail, student, targets)
    terms = BY_DEFINITION[name][1](log_p, log_q)
    return torch.where(there, terms, 0.0).sum(1) * targets.temperature**2


def mse_by_definition(student: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Each position's mean squared error [P], times T²."""
    log_p, log_q, there = categories(Tail.TRUNCATED, student, targets)
    squares = torch.where(there, (log_p - log_q) ** 2, 0.0).sum(1)
    return squares / there.sum(1).clamp_min(1) * targets.temperature**2


def categories(
    tail: Tail, student: torch.Tensor, targets: Targets
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log p and log q [P,C], and which of the categories there are; 0 at those that are not."""
    log_q = (student.double() / targets.temperature).log_softmax(1)
    present = targets.topk_ids >= 0
    places = (present.nonzero()[:, 0], targets.topk_ids[present].long())
    kept = torch.zeros_like(log_q, dtype=torch.bool).index_put(places, torch.tensor(True))
    chosen = log_q.gather(1, targets.topk_ids.long().clamp_min(0))
    log_p = targets.topk_logprobs.double()
    if tail in (Tail.TEACHER_RENORMALISED, Tail.NEMO_FLOOR):
        outside = -100.0 if tail is Tail.NEMO_FLOOR else -1e4
        renormalised = log_p.masked_fill(~present, -torch.inf).log_softmax(1)
        spread = torch.full_like(log_q, outside).index_put(places, renormalised[present])
        return spread, log_q, torch.ones_like(kept)
    if tail is Tail.RENORMALISED:
        log_p = log_p.masked_fill(~present, -torch.inf).log_softmax(1)
        chosen = chosen.masked_fill(~present, -torch.inf).log_softmax(1)
    if tail is Tail.BUCKET:
        rest = ~kept.all(1, keepdim=True)
        log_q0 = log_q.masked_fill(kept & rest, -math.inf).logsumexp(1, keepdim=True)
        log_p = torch.cat([log_p, targets.log_tail.double().unsqueeze(1)], 1)
        chosen = torch.cat([chosen, torch.where(rest, log_q0, 0.0)], 1)
        present = torch.cat([present, rest], 1)
    return log_p.masked_fill(~present, 0.0), chosen.masked_fill(~present, 0.0), present
