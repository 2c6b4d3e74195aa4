"""A loss straight from hidden states: head and loss in one, in two passes over tiles.

Forward goes over all columns once. It keeps the logits of the K ids and a running log-sum-exp
over the others, L_out, and that is all that a coarse loss needs (``coarse``). Backward makes
each tile of logits z again, and of it the gradient

    g_j = c_j                       for j among the ids
    g_j = c_0 * exp(z_j - L_out)    for every other j       (times 1 - tanh² under a soft cap)

and adds g W to the hidden states' gradient and gᵀ h to the weight's (docs/math.md, "From hidden
states"). So the head is multiplied through twice, where plain autograd does it once and keeps
[P,V]. Where both sides are renormalised on the ids, only these are looked at (``pairs``).

Promises: no array of [P,V]; K+1 numbers a position between forward and backward; of tensors
that want no gradient, none is computed or held. First derivatives only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits_client.losses.derivatives import first_only, save, saved
from teacher_logits_client.losses.head_gradients import HeadGradients
from teacher_logits_client.losses.head_logits import HeadLogits
from teacher_logits_client.losses.merging import over_shards
from teacher_logits_client.losses.outside import Outside
from teacher_logits_client.losses.pairs import pairs_of
from teacher_logits_client.losses.powers import powers
from teacher_logits_client.losses.sharding import refused_together
from teacher_logits_client.losses.tails import Tail
from teacher_logits_client.losses.tiled_head import TiledHead
from teacher_logits_client.losses.weighing import Inputs, weigh
from teacher_logits_client.targets import ABSENT_LOGPROB

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from teacher_logits_client.losses.tiled_head import Columns
    from teacher_logits_client.losses.tiles import Tile


Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]


def hidden_loss(head: HeadLogits, inputs: Inputs) -> torch.Tensor:
    """Return temperature² times the weighted sum of a divergence over positions."""
    loss = _HiddenLoss.apply(  # type: ignore[no-untyped-call]
        head.hidden, head.weight, head.bias, (head.scale, head.soft_cap, inputs)
    )
    return cast("torch.Tensor", loss)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pulls:
    """What backward has of the positions that count.

    ``log_outside`` [R,1] is L_out over temperature, ``outside`` [R,1] is c_0, ``at_ids`` flat
    [R*K] are the c_i, and ``of_logs`` [R,1] is what pulls the logs outside where a floor is.
    """

    log_outside: torch.Tensor
    outside: torch.Tensor
    at_ids: torch.Tensor
    of_logs: torch.Tensor | None


class _HiddenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: tuple[float, float | None, Inputs],
    ) -> torch.Tensor:
        scale, soft_cap, inputs = settings
        head = HeadLogits(hidden=hidden, weight=weight, bias=bias, scale=scale, soft_cap=soft_cap)
        at, rows = inputs.kept()
        ids = inputs.own_ids(at)
        with refused_together(inputs.shard, hidden):
            tiled = TiledHead(head, rows, ids, inputs.temperature)
            coarse, entropy = _coarse_student(tiled, ids, inputs.tail)
        coarse, entropy = over_shards(coarse, entropy, inputs, at, count=hidden.shape[:-1].numel())
        weighed = weigh(coarse, entropy, inputs, at)
        log_outside = coarse[:, -1:].clone()
        made = (rows, ids, log_outside, weighed.pulls, weighed.of_logs)
        save(ctx, hidden, weight, bias, *made)
        ctx.settings = (scale, soft_cap, inputs.temperature, inputs.tail)  # type: ignore[attr-defined]
        return weighed.loss

    @staticmethod
    @first_only
    def backward(ctx: FunctionCtx, upstream: torch.Tensor) -> Gradients:
        hidden, weight, bias, rows, ids, log_outside, pulls, of_logs = saved(ctx)
        scale, soft_cap, temperature, tail = ctx.settings  # type: ignore[attr-defined]
        head = HeadLogits(hidden=hidden, weight=weight, bias=bias, scale=scale, soft_cap=soft_cap)
        pulls, of_logs = (each * (upstream * scale) for each in (pulls, of_logs))
        kept = _Pulls(
            # Where nothing is outside, subtracting +inf makes every share 0.
            log_outside=log_outside.masked_fill(log_outside == -torch.inf, torch.inf),
            outside=pulls[:, -1:],
            at_ids=pulls[:, :-1].reshape(-1),
            of_logs=of_logs if tail is Tail.NEMO_FLOOR else None,
        )
        tiled = TiledHead(head, rows, ids, temperature)
        found = HeadGradients(head, tiled, ctx.needs_input_grad)  # type: ignore[attr-defined]
        for columns in tiled.columns():
            found.begin(columns)
            for tile in columns.tiles:
                if tail is Tail.RENORMALISED:
                    _add_pairs(found, tiled, tile, columns, kept.at_ids)
                else:
                    found.add(tile, columns, _tile_gradient(tiled, tile, columns, kept))
            found.finish(columns)
        return found.of_hidden(hidden, rows), found.weight, found.bias, None


def _coarse_student(
    tiled: TiledHead, ids: torch.Tensor, tail: Tail
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [R,K+1], the logits of the ids over temperature and L_out last, and E [R,1].

    L_out is -inf where both sides are renormalised, as if nothing were outside; E is 0 but for
    a floor, which alone needs it.
    """
    chosen = tiled.hidden.new_full((ids.numel(),), -torch.inf, dtype=tiled.dtype)
    outside = Outside(
        len(ids),
        dtype=tiled.dtype,
        device=ids.device,
        with_entropy=tail is Tail.NEMO_FLOOR,
    )
    for columns in tiled.columns():
        for tile in columns.tiles:
            if tail is Tail.RENORMALISED:
                for pairs in pairs_of(tile, tiled.hidden.shape[1]):
                    chosen[pairs.entries] = tiled.logits_at(pairs, columns)
                continue
            logits = tiled.logits(tile, columns)
            chosen[tile.entries] = logits.view(-1)[tile.places]
            logits.view(-1)[tile.places] = -torch.inf
            outside.add(tile.positions, logits)
    return torch.cat([chosen.view(ids.shape), outside.log_sum()], 1), outside.entropy()


def _tile_gradient(tiled: TiledHead, tile: Tile, columns: Columns, kept: _Pulls) -> torch.Tensor:
    """Return the gradient of a tile of logits before the cap [c,n], in the logits' buffer."""
    gradient = tiled.logits(tile, columns)
    slopes = tiled.slopes(tile, gradient)
    flat, pull = gradient.view(-1), kept.outside[tile.positions]
    gradient.sub_(kept.log_outside[tile.positions])
    flat[tile.places] = -torch.inf
    if kept.of_logs is not None:
        logs = gradient.clamp_min(ABSENT_LOGPROB)
        pull = logs.mul_(kept.of_logs[tile.positions]).add_(pull)
    powers(gradient).mul_(pull)
    # Added: an id that is named twice pulls twice.
    flat.index_add_(0, tile.places, kept.at_ids[tile.entries])
    return gradient if slopes is None else gradient.mul_(slopes)


def _add_pairs(
    found: HeadGradients, tiled: TiledHead, tile: Tile, columns: Columns, at_ids: torch.Tensor
) -> None:
    """Add a tile's gradient to what is found, where only its ids have one."""
    for pairs in pairs_of(tile, tiled.hidden.shape[1]):
        gradient = at_ids[pairs.entries]
        slopes = tiled.slopes_at(pairs, columns)
        found.add_pairs(pairs, columns, gradient if slopes is None else gradient.mul_(slopes))
