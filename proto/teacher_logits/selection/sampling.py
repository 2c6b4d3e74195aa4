"""Sampling: few entries of a distribution whose weights are, on average, the distribution itself.

    threshold      fixed size: the largest as they are, the same weight for each picked of the rest
    replacement    draws from p**power, each weighted by how often it came and by p over that

The threshold sample has m distinct entries whose weights sum to one, each within the threshold of
its probability, and a total variance of sum p (threshold - p) over the rest: less than any other
of that size, and 0 where the support is that small. Its picks are systematic, from one uniform a
position (docs/math.md, "Sampling"). Both estimates are unbiased for what is linear in p, and for
nothing else: a logarithm or a square of an estimate is biased.

Promises: fp64 sums over the vocabulary; the same entries for the same uniforms, whatever rows come
with a row. A position with a NaN, a +inf or nothing finite has ids -1 and zeros, and its status.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import RowStatus
from teacher_logits.selection.checks import check_tensor, check_whole
from teacher_logits.selection.complement import row_sums
from teacher_logits.selection.ranking import status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Elements in one go: some fp64 buffers of that size are needed.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 19, 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A sample of P positions, M entries each.

    ``ids`` int32 [P,M] and ``weights`` fp64 [P,M], -1 and 0 where fewer exist; the first ``heads``
    int64 [P] of them have their own probability, the others the ``thresholds`` fp64 [P].
    ``entropy`` and ``logsumexp`` fp64 [P] are the whole distribution's, exact. ``status`` uint8.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    heads: torch.Tensor
    thresholds: torch.Tensor
    entropy: torch.Tensor
    logsumexp: torch.Tensor
    status: torch.Tensor


class _Head(NamedTuple):
    ids: torch.Tensor
    probabilities: torch.Tensor
    counts: torch.Tensor
    left: torch.Tensor


def sample_threshold(logits: torch.Tensor, *, m: int, uniforms: torch.Tensor) -> Sample:
    """Sample ``m`` entries of each position of ``logits`` [P,V], of the vocabulary alone.

    ``uniforms`` fp64 [P] in [0, 1), one a position. The entries kept as they are come first, by
    value and then id; the others follow by id.

    Raises:
        PayloadInvalidError: ``m`` is below 1, or there is not one uniform a position, in [0, 1).
    """
    check_whole(m, "m")
    _check_drawn(logits, uniforms, axes=1)
    if m < 1:
        raise PayloadInvalidError(
            f"a sample of {m} entries: give at least 1 a position", facts={"m": m}
        )
    parts = [_threshold(rows, m, uniforms[at]) for rows, at in _pieces(logits)]
    if not parts:  # of the shapes that there would be
        blank = _threshold(logits.new_zeros(1, logits.shape[1]), m, uniforms.new_zeros(1))
        parts = [tuple(tensor[:0] for tensor in blank)]
    names = [field.name for field in fields(Sample)]
    joined = map(torch.cat, zip(*parts, strict=True))
    return Sample(**dict(zip(names, joined, strict=True)))


def sample_with_replacement(
    logits: torch.Tensor, *, uniforms: torch.Tensor, power: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from p**power, normalised, once for each of ``uniforms`` [P,N]; ``logits`` [P,V].

    Returns ids int64 [P,N], each drawn id once, ascending, then -1; and weights fp64 [P,N], the
    share of the draws times p over what was drawn from: unbiased, and at power 1 of sum one.

    Raises:
        PayloadInvalidError: there are no uniforms a position in [0, 1), ``power`` is no finite
            number, or a position's logits hold a NaN, a +inf or nothing finite.
    """
    _check_drawn(logits, uniforms, axes=2)
    if not isinstance(power, Real) or not math.isfinite(power):
        raise PayloadInvalidError(
            f"the power is {power!r}: give a finite number, such as 1.0",
            facts={"power": str(power)},
        )
    bad = (status_of(logits.amax(1)) != RowStatus.OK).nonzero()
    if len(bad):
        raise PayloadInvalidError(
            f"position {int(bad[0])} has a NaN, a +inf or nothing finite ({len(bad)} such): there "
            "is nothing to draw from; leave such positions out",
            facts={"position": int(bad[0]), "faulty_positions": len(bad)},
        )
    draws = uniforms.shape[1]
    p = logits.double().softmax(1)
    source = (logits.double() * power).softmax(1)
    drawn = torch.searchsorted(source.cumsum(1), uniforms.contiguous(), right=True)
    drawn = drawn.clamp_max(logits.shape[1] - 1).sort(1).values
    is_new = torch.ones_like(drawn, dtype=torch.bool)
    is_new[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    place = is_new.cumsum(1) - 1
    counts = torch.zeros_like(p[:, :1]).repeat(1, draws)
    counts.scatter_add_(1, place, torch.ones_like(counts))
    ids = torch.full_like(drawn, -1).scatter_(1, place, drawn)
    ratio = (p / source).gather(1, ids.clamp_min(0))
    weights = torch.where(ids >= 0, counts / draws * ratio, 0.0)
    return ids, weights


def _check_drawn(logits: torch.Tensor, uniforms: torch.Tensor, *, axes: int) -> None:
    """Let logits [P,V] pass that have uniforms, [P] or [P,N] by ``axes``, each in [0, 1)."""
    check_tensor(logits, "logits")
    check_tensor(uniforms, "uniforms")
    shapes, wanted = (tuple(logits.shape), tuple(uniforms.shape)), ("[P]", "[P,N]")[axes - 1]
    floats = logits.is_floating_point() and uniforms.is_floating_point()
    if not floats or logits.dim() != 2 or uniforms.dim() != axes or not shapes[0][1]:
        raise PayloadInvalidError(
            f"a sample of logits {shapes[0]} ({_name(logits)}) from uniforms {shapes[1]} "
            f"({_name(uniforms)}): give floats [P,V], of at least one id, and {wanted}",
            facts={"logits": str(shapes[0]), "uniforms": str(shapes[1])},
        )
    if len(uniforms) != len(logits):
        raise PayloadInvalidError(
            f"{len(uniforms)} uniforms are given for {len(logits)} positions: give them for each",
            facts={"uniforms": len(uniforms), "positions": len(logits)},
        )
    outside = (~((uniforms >= 0) & (uniforms < 1))).nonzero()
    if len(outside):
        at = tuple(outside[0].tolist())
        raise PayloadInvalidError(
            f"uniforms{list(at)} is {float(uniforms[at]):g} ({len(outside)} such): a uniform is a "
            "number from 0 on and below 1",
            facts={"uniform": float(uniforms[at]), "faulty": len(outside)},
        )


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _pieces(logits: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
    elements = _CPU_ELEMENTS if logits.device.type == "cpu" else _GPU_ELEMENTS
    step = max(1, elements // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        at = slice(start, min(start + step, len(logits)))
        yield logits[at], at


def _threshold(rows: torch.Tensor, m: int, uniforms: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a sample's tensors, in its fields' order, of some rows [R,V]."""
    status = status_of(rows.amax(1))
    bad = (status != RowStatus.OK).unsqueeze(1)
    logits = rows.double().masked_fill(bad, 0.0)
    top = logits.amax(1, keepdim=True)
    shifted = logits.sub_(top)
    p = shifted.exp()
    total = row_sums(p).unsqueeze(1)
    p = p.div_(total)
    # 0 times the logit of what is ruled out is 0.
    shifted.masked_fill_(shifted == -torch.inf, 0.0)
    entropy = total.log() - row_sums(shifted.mul_(p)).unsqueeze(1)
    head = _head(p, m)
    thresholds = head.left / (m - head.counts)
    tail = _without(p, head.ids, head.counts)
    picked, is_there = _picks(tail, thresholds, uniforms, m - head.counts)
    places = torch.arange(m, device=rows.device).expand(len(rows), -1)
    in_head = places < head.counts.unsqueeze(1)
    at = (places - head.counts.unsqueeze(1)).clamp_min(0)
    ids = torch.where(in_head, head.ids, picked.gather(1, at))
    absent = ~(in_head | is_there.gather(1, at)) | bad
    weights = torch.where(in_head, head.probabilities, thresholds.unsqueeze(1))
    normaliser = (top + total.log()).squeeze(1)
    flat = bad.squeeze(1)
    return (
        ids.masked_fill(absent, -1).int(),
        weights.masked_fill(absent, 0.0),
        head.counts,
        thresholds,
        entropy.squeeze(1).clamp_min(0.0).masked_fill(flat, 0.0),
        normaliser.masked_fill(flat, 0.0),
        status,
    )


def _head(p: torch.Tensor, m: int) -> _Head:
    """Find what is kept as it is: the largest, while more than an even share of what is left.

    Of entries that tie, all or none are: so it does not matter which of them ``topk`` names.
    """
    width = min(m, p.shape[1])
    ids = p.topk(width, dim=1, sorted=False).indices.sort(1).values
    order = p.gather(1, ids).argsort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    values = p.gather(1, ids)
    rest = row_sums(p.scatter(1, ids, 0.0)).unsqueeze(1)
    if width < m:
        missing = (0, m - width)
        ids = torch.nn.functional.pad(ids, missing)
        values = torch.nn.functional.pad(values, missing)
    # Summed from the small end: 1 minus a sum has no digits left on a peaked row.
    left = values.flip(1).cumsum(1).flip(1) + rest
    shares = m - torch.arange(m, device=p.device)
    counts = (values * shares > left).long().cumprod(1).sum(1)
    return _Head(ids, values, counts, left.gather(1, counts.unsqueeze(1)).squeeze(1))


def _without(p: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return ``p`` with 0 at the first ``counts`` of ``ids``."""
    is_kept = torch.arange(ids.shape[1], device=ids.device) < counts.unsqueeze(1)
    keep = torch.where(is_kept, 0.0, torch.inf).to(p.dtype)
    return p.scatter_reduce(1, ids, keep, "amin")


def _picks(
    tail: torch.Tensor, thresholds: torch.Tensor, uniforms: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick systematically: where (u + n) thresholds fall in the cumulative mass; [R,m] each.

    No entry is larger than the threshold, so that no two picks are one entry. Rounding may still
    say so where an entry is just as large: picks are counted among the entries of some mass, and
    each is made to lie behind the one before.
    """
    there = tail > 0
    among = there.cumsum(1)
    available = among[:, -1:]
    steps = torch.arange(int(counts.max()), device=tail.device).expand(len(tail), -1)
    goals = (uniforms.to(tail.device).unsqueeze(1) + steps) * thresholds.unsqueeze(1)
    places = torch.searchsorted(tail.cumsum(1), goals, right=True).clamp_max(tail.shape[1] - 1)
    ordinals = among.gather(1, places) - 1
    ordinals = (ordinals - steps).cummax(1).values + steps
    ordinals = torch.minimum(ordinals, available - counts.unsqueeze(1) + steps).clamp_min(0)
    picked = torch.searchsorted(among, ordinals + 1).clamp_max(tail.shape[1] - 1)
    width = max(0, int(counts.max()))
    wanted = torch.minimum(counts.unsqueeze(1), available)
    return picked[:, :width], steps < wanted
