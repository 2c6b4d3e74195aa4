"""Ranking: the largest entries of each row of logits, exactly, in one agreed order.

The order is value descending, then id ascending, and -0.0 equals +0.0. ``torch.topk`` leaves
the order of equal values open, and 16-bit logits tie in most rows (math note 1.8), so two
replicas would name different ids.

How: a row is folded into strided columns, and only the members of its best columns are looked
at. A few entries more than wanted are taken there, and put in order by one integer key that
holds value and id. What was not taken is at most the row's floor: the larger of the smallest
maximum of a taken column and the smallest entry taken. A row whose last wanted value equals
its floor may have missed ids that tie with it; those rows, and no others, are searched.

Promises: the same answer for a row whatever other rows come with it, and the logits are only
read. Refuses nothing: ``selection`` has checked the arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from teacher_logits.layout import RowStatus

# Entries taken beyond the wanted number, so that few rows tie with their floor.
_SLACK = 64
# Members of a column; measured at V = 151,936.
_DEPTH, _DEPTH_OF_LARGE_K = 16, 8
_LARGE_K = 512
# Ids of a row searched for ties at first, and the factor by which the search widens.
_TIE_SPAN, _TIE_GROWTH = 4096, 8


class Ranking(NamedTuple):
    """The best entries of some rows: ``ids`` int64 [R,n], ``values`` fp32 [R,n], status [R].

    Both tensors are in order. Where ``status`` is not OK the entries mean nothing.
    """

    ids: torch.Tensor
    values: torch.Tensor
    status: torch.Tensor


def rank(logits: torch.Tensor, count: int) -> Ranking:
    """Return the ``count`` largest entries of each row of ``logits`` [R,V], 1 <= count <= V.

    -inf entries rank last. ``status`` is uint8 by ``RowStatus``: NaN wins over +inf, and a row
    whose entries are all -inf has empty support.
    """
    taken = count + count // 8 + _SLACK
    ids, values, floors = _take(logits, taken)
    # Integers in the order of the floats: of a negative one, all bits but the sign are turned.
    bits = values.view(torch.int32).long()
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32
    order = (keys - ids).argsort(dim=1, descending=True)[:, :count]
    ranking = Ranking(ids.gather(1, order), values.gather(1, order), _status(values.amax(1)))
    return _with_ties(logits, ranking, floors)


def _take(
    logits: torch.Tensor, taken: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ids and values of about the ``taken`` largest entries, and the floors [R]."""
    rows, width = logits.shape
    depth = _DEPTH if taken <= _LARGE_K else _DEPTH_OF_LARGE_K
    columns = width // depth
    if 2 * taken * depth > width:
        values, ids = logits.topk(min(taken, width), dim=1, sorted=False)
        floors = values.amin(1).float() if taken < width else values.new_full((rows,), -torch.inf)
        return ids, values.float() + 0.0, floors.float()
    folded = logits[:, : depth * columns].unflatten(1, (depth, columns))
    maxima, chosen = folded.amax(1).topk(taken, dim=1, sorted=False)
    members = chosen.unsqueeze(1) + torch.arange(0, depth * columns, columns, device=logits.device).unsqueeze(1)
    members = members.view(rows, -1)
    rest = torch.arange(depth * columns, width, device=logits.device).expand(rows, -1)
    members = torch.cat([members, rest],1)
    values, at = logits.gather(1, members).topk(taken, dim=1, sorted=False)
    floors = torch.maximum(values.amin(1), maxima.amin(1)).float()
    return members.gather(1, at), values.float() + 0.0, floors


def _status(largest: torch.Tensor) -> torch.Tensor:
    status = torch.zeros(largest.shape, dtype=torch.uint8, device=largest.device)
    status.masked_fill_(largest == torch.inf, RowStatus.POSITIVE_INFINITY)
    status.masked_fill_(largest == -torch.inf, RowStatus.EMPTY_SUPPORT)
    return status.masked_fill_(largest.isnan(), RowStatus.NAN)


def _with_ties(logits: torch.Tensor, ranking: Ranking, floors: torch.Tensor) -> Ranking:
    """Give the rows whose last value equals their floor the smallest of the tied ids."""
    last = ranking.values[:, -1]
    open_rows = (last == floors) & (last > -torch.inf) & (ranking.status == RowStatus.OK)
    rows = open_rows.nonzero().squeeze(1)
    if len(rows):
        values = ranking.values[rows]
        above = (values > values[:, -1:]).sum(1, keepdim=True)
        tied = _first_equal(logits[rows], values[:, -1:], values.shape[1] - above)
        place = torch.arange(values.shape[1], device=logits.device) - above
        ids = torch.where(place < 0, ranking.ids[rows], tied.gather(1, place.clamp(0,tied.shape[1]-1)))
        ranking.ids[rows] = ids
    return ranking


def _first_equal(logits: torch.Tensor, value: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return, a row, the first ids that hold ``value``: at least ``counts`` of them, ascending."""
    width = logits.shape[1]
    most = int(counts.max())
    span = min(width, max(_TIE_SPAN, 2 * most))
    while True:
        equal = logits[:, :span] == value.to(logits.dtype)
        if span == width or bool((equal.sum(1, keepdim=True) >= counts).all()):
            break
        span = min(width, span * _TIE_GROWTH)
    from_end = torch.arange(span, 0, -1, dtype=torch.int32, device=logits.device)
    return span - torch.where(equal, from_end, 0).topk(most, dim=1).values.long()
