"""Ranking: the largest entries of each row of logits, exactly, in one agreed order.

The order is value descending, then id ascending, and -0.0 equals +0.0. ``torch.topk`` leaves
the order of equal values open, and 16-bit logits tie often, so two replicas would name different
ids (docs/math.md, "Padding, ties and what is not finite").

    row -> fold into strided columns -> the columns of largest maxima (found in the same way)
        -> the largest of their members, some more than wanted -> in order, by value and id

What was not taken is at most the row's *floor*, the smallest entry taken. A row whose last
wanted value equals its floor may have missed ids that tie with it; such rows, and no others,
are searched for them.

Promises: the same answer for a row whatever other rows come with it, and the logits are only
read. Refuses nothing: ``selection`` has checked the arguments.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from teacher_logits.layout import RowStatus

# Entries taken beyond the wanted number, so that few rows tie with their floor.
_SLACK = 64
# Members of a column; folding pays from the smaller on, and gains nothing above the larger.
_LEAST_DEPTH, _MOST_DEPTH = 4, 16
# Ids of a row searched for ties at first, and the factor by which the search widens.
_TIE_SPAN, _TIE_GROWTH = 4096, 8


class Ranking(NamedTuple):
    """The best entries of some rows, in order: ``ids`` int64 and ``values`` fp32 [R,n].

    ``status`` is uint8 [R], by ``RowStatus``; where it is not OK the entries mean nothing.
    """

    ids: torch.Tensor
    values: torch.Tensor
    status: torch.Tensor


def rank(logits: torch.Tensor, count: int) -> Ranking:
    """Return the ``count`` largest entries of each row of ``logits`` [R,V], 1 <= count <= V.

    -inf entries rank last. Of NaN, +inf and no finite entry at all, NaN wins.
    """
    ids, values, floors = _take(logits, min(count + count // 8 + _SLACK, logits.shape[1]))
    values = values.float() + 0.0  # makes -0.0 into +0.0
    order = in_order(ids, values)[:, :count]
    ranking = Ranking(ids.gather(1, order), values.gather(1, order), status_of(values.amax(1)))
    return _with_ties(logits, ranking, floors.float())


def in_order(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the places [R,n] of entries in the agreed order; ``values`` fp32, none is -0.0."""
    return _keys(ids, values).argsort(dim=1, descending=True)


def first_in_order(ids: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places [R,count] of the first entries in that order, at a third of the cost."""
    return _keys(ids, values).topk(count, dim=1).indices


def _keys(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return numbers by which entries are in the agreed order, no two of which tie."""
    # As integers, floats are in order once the bits of negative ones, save the sign, are turned.
    bits = values.view(torch.int32).long()
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) - ids


def _take(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids and values [R,count] of the largest entries, in no order, and the floors [R]."""
    width = logits.shape[1]
    depth = min(_MOST_DEPTH, 1 << (math.isqrt(width // count).bit_length() - 1))
    if depth < _LEAST_DEPTH:
        values, ids = logits.topk(count, dim=1, sorted=False)
        floors = values.amin(1)
        return ids, values, floors if count < width else torch.full_like(floors, -torch.inf)
    columns = width // depth
    folded = logits[:, : depth * columns].unflatten(1, (depth, columns))
    chosen, _, _ = _take(folded.amax(1), count)
    members = _members(chosen, depth=depth, columns=columns, width=width)
    values, places = logits.gather(1, members).topk(count, dim=1, sorted=False)
    # At least as large as each chosen column's maximum, and so as all that was not chosen.
    return members.gather(1, places), values, values.amin(1)


def _members(chosen: torch.Tensor, *, depth: int, columns: int, width: int) -> torch.Tensor:
    """Return the ids in the chosen columns [R,n], and those behind the last column."""
    steps = torch.arange(0, depth * columns, columns, device=chosen.device)
    inside = (steps.unsqueeze(1) + chosen.unsqueeze(1)).flatten(1)
    rest = torch.arange(depth * columns, width, device=chosen.device)
    return torch.cat([inside, rest.expand(len(chosen), -1)], 1)


def status_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the status uint8 [R] of rows by their largest logit, which is NaN where one is."""
    status = torch.zeros(largest.shape, dtype=torch.uint8, device=largest.device)
    status.masked_fill_(largest == torch.inf, RowStatus.POSITIVE_INFINITY)
    status.masked_fill_(largest == -torch.inf, RowStatus.EMPTY_SUPPORT)
    return status.masked_fill_(largest.isnan(), RowStatus.NAN)


def _with_ties(logits: torch.Tensor, ranking: Ranking, floors: torch.Tensor) -> Ranking:
    """Give rows whose last value equals their floor the smallest of the ids that tie there.

    Of the values above it none is missing: all that was not taken is at most the floor.
    """
    last = ranking.values[:, -1]
    unsure = (last == floors) & (last > -torch.inf) & (ranking.status == RowStatus.OK)
    rows = unsure.nonzero().squeeze(1)
    if len(rows):
        values = ranking.values[rows]
        above = (values > values[:, -1:]).sum(1, keepdim=True)
        tied = _first_equal(logits[rows], values[:, -1:], values.shape[1] - above)
        places = torch.arange(values.shape[1], device=logits.device) - above
        found = tied.gather(1, places.clamp(0, tied.shape[1] - 1))
        ranking.ids[rows] = torch.where(places < 0, ranking.ids[rows], found)
    return ranking


def _first_equal(logits: torch.Tensor, value: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the first ids of each row that hold ``value``, ascending, ``counts`` of them.

    The answer is as wide as the largest count; what stands behind a row's own count is waste.
    """
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
