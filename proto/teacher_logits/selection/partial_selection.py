"""Partial selections: what a slice of the vocabulary says, and how slices become the whole.

    slice [P,Vr]  ->  its K best, and the log of the sum over its rest          a leaf
    leaves        ->  the K best of all candidates, rests and the rejected added    merged
    all slices    ->  ``finish``: what ``select_top_k`` says of the whole row

A slice is a tile of a head that is run tile by tile, or the shard of a tensor-parallel rank; the
merge is one function for both, and associative (docs/math.md, "Merging"): slices of any widths, in
any order and bracketing, give the ids of the whole row, ties by id, and its normaliser up to
rounding. ``rank_merging`` does it across processes. Nothing of the vocabulary's size is kept.

Refuses slices that overlap, that were cut by different settings, or that leave a hole: a rest
that was added twice, or not at all, shows in no single number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import RowStatus
from teacher_logits.selection import Selection, pieces
from teacher_logits.selection.checks import (
    check_logits,
    check_next_ids,
    check_settings,
    check_whole,
)
from teacher_logits.selection.complement import complement_sums
from teacher_logits.selection.ranking import first_in_order, rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from teacher_logits.errors import Fact

Spans = tuple[tuple[int, int], ...]

_AT_ONCE = 8
"""Slices merged in one go: one sort for all, and of a loop over tiles no more are kept."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialSelection:
    """What the ids of ``spans`` say of P positions; K entries and T temperatures.

    ``ids`` int64 [P,K], ids of the whole vocabulary, and their raw ``logits`` fp32 [P,K], in
    order; -1 and -inf where the spans have fewer finite ones. ``log_rest`` fp64 [P,T] is the log
    of the sum of exp(logit / temperature) over the spans' other ids. ``status`` uint8 [P]: NaN,
    +inf or OK; whether nothing is finite shows in the whole alone. ``next_ids`` int64 [P] are the
    tokens that come next (-1 for none) and ``next_logits`` fp32 [P] their logits, -inf where
    they are in other slices; both None where they were not given. ``spans`` are half open.
    """

    ids: torch.Tensor
    logits: torch.Tensor
    log_rest: torch.Tensor
    status: torch.Tensor
    next_ids: torch.Tensor | None
    next_logits: torch.Tensor | None
    temperatures: tuple[float, ...]
    vocab_size: int
    spans: Spans

    def finish(self) -> Selection:
        """Return the selection of the whole vocabulary.

        Raises:
            PayloadInvalidError: the slices leave a hole.
        """
        if self.spans != ((0, self.vocab_size),):
            seen = ", ".join(f"{start} to {stop - 1}" for start, stop in self.spans) or "none"
            raise _invalid(
                f"the slices hold the ids {seen} of a vocabulary of {self.vocab_size}: merge all "
                "of them before the selection is finished",
                spans=seen,
                vocab_size=self.vocab_size,
            )
        scale = torch.tensor(self.temperatures, dtype=torch.float64, device=self.logits.device)
        head = (self.logits.double().unsqueeze(2) / scale).logsumexp(1)
        whole = torch.logaddexp(head, self.log_rest)
        status = self.status.masked_fill(
            (self.status == RowStatus.OK) & (self.logits[:, 0] == -torch.inf),
            RowStatus.EMPTY_SUPPORT,
        )
        bad = (status != RowStatus.OK).unsqueeze(1)
        actual = None
        if self.next_ids is not None and self.next_logits is not None:
            actual = (self.next_logits - whole[:, 0]).float()
            actual = actual.masked_fill(bad.squeeze(1) | (self.next_ids < 0), 0.0)
        return Selection(
            topk_ids=self.ids.masked_fill(bad, -1).int(),
            topk_logprobs=(self.logits - whole[:, :1]).float().masked_fill(bad, 0.0),
            log_tail=(self.log_rest - whole).float().masked_fill(bad, 0.0),
            logsumexp=whole.float().masked_fill(bad, 0.0),
            actual_logprob=actual,
            status=status,
        )


