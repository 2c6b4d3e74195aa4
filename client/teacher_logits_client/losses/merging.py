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

if TYPE_CHECKING:
    from teacher_logits_client.losses.sharding import VocabShard


def merged_coarse(
    coarse: torch.Tensor,
    ids: torch.Tensor,
    shard: VocabShard,
    *,
    entropy: torch.Tensor | None,
    room: int,
    agreed: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the coarse student [R,K+1] over all columns, and its entropy outside [R,1].

    ``coarse`` has this rank's logits over temperature, at the ``ids`` [R,K] that it has a column
    for, and its own log-sum-exp of everything else last; ``entropy`` is that of the ids in it,
    None where the tail needs none. ``room`` and ``agreed`` as for ``VocabShard.maxima``.

    Raises:
        RequestInvalidError: see there.
    """
    own = coarse[:, -1]
    top = finite(shard.maxima(own, room=room, agreed=agreed))
    here = shard.own_ids(ids) >= 0
    share = (own - top).exp().unsqueeze(1)
    parts = [torch.where(here, coarse[:, :-1], 0.0), share]
    if entropy is not None:
        logs = finite(own - top).unsqueeze(1)
        parts.append(torch.where(share == 0, 0.0, share * (entropy - logs)))
    sums = shard.sums(torch.cat(parts, 1))
    width = ids.shape[1]
    scaled = sums[:, width : width + 1]
    outside = top.unsqueeze(1) + scaled.log()
    merged = torch.cat([sums[:, :width].masked_fill(ids < 0, -torch.inf), outside], 1)
    if entropy is not None:
        entropy = torch.where(scaled == 0, 0.0, sums[:, width + 1 :] / scaled + scaled.log())
    return merged, entropy


def finite(values: torch.Tensor) -> torch.Tensor:
    """Return the values with 0 for -inf: what nothing is measured from, as good as any."""
    return values.masked_fill(values == -torch.inf, 0.0)
