"""Targets as tensors [N,S,K] with padding, as trainers of reinforcement learning keep them.

Positions are at the logits' index: position s is what the teacher says of token s+1. What is
padding is written as zeros, and whoever reads it back needs the mask of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_whole
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, eq=False)
class Rectangle:
    """``ids`` int64 and ``logprobs`` fp32 [N,S,K], ``log_tail`` fp32 [N,S]; zeros are padding."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    log_tail: torch.Tensor


def rectangle_of(targets: Targets, *, width: int) -> Rectangle:
    """Return targets as rectangles ``width`` positions wide; they are copies, and outlive a lease.

    Raises:
        PayloadInvalidError: a row reaches beyond the width, or a position to learn from has
            fewer than K entries, which these trainers have no sign for.
        LeaseLostError: the targets' lease is closed.
    """
    targets.check_open()
    if not is_whole(width):
        raise PayloadInvalidError(
            f"width is {width!r}: give that of the batch's input_ids", facts={"width": repr(width)}
        )
    ids = targets.topk_ids.reshape(-1, targets.topk_ids.shape[-1])
    counts = targets.row_offsets.diff()
    firsts = torch.zeros_like(counts) if targets.row_firsts is None else targets.row_firsts
    beyond = (firsts + counts > width).nonzero().flatten()
    if len(beyond):
        row = int(beyond[0])
        raise PayloadInvalidError(
            f"row {row} has {int(counts[row])} positions from {int(firsts[row])} on, and the "
            f"batch is {width} tokens wide: give the width of its input_ids",
            facts={"row": row, "positions": int(counts[row]), "width": width},
        )
    absent = ((ids < 0).any(1) & targets.valid.reshape(-1)).nonzero().flatten()
    if len(absent):
        raise PayloadInvalidError(
            f"position {int(absent[0])} has fewer than K = {ids.shape[1]} entries: open the "
            "session with a top_k of no more than the vocabulary has",
            facts={"position": int(absent[0]), "k": ids.shape[1]},
        )
    places = torch.arange(len(counts), device=counts.device) * width + firsts
    places = (places - targets.row_offsets[:-1]).repeat_interleave(counts)
    places += torch.arange(len(places), device=places.device)
    rows = len(counts)
    known = (ids >= 0).to(ids.device)
    spread = ids.new_zeros(rows * width, ids.shape[1], dtype=torch.int64)
    values = targets.topk_logprobs.new_zeros(rows * width, ids.shape[1])
    tail = targets.log_tail.new_zeros(rows * width)
    spread[places] = ids.long() * known
    values[places] = targets.topk_logprobs.reshape(ids.shape) * known
    tail[places] = targets.log_tail.reshape(-1)
    return Rectangle(
        ids=spread.view(rows, width, -1),
        logprobs=values.view(rows, width, -1),
        log_tail=tail.view(rows, width),
    )


def targets_of_rectangle(
    rectangle: Rectangle, positions: torch.Tensor, *, temperature: float = 1.0
) -> Targets:
    """Return targets of N rows of S positions each, of which ``positions`` [N,S] count.

    They go with logits [N,S,V] of the same rectangle, padding included.
    """
    rows, width, k = rectangle.ids.shape
    valid = (positions != 0).reshape(-1)
    gone = ~valid.unsqueeze(1)
    return Targets(
        topk_ids=rectangle.ids.reshape(-1, k).int().masked_fill(gone, -1),
        topk_logprobs=rectangle.logprobs.reshape(-1, k).masked_fill(gone, ABSENT_LOGPROB),
        log_tail=rectangle.log_tail.reshape(-1).masked_fill(~valid, 0.0),
        actual_logprob=None,
        valid=valid,
        temperature=temperature,
        row_offsets=torch.arange(0, rows * width + 1, width, device=valid.device)
        if width
        else torch.zeros(rows + 1, dtype=torch.int64, device=valid.device),
    )


def tensor_of(batch: Mapping[str, object], *names: str) -> torch.Tensor:
    """Return a batch's tensor under the first of some names that it has.

    Raises:
        PayloadInvalidError: it has none of them, or something else there.
    """
    for name in names:
        found = batch[name] if name in batch else None
        if isinstance(found, torch.Tensor):
            return found
    has = ", ".join(str(each) for each in batch)
    raise PayloadInvalidError(
        f"the batch has no tensor {' or '.join(names)}; it has {has}", facts={"name": names[0]}
    )


def check_shapes(batch: Mapping[str, object], wanted: tuple[int, ...], *names: str) -> None:
    """Let tensors pass whose leading axes are ``wanted``; those that are not there pass too.

    Raises:
        PayloadInvalidError: with both shapes. Nothing is cut or padded to fit.
    """
    for name in names:
        if name not in batch:
            continue
        found = tensor_of(batch, name)
        shape = () if found.is_nested else tuple(found.shape)
        if shape[: len(wanted)] != wanted:
            raise PayloadInvalidError(
                f"{name} has shape {shape} and the batch's tokens are {wanted}: a padded length "
                "of another layout got into one of them",
                facts={"name": name, "shape": str(shape), "wanted": str(wanted)},
            )