def select_partial(
    logits: torch.Tensor,
    *,
    k: int,
    first_id: int,
    vocab_size: int,
    temperatures: Sequence[float] = (1.0,),
    next_ids: torch.Tensor | None = None,
) -> PartialSelection:
    """Select from a slice of the vocabulary, ``logits`` [P,Vr] or [N,S,Vr] from ``first_id`` on.

    ``vocab_size`` counts the whole vocabulary; columns from there on are padding, and a slice of
    nothing else is fine. ``next_ids`` are the whole vocabulary's. Everything else as
    ``select_top_k``, and alike for all slices. ``merge_partials`` or ``merge_over_ranks`` makes one
    of all of them, whose ``finish`` returns the ``Selection``.

    Raises:
        PayloadInvalidError: as ``select_top_k``.
    """
    columns = check_logits(logits, None)
    check_settings(k, temperatures)
    check_whole(vocab_size, "vocab_size")
    check_whole(first_id, "first_id")
    if vocab_size < 1 or first_id < 0:
        raise _invalid(
            f"first_id is {first_id} and vocab_size {vocab_size}: a slice starts at 0 or later, in "
            "a vocabulary of at least 1",
            first_id=first_id,
            vocab_size=vocab_size,
        )
    stop = max(first_id, min(first_id + columns, vocab_size))
    part = _empty(logits, k, temperatures, vocab_size)
    if next_ids is not None:
        following = check_next_ids(next_ids, logits, vocab_size)
        part = replace(part, next_ids=following, next_logits=part.logits[:, 0].clone())
    if stop == first_id:
        return part
    start = 0
    with torch.no_grad():
        for rows in pieces(logits, stop - first_id):
            _fill(part, slice(start, start + len(rows)), rows, first_id)
            start += len(rows)
    return replace(part, spans=((first_id, stop),))


def merge_partials(parts: Iterable[PartialSelection]) -> PartialSelection:
    """Merge the selections of some slices into that of all their ids, a few at a time.

    Raises:
        PayloadInvalidError: there are none, two of them hold an id, or they were cut by
            different settings or beside different next ids.
    """
    waiting: list[PartialSelection] = []
    for part in parts:
        if not isinstance(part, PartialSelection):
            raise _invalid(
                f"a slice is a {type(part).__name__}: merge what select_partial returned",
                given=type(part).__name__,
            )
        waiting.append(part)
        if len(waiting) == _AT_ONCE:
            waiting = [_merge(waiting)]
    if not waiting:
        raise _invalid("no slices are given: merge at least one")
    return waiting[0] if len(waiting) == 1 else _merge(waiting)


def _merge(parts: Sequence[PartialSelection]) -> PartialSelection:
    first, k = parts[0], parts[0].ids.shape[1]
    spans = first.spans
    for other in parts[1:]:
        spans = _joined(first, spans, other)
    ids, logits = torch.cat([p.ids for p in parts], 1), torch.cat([p.logits for p in parts], 1)
    best = first_in_order(ids, logits, k)
    rests = [part.log_rest for part in parts]
    scale = torch.tensor(first.temperatures, dtype=torch.float64, device=logits.device)
    rejected = logits.scatter(1, best, -torch.inf).double().unsqueeze(2) / scale
    following = [part.next_logits for part in parts if part.next_logits is not None]
    return replace(
        first,
        ids=ids.gather(1, best),
        logits=logits.gather(1, best),
        log_rest=torch.stack([*rests, rejected.logsumexp(1)]).logsumexp(0),
        status=reduce(_worse, [part.status for part in parts]),
        next_logits=torch.stack(following).amax(0) if following else None,
        spans=spans,
    )


