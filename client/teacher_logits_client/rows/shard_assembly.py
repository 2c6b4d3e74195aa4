"""Shard assembly: tensors of several shards as the one that a reader wants, by a shard plan.

    plan = plan_shards(boxes, wanted)              # teacher_logits.shard_plan
    logits = assemble_shards(plan, tensors)        # [rows, positions, ids] of the slice

Shards of full logits lie side by side in the vocabulary; those of a sequence are placed by
position, zigzag undone. Promises: a slice that is one piece of one shard is a view of it. All else
is one copy into one buffer, of which the plan says that every place is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError

if TYPE_CHECKING:
    from teacher_logits.shard_plan import Piece, ShardPlan

    Place = tuple[slice, slice, slice]


def assemble_shards(
    plan: ShardPlan, tensors: Sequence[torch.Tensor], *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the slice of a plan, [rows, positions, ids, ...].

    Args:
        tensors: those of the shards that were planned, in that order, each of its shard's rows,
            positions (its runs one behind the other) and ids, and of the same axes behind them.
        out: memory of the caller's for the slice, which is copied into it then, a view or not.

    Raises:
        PayloadInvalidError: a tensor that is smaller than its shard, or unlike the others; or
            an ``out`` of another shape or type.
    """
    _check(plan, tensors, out)
    if not tensors:
        raise PayloadInvalidError("no tensors are given: give one for each shard of the plan")
    if plan.is_view and out is None:
        (piece,) = plan.pieces
        return tensors[piece.shard][_source(piece)]
    first = tensors[0]
    if out is None:
        out = torch.empty((*plan.size, *first.shape[3:]), dtype=first.dtype, device=first.device)
    for piece in plan.pieces:
        out[_slices(piece.rows, piece.positions, piece.ids)].copy_(
            tensors[piece.shard][_source(piece)]
        )
    return out


def _source(piece: Piece) -> Place:
    return _slices(piece.source_rows, piece.source_positions, piece.source_ids)


def _slices(rows: range, positions: range, ids: range) -> Place:
    return (
        slice(rows.start, rows.stop),
        slice(positions.start, positions.stop),
        slice(ids.start, ids.stop),
    )


def _check_memory(what: str, given: object) -> None:
    is_tensor = isinstance(given, torch.Tensor) and not given.is_nested
    if not is_tensor or given.layout is not torch.strided or given.is_meta:  # type: ignore[attr-defined]
        raise PayloadInvalidError(
            f"{what} is a {type(given).__name__} without memory of its own in rows: give a dense "
            "tensor [rows, positions, ids]",
            facts={"given": type(given).__name__},
        )


def _check_kinds(tensors: Sequence[torch.Tensor], out: torch.Tensor | None) -> None:
    """Refuse what is no memory of shards or of a slice."""
    if not isinstance(tensors, Sequence):
        raise PayloadInvalidError(
            f"tensors are a {type(tensors).__name__}: give those of the shards, in a list",
            facts={"given": type(tensors).__name__},
        )
    for at, tensor in enumerate(tensors):
        _check_memory(f"the tensor of shard {at}", tensor)
    if out is not None:
        _check_memory("out", out)
        steps = zip(out.shape, out.stride(), strict=True)
        if (out.requires_grad and torch.is_grad_enabled()) or any(
            n > 1 and not s for n, s in steps
        ):
            raise PayloadInvalidError(
                "out requires a gradient, or is expanded and has less memory than entries: give "
                "memory of its own"
            )


def _check(plan: ShardPlan, tensors: Sequence[torch.Tensor], out: torch.Tensor | None) -> None:
    _check_kinds(tensors, out)
    for piece in plan.pieces:
        if piece.shard >= len(tensors):
            raise PayloadInvalidError(
                f"{len(tensors)} tensors are given, and the plan takes from shard {piece.shard}: "
                "give those of all shards that were planned, in that order",
                facts={"tensors": len(tensors), "shard": piece.shard},
            )
        shape = tuple(tensors[piece.shard].shape)
        needed = (piece.source_rows.stop, piece.source_positions.stop, piece.source_ids.stop)
        if len(shape) < 3 or any(has < need for has, need in zip(shape, needed, strict=False)):
            raise PayloadInvalidError(
                f"the tensor of shard {piece.shard} has shape {shape}, and the plan takes rows, "
                f"positions and ids up to {needed} of it: give [rows, positions, ids]",
                facts={"shard": piece.shard, "shape": str(shape), "needed": str(needed)},
            )
    kinds = {(each.dtype, tuple(each.shape[3:])) for each in tensors}
    if out is not None:
        kinds.add((out.dtype, tuple(out.shape[3:])))
    if len(kinds) > 1 or (out is not None and tuple(out.shape[:3]) != plan.size):
        raise PayloadInvalidError(
            f"shards and slice are unlike: {', '.join(sorted(map(str, kinds)))}, for a slice of "
            f"{plan.size}: give tensors of one type, and memory of just that shape",
            facts={"kinds": len(kinds), "size": str(plan.size)},
        )
