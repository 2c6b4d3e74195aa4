"""Dense losses tile by tile: a few rows and a few columns of both sides at a time.

The gradient in the student's logits is softmax(z) - softmax(t), weighed by position and bin. It
is made again tile by tile, from each side's normaliser; where one tile is all there is, forward
keeps it, and backward only scales it.

Promises: no array of the size of the logits but the gradient, where there are several tiles;
positions without weight cost and touch nothing; columns that pad a shard are not read. First
derivatives only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.selection.complement import rows_at_once
from teacher_logits_client.losses.derivatives import first_only, save, saved
from teacher_logits_client.losses.powers import powers
from teacher_logits_client.losses.sharding import checksums, refused_together
from teacher_logits_client.losses.streaming import StreamedSums

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.autograd.function import FunctionCtx

    from teacher_logits_client.losses.sharding import VocabShard

# Temporaries of a tile that live at the same time.
_BUFFERS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseInputs:
    """What a dense loss needs beside the student's logits, [P,V].

    ``teacher`` [P,V] logits; ``weights`` [P], where 0 leaves a position out entirely; ``bins``
    int64 [P], each below ``bin_count`` where the weight is not 0. Of the logits, ``columns`` are
    real, and ``tile`` are taken at once. ``less_entropy`` makes a KL of it.
    """

    teacher: torch.Tensor
    weights: torch.Tensor
    bins: torch.Tensor
    bin_count: int
    columns: int
    tile: int
    temperature: float
    less_entropy: bool
    shard: VocabShard | None


def dense_loss(logits: torch.Tensor, inputs: DenseInputs) -> torch.Tensor:
    """Return temperature² times the weighted sum of each bin [B]."""
    loss = _DenseLoss.apply(logits, inputs)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", loss)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tiles:
    """How both sides are cut; ``rows`` [R] are those that count."""

    rows: torch.Tensor
    count: int
    columns: int
    tile: int
    temperature: float
    dtype: torch.dtype

    def parts(self) -> list[slice]:
        """Return which of the rows are taken at once."""
        width = min(self.tile, max(1, self.columns))
        step = max(1, rows_at_once(width, self.rows.device) // _BUFFERS)
        starts = range(0, len(self.rows), step)
        return [slice(start, min(start + step, len(self.rows))) for start in starts]

    def across(self) -> list[slice]:
        """Return which of the columns are taken at once."""
        starts = range(0, self.columns, self.tile)
        return [slice(start, min(start + self.tile, self.columns)) for start in starts]

    def are_one(self) -> bool:
        """Whether there is a single tile."""
        return len(self.parts()) == len(self.across()) == 1

    def all(self) -> Iterator[tuple[slice, slice]]:
        """Yield each tile as its part of the rows that count, and its columns."""
        across = self.across()
        for part in self.parts():
            yield from ((part, columns) for columns in across)

    def place(self, part: slice) -> slice | torch.Tensor:
        """Return where these rows are in the logits: themselves, where every row counts."""
        return part if len(self.rows) == self.count else self.rows[part]

    def of(self, logits: torch.Tensor, part: slice, columns: slice) -> torch.Tensor:
        """Return a tile over temperature, in the computing type; perhaps a view."""
        tile = logits[self.place(part), columns].to(self.dtype)
        return tile if self.temperature == 1 else tile / self.temperature


class _DenseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: torch.Tensor, inputs: DenseInputs) -> torch.Tensor:
        teacher, tiles = inputs.teacher, _cut(logits, inputs)
        with refused_together(inputs.shard, logits):
            sums = _streamed(logits, teacher, tiles)
        if inputs.shard is not None:
            sums.merge(inputs.shard, agreed=_said(tiles, inputs))
        _check_teacher(sums.teacher_sum, tiles.rows)
        values = sums.cross_entropy()
        if inputs.less_entropy:
            values = values - sums.teacher_entropy()
        normalisers = torch.stack(
            [sums.student_top, sums.student_sum.log(), sums.teacher_top, sums.teacher_sum.log()]
        ).unsqueeze(2)
        weights = inputs.weights[tiles.rows].to(tiles.dtype) * tiles.temperature
        bins = inputs.bins[tiles.rows]
        kept = (logits, teacher)
        if tiles.are_one() and ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            ((_, _, direction),) = _directions(logits, teacher, normalisers, tiles)
            kept = (direction, direction)
        save(ctx, *kept, normalisers, weights, bins)
        ctx.tiles, ctx.shape, ctx.dtype = tiles, logits.shape, logits.dtype  # type: ignore[attr-defined]
        return _by_bin(values * weights, bins, inputs.bin_count) * tiles.temperature

    @staticmethod
    @first_only
    def backward(ctx: FunctionCtx, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, teacher, normalisers, weights, bins = saved(ctx)
        tiles: _Tiles = ctx.tiles  # type: ignore[attr-defined]
        shape, dtype = ctx.shape, ctx.dtype  # type: ignore[attr-defined]
        scale = (weights * upstream[bins]).unsqueeze(1)
        whole = len(tiles.rows) == tiles.count and tiles.columns == shape[1]
        blank = torch.empty if whole else torch.zeros
        gradient = blank(shape, dtype=dtype, device=weights.device)
        directions = _directions(logits, teacher, normalisers, tiles)
        if tiles.are_one():
            directions = iter([(*next(tiles.all()), logits)])
        for part, columns, each in directions:
            gradient[tiles.place(part), columns] = (each * scale[part]).to(dtype)
        return gradient, None


def _cut(logits: torch.Tensor, inputs: DenseInputs) -> _Tiles:
    """Cut both sides; what is computed is fp64 where one of them is, and fp32 elsewhere."""
    wide = torch.float64 in (logits.dtype, inputs.teacher.dtype)
    return _Tiles(
        rows=inputs.weights.nonzero().squeeze(1),
        count=len(logits),
        columns=inputs.columns,
        tile=inputs.tile,
        temperature=inputs.temperature,
        dtype=torch.float64 if wide else torch.float32,
    )


def _streamed(logits: torch.Tensor, teacher: torch.Tensor, tiles: _Tiles) -> StreamedSums:
    """Return the state of every row that counts, after all of this rank's columns."""
    across = tiles.across()
    states = [StreamedSums.of_none(0, tiles.dtype, logits.device)]
    for part in tiles.parts():
        state = StreamedSums.of_none(part.stop - part.start, tiles.dtype, logits.device)
        for columns in across:
            state.fold(tiles.of(teacher, part, columns), tiles.of(logits, part, columns))
        states.append(state)
    return StreamedSums.together(states)


