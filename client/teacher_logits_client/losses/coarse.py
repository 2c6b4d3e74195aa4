"""The coarse student: any divergence over K ids and one category for everything else, in O(K).

The student's logits z become K+1 categories as the teacher's did: a_i = z_i - L for the K ids,
a_0 = L_out - L, with L_out the log-sum-exp over the complement. A divergence D over them has a
gradient in closed form (docs/math.md, "One gradient for every divergence"). With
h_i = dD/d(log q_i) and H their sum,

    c_i = h_i - q_i H            dD/dz_j = c_j                        for j among the ids
    c_0 = h_0 - q_0 H            dD/dz_j = c_0 * exp(z_j - L_out)     for every other j

so K+1 numbers and L_out a position are all that backward needs beside the logits themselves.
A tail other than the bucket changes the numbers only: renormalised sides have no category 0
(q_0 = 0), a renormalised teacher has no mass in it (p_0 = 0), a truncated sum no term of it
(h_0 = 0). NeMo RL's floor needs one number more (``floor``).

Promises: no clamp and no epsilon, so no gradient dies where the student's tail is tiny; no
array of the size of the logits but their gradient; positions left out cost nothing and touch
nothing, whatever their logits hold. First derivatives only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.selection.complement import (
    complement_sums,
    computing_type,
    rows_at_once,
    without,
)
from teacher_logits_client.losses.derivatives import first_only, save, saved
from teacher_logits_client.losses.floor import outside_entropy
from teacher_logits_client.losses.merging import over_shards
from teacher_logits_client.losses.powers import powers
from teacher_logits_client.losses.sharding import refused_together
from teacher_logits_client.losses.tails import Tail
from teacher_logits_client.losses.weighing import Inputs, weigh
from teacher_logits_client.targets import ABSENT_LOGPROB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kept:
    """The positions that count: their ids [R,K], their rows of the logits [R], and how to read.

    Ids are columns of these logits, -1 where they have none; ``columns`` is how many are real.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    columns: int
    temperature: float
    tail: Tail

    def pieces(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield their rows of ``logits`` a few at a time; views where every row is kept."""
        if not self.columns:
            return
        step = rows_at_once(self.columns, logits.device)
        whole = len(self.rows) == len(logits)
        for start in range(0, len(self.rows), step):
            part = slice(start, min(start + step, len(self.rows)))
            yield part, logits[part if whole else self.rows[part], : self.columns]


def coarse_loss(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return temperature² times the weighted sum of a divergence over positions."""
    loss = _CoarseLoss.apply(logits, inputs)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", loss)


class _CoarseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        at, rows = inputs.kept()
        kept = _Kept(
            ids=inputs.own_ids(at),
            rows=rows,
            columns=inputs.own_columns(logits.shape[1]),
            temperature=inputs.temperature,
            tail=inputs.tail,
        )
        with refused_together(inputs.shard, logits):
            coarse = _coarse_student(logits, kept)
            entropy = _outside_entropy(logits, kept, coarse[:, -1:])
        coarse, entropy = over_shards(coarse, entropy, inputs, at, count=len(logits))
        weighed = weigh(coarse, entropy, inputs, at)
        save(ctx, logits, coarse[:, -1], weighed.pulls, weighed.of_logs)
        ctx.kept = kept  # type: ignore[attr-defined]
        return weighed.loss

    @staticmethod
    @first_only
    def backward(ctx: FunctionCtx, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, log_outside, pulls, of_logs = saved(ctx)
        kept: _Kept = ctx.kept  # type: ignore[attr-defined]
        pulls = pulls * upstream
        whole = len(kept.rows) == len(logits)
        blank = torch.zeros_like
        if whole and kept.columns == logits.shape[1] and kept.tail is not Tail.RENORMALISED:
            blank = torch.empty_like
        gradient = blank(logits, memory_format=torch.contiguous_format)
        if kept.tail is not Tail.RENORMALISED:
            shares = _outside_shares(logits, kept, log_outside, pulls[:, -1:], of_logs * upstream)
            for part, share in shares:
                gradient[part if whole else kept.rows[part], : kept.columns] = share
        if not kept.columns:
            return gradient, None
        # Added, not assigned: an absent id adds 0 to column 0, which a real id may hold.
        at_ids = pulls[:, :-1].masked_fill(kept.ids < 0, 0.0).to(gradient.dtype)
        places = kept.rows.unsqueeze(1) * logits.shape[1] + kept.ids.clamp_min(0)
        _add_at(gradient.view(-1), places.flatten(), at_ids.flatten())
        return gradient, None


def _coarse_student(logits: torch.Tensor, kept: _Kept) -> torch.Tensor:
    """Return [R,K+1]: the logits of the ids over temperature, and L_out last.

    An id without a column has -inf, and so has L_out where both sides are renormalised, as if
    nothing were outside.
    """
    ids, temperature, dtype = kept.ids, kept.temperature, computing_type(logits)
    shape = len(ids), ids.shape[1] + 1
    coarse = torch.full(shape, -torch.inf, dtype=dtype, device=logits.device)
    for part, rows in kept.pieces(logits):
        chosen = rows.gather(1, ids[part].clamp_min(0)).to(dtype) / temperature
        coarse[part, :-1] = chosen.masked_fill_(ids[part] < 0, -torch.inf)
        if kept.tail is not Tail.RENORMALISED:
            top, sums = complement_sums(rows, ids[part], temperatures=(temperature,))
            coarse[part, -1:] = top / temperature + sums.log()
    return coarse


def _outside_entropy(logits: torch.Tensor, kept: _Kept, log_outside: torch.Tensor) -> torch.Tensor:
    """Return E [R,1] where there is a floor, and 0 elsewhere: nothing else needs it."""
    entropy = torch.zeros_like(log_outside)
    if kept.tail is Tail.NEMO_FLOOR:
        for part, rows in kept.pieces(logits):
            entropy[part] = outside_entropy(
                rows, kept.ids[part], log_outside[part], kept.temperature
            )
    return entropy


def _outside_shares(
    logits: torch.Tensor,
    kept: _Kept,
    log_outside: torch.Tensor,
    pulls: torch.Tensor,
    of_logs: torch.Tensor,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the gradient outside the ids a few rows at a time, 0 at the ids.

    ``pulls`` [R,1] times exp(z_j - L_out); ``of_logs`` [R,1] are a floor's pulls of its log.
    """
    # Where nothing is outside, subtracting +inf makes every share 0.
    outside = log_outside.masked_fill(log_outside == -torch.inf, torch.inf) * kept.temperature
    for part, rows in kept.pieces(logits):
        share = rows.to(pulls.dtype) - outside[part].unsqueeze(1)
        without(share, kept.ids[part])
        pull = pulls[part]
        if kept.tail is Tail.NEMO_FLOOR:
            logs = (share / kept.temperature).clamp_min_(ABSENT_LOGPROB)
            pull = logs.mul_(of_logs[part]).add_(pull)
        powers(share, over=kept.temperature)
        yield part, share.mul_(pull).to(logits.dtype)


def _add_at(whole: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Add values to places that may repeat, in place."""
    if whole.is_cpu:  # where scatter_add_ takes 16-bit numbers by way of an fp32 copy of them all
        whole.index_put_((places,), values, accumulate=True)
    else:  # where index_put_ would sort
        whole.scatter_add_(0, places, values)
