"""What ranks found over their own columns, made into what one finds over all of them.

A log-sum-exp over the vocabulary is L = M + log Σ_r exp(L_r - M), with L_r that of rank r and M
the largest of them: so what travels is one maximum and a few sums a position, and every number
in a sum is at most as large as what it is part of. An entropy E_r of rank r's softmax s among
ids merges with them, with w_r = exp(L_r - L) that rank's share:

    E = Σ_r w_r (E_r - log w_r) = X / S + log S,  S_r = exp(L_r - M),  X_r = S_r (E_r - log S_r)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits_client.losses.sharding import checksums
from teacher_logits_client.losses.tails import Tail

if TYPE_CHECKING:
    from teacher_logits_client.losses.weighing import Inputs


def over_shards(
    coarse: torch.Tensor, entropy: torch.Tensor, inputs: Inputs, at: torch.Tensor, *, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the coarse student [R,K+1] over all columns, and its entropy outside [R,1].

    ``coarse`` has this rank's logits over temperature, at the ids that it has a column for, and
    its own log-sum-exp of everything else last; ``entropy`` is that of the ids in it, where a
    floor needs it. Without a shard, they are all there is. ``count`` is how many positions the
    logits have.

    Raises:
        RequestInvalidError: see there.
    """
    if inputs.shard is None:
        return coarse, entropy
    shard, ids, own = inputs.shard, inputs.ids[at], coarse[:, -1]
    said = _said(inputs, at, coarse.dtype, count=count)
    top = finite(shard.maxima(own, agreed=said))
    below = own - top
    share = below.exp().unsqueeze(1)
    parts = [torch.where(shard.own_ids(ids) >= 0, coarse[:, :-1], 0.0), share]
    if inputs.tail is Tail.NEMO_FLOOR:
        logs = finite(below).unsqueeze(1)
        parts.append(torch.where(share == 0, 0.0, share * (entropy - logs)))
    sums = shard.sums(torch.cat(parts, 1))
    chosen = sums[:, : ids.shape[1]].masked_fill(ids < 0, -torch.inf)
    whole = sums[:, ids.shape[1] : ids.shape[1] + 1]
    if inputs.tail is Tail.NEMO_FLOOR:
        entropy = torch.where(whole == 0, 0.0, sums[:, -1:] / whole + whole.log())
    return torch.cat([chosen, top.unsqueeze(1) + whole.log()], 1), entropy


def _said(inputs: Inputs, at: torch.Tensor, dtype: torch.dtype, *, count: int) -> str:
    """What all ranks of a shard have to say alike: whatever goes into the loss but the logits."""
    given = [
        at if inputs.places is None else inputs.places[at],
        inputs.weights[at].double(),
        inputs.ids[at],
        inputs.log_teacher[at].to(dtype),
    ]
    if inputs.entropy is not None:
        given.append(inputs.entropy[at].to(dtype))
    return (
        f"{inputs.named} at {len(at)} of {count} positions with {inputs.ids.shape[1]} ids, "
        f"temperature {inputs.temperature}, {inputs.tail}, in {dtype}; places, weights and "
        f"targets of checksums {checksums(*given)}"
    )


def finite(values: torch.Tensor) -> torch.Tensor:
    """Return the values with 0 for -inf: what nothing is measured from, as good as any."""
    return values.masked_fill(values == -torch.inf, 0.0)