def _check_teacher(normalisers: torch.Tensor, rows: torch.Tensor) -> None:
    """Let a teacher pass whose normaliser [R] is one at each of ``rows``; all ranks have the same.

    Raises:
        PayloadInvalidError: one is NaN, which a NaN or +inf makes of it, or 0.
    """
    wrong = (~(normalisers > 0)).nonzero()
    if len(wrong):
        position = int(rows[wrong[0]])
        raise PayloadInvalidError(
            f"teacher logits at position {position} ({len(wrong)} such positions count) hold NaN "
            "or +inf, or nothing but -inf, which is no distribution; mask what is not to be "
            "learnt, or mend the teacher",
            facts={"position": position, "wrong_positions": len(wrong)},
        )


def _directions(
    logits: torch.Tensor, teacher: torch.Tensor, normalisers: torch.Tensor, tiles: _Tiles
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield softmax(z) - softmax(t) of each tile; ``normalisers`` [4,R,1] are those of both."""
    for part, columns in tiles.all():
        student_top, student_log, teacher_top, teacher_log = normalisers[:, part]
        student = tiles.of(logits, part, columns) - student_top
        direction = powers(student.sub_(student_log))
        p = tiles.of(teacher, part, columns) - teacher_top
        yield part, columns, direction.sub_(powers(p.sub_(teacher_log)))


def _by_bin(values: torch.Tensor, bins: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum of each bin [B], added up in the order of positions."""
    if count == 1:
        return values.sum().reshape(1)
    return torch.stack([torch.where(bins == each, values, 0.0).sum() for each in range(count)])


def _said(tiles: _Tiles, inputs: DenseInputs) -> str:
    """What all ranks of a shard have to say alike."""
    weights, bins = inputs.weights[tiles.rows].double(), inputs.bins[tiles.rows]
    return (
        f"dense_{'forward_kl' if inputs.less_entropy else 'soft_cross_entropy'} at "
        f"{len(tiles.rows)} of {tiles.count} positions, {inputs.bin_count} bins, temperature "
        f"{tiles.temperature}, in {tiles.dtype}; places, weights and bins of checksums "
        f"{checksums(tiles.rows, weights, bins)}"
    )
