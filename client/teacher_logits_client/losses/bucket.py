"""The tail bucket: any divergence over K ids and one bucket for everything else, in O(K) memory.

The student's logits z become K+1 categories as the teacher's did: a_i = z_i - L for the K ids,
a_0 = L_out - L, with L_out the log-sum-exp over the complement. A divergence D over them has a
gradient in closed form (math note 3.1). With h_i = dD/d(log q_i) and H their sum,

    c_i = h_i - q_i H            dD/dz_j = c_j                        for j among the ids
    c_0 = h_0 - q_0 H            dD/dz_j = c_0 * exp(z_j - L_out)     for every other j

so K+1 numbers and L_out a position are all that backward needs beside the logits themselves.

Promises: no clamp and no epsilon, so no gradient dies where the student's tail is tiny; no
array of the size of the logits but their gradient; positions left out cost nothing and touch
nothing, whatever their logits hold. First derivatives only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from teacher_logits.complement import complement_sums, computing_type, rows_at_once, without

Divergence = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From log p and log q [R,K+1], the bucket last: the value [R] and h = dD/d(log q) [R,K+1]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """What a loss needs beside the student's logits, [P,V] or with padding [N*S,V].

    ``ids`` int64 [P,K], -1 where absent; ``log_teacher`` [P,K+1], its log-probabilities at
    ``temperature``, the bucket last; ``weights`` [P], where 0 leaves a position out entirely;
    ``places`` int64 [P], the row of the logits that each position is at, None where that is
    the position's own number. No two are the same.
    """

    ids: torch.Tensor
    log_teacher: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor | None
    temperature: float
    divergence: Divergence


def bucket_loss(logits: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return temperature² times the weighted sum of a divergence over positions."""
    loss = _BucketLoss.apply(logits, terms)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", loss)


class _BucketLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: torch.Tensor, terms: Terms) -> torch.Tensor:
        kept, temperature = terms.weights.nonzero().squeeze(1), terms.temperature
        ids = terms.ids[kept]
        weights = terms.weights[kept].to(computing_type(logits)) * temperature
        log_teacher = terms.log_teacher[kept].to(weights.dtype)
        if terms.places is not None:
            # From here on rows of the logits; padding is never among them.
            kept = terms.places[kept]
        coarse = _coarse_student(logits, ids, kept, temperature)
        log_student = coarse.log_softmax(1)
        values, slopes = terms.divergence(log_teacher, log_student)
        pulls = slopes - log_student.exp() * slopes.sum(1, keepdim=True)
        ctx.save_for_backward(logits, ids, kept, coarse[:, -1], pulls * weights.unsqueeze(1))
        ctx.temperature = temperature  # type: ignore[attr-defined]
        return (values * weights).sum() * temperature

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, ids, kept, log_outside, pulls = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = _scatter_gradient(
            logits,
            ids=ids,
            kept=kept,
            log_outside=log_outside,
            pulls=pulls * upstream,
            temperature=ctx.temperature,  # type: ignore[attr-defined]
        )
        return gradient, None


def _coarse_student(
    logits: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return [R,K+1]: the logits of the ids over temperature, and L_out last."""
    dtype = computing_type(logits)
    coarse = torch.empty(len(ids), ids.shape[1] + 1, dtype=dtype, device=logits.device)
    for part, rows in _pieces(logits, kept):
        top, sums = complement_sums(rows, ids[part], temperatures=(temperature,))
        chosen = rows.gather(1, ids[part].clamp_min(0)).to(dtype) / temperature
        coarse[part, :-1] = chosen.masked_fill_(ids[part] < 0, -torch.inf)
        coarse[part, -1:] = top / temperature + sums.log()
    return coarse


def _scatter_gradient(
    logits: torch.Tensor,
    *,
    ids: torch.Tensor,
    kept: torch.Tensor,
    log_outside: torch.Tensor,
    pulls: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient [P,V]: ``pulls`` at the ids, the bucket's share everywhere else."""
    # Where nothing is outside, subtracting +inf makes every share 0.
    outside = log_outside.masked_fill(log_outside == -torch.inf, torch.inf) * temperature
    at_ids = pulls[:, :-1].masked_fill(ids < 0, 0.0)
    whole = len(kept) == len(logits)
    gradient = torch.empty_like(logits) if whole else torch.zeros_like(logits)
    for part, rows in _pieces(logits, kept):
        share = rows.to(pulls.dtype) - outside[part].unsqueeze(1)
        without(share, ids[part]).mul_(math.log2(math.e) / temperature).exp2_()
        share.mul_(pulls[part, -1:])
        # Added, not assigned: an absent id adds 0 to column 0, which a real id may hold.
        share.scatter_add_(1, ids[part].clamp_min(0), at_ids[part])
        gradient[part if whole else kept[part]] = share.to(gradient.dtype)
    return gradient


def _pieces(logits: torch.Tensor, kept: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the kept rows of ``logits`` a few at a time; views where every row is kept."""
    step = rows_at_once(logits.shape[1], logits.device)
    for start in range(0, len(kept), step):
        part = slice(start, min(start + step, len(kept)))
        yield part, logits[part if len(kept) == len(logits) else kept[part]]