def _joined(a: PartialSelection, held: Spans, b: PartialSelection) -> Spans:
    """Return the ids that are ``held`` and those of ``b``, which is to be cut as ``a`` is."""
    for name, of_a, of_b in (
        ("positions and entries", tuple(a.ids.shape), tuple(b.ids.shape)),
        ("temperatures", a.temperatures, b.temperatures),
        ("vocab_size", a.vocab_size, b.vocab_size),
        ("next_ids given", a.next_ids is not None, b.next_ids is not None),
    ):
        if of_a != of_b:
            raise _invalid(
                f"slices with {name} {of_a} and {of_b} cannot be merged: cut them alike",
                what=name,
                first=str(of_a),
                second=str(of_b),
            )
    _check_alike(a.next_ids, b.next_ids)
    spans = sorted((*held, *b.spans))
    for (_, stop), (start, end) in pairwise(spans):
        if start < stop:
            raise _invalid(
                f"ids {start} to {min(stop, end) - 1} are in two of the slices: each id belongs to "
                "one, or its mass is counted twice",
                first_id=start,
                stop_id=min(stop, end),
            )
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _check_alike(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    """Refuse next ids of two slices that differ: each would be looked for in the one slice."""
    if a is None or b is None:
        return
    differ = (a != b).nonzero()
    if len(differ):
        at = int(differ[0])
        first, second = int(a[at]), int(b[at])
        raise _invalid(
            f"next_ids[{at}] is {first} beside one slice and {second} beside another "
            f"({len(differ)} such positions): give the whole vocabulary's, alike for all",
            position=at,
            first=first,
            second=second,
        )


def _fill(part: PartialSelection, at: slice, rows: torch.Tensor, first_id: int) -> None:
    """Select from some rows [R,Vr] of the slice that starts at ``first_id``."""
    width, k = rows.shape[1], part.ids.shape[1]
    kept = min(k, width)
    ranking = rank(rows, min(kept + 1, width))
    ids, values = ranking.ids[:, :kept], ranking.values[:, :kept]
    status = ranking.status.masked_fill(ranking.status == RowStatus.EMPTY_SUPPORT, RowStatus.OK)
    bad = (status != RowStatus.OK).unsqueeze(1)
    part.status[at] = status
    if kept < width:
        top = ranking.values[:, kept:]
        top = torch.where(top.isfinite(), top, 0.0)
        _, sums = complement_sums(rows, ids, temperatures=part.temperatures, top=top)
        scale = torch.tensor(part.temperatures, dtype=torch.float64, device=rows.device)
        rest = top.double() / scale + sums.double().log()
        part.log_rest[at] = rest.masked_fill(bad, -torch.inf)
    values = values.masked_fill(bad, -torch.inf)
    part.logits[at, :kept] = values
    part.ids[at, :kept] = (ids + first_id).masked_fill(values == -torch.inf, -1)
    if part.next_ids is not None and part.next_logits is not None:
        column = part.next_ids[at] - first_id
        is_here = (column >= 0) & (column < width)
        own = rows.gather(1, column.clamp(0, width - 1).unsqueeze(1)).squeeze(1).float()
        part.next_logits[at] = torch.where(is_here & ~bad.squeeze(1), own, -torch.inf)


def _empty(
    logits: torch.Tensor, k: int, temperatures: Sequence[float], vocab_size: int
) -> PartialSelection:
    """Return what no ids at all say of the positions of ``logits``."""
    positions, device = math.prod(logits.shape[:-1]), logits.device
    rest = (positions, len(temperatures))
    return PartialSelection(
        ids=torch.full((positions, k), -1, device=device),
        logits=torch.full((positions, k), -torch.inf, dtype=torch.float32, device=device),
        log_rest=torch.full(rest, -torch.inf, dtype=torch.float64, device=device),
        status=torch.zeros(positions, dtype=torch.uint8, device=device),
        next_ids=None,
        next_logits=None,
        temperatures=tuple(float(each) for each in temperatures),
        vocab_size=vocab_size,
        spans=(),
    )


def _worse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the worse status of each position: NaN wins, OK is rest."""
    ranked = [torch.where(each == RowStatus.OK, 255, each.long()) for each in (a, b)]
    worst = torch.minimum(*ranked)
    return worst.masked_fill(worst == 255, RowStatus.OK).to(torch.uint8)


def _invalid(message: str, **facts: Fact) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
