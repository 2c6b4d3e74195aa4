"""Valid counts: how many positions of a publisher's rows count in the students' losses.

A mask marks positions, as the losses take it: position s stands for the token after it. The
last position of a row has none, and never counts, whatever the mask says of it; nor does one
that is not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.rows.flat_rows import INTEGERS, UNREADABLE

LossMask: TypeAlias = "torch.Tensor | Sequence[torch.Tensor | Sequence[int] | Sequence[bool] | int]"
"""Marks [N,S], marks of each row, or the number of positions that count of each row [N]."""


def valid_count(mask: LossMask, lengths: torch.Tensor, windows: torch.Tensor, width: int) -> int:
    """Return how many positions count: those of the mask that are written and have a next token.

    Counts a row are taken at their word, as far as they can be true.

    Raises:
        PayloadInvalidError: a mask of another shape, or a count that cannot be.
    """
    first = windows[:, 0]
    end = torch.minimum(first + windows[:, 1], lengths - 1)
    most = (end - first).clamp_min(0)
    mask = _readable(mask)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        if mask.shape[1] != width:
            raise _invalid(
                f"loss_mask is {mask.shape[1]} wide, and the rows {width}: give a mask of the "
                "same shape as input_ids, or the number of positions that count of each row",
                mask_width=mask.shape[1],
                width=width,
            )
        places = torch.arange(width)
        inside = (places >= first.unsqueeze(1)) & (places < end.unsqueeze(1))
        marks = mask.detach().cpu()
        _check_marks(marks.masked_fill(places >= lengths.unsqueeze(1), 0), first_row=0)
        return int(((marks != 0) & inside).sum())
    if not isinstance(mask, torch.Tensor) and not all(isinstance(each, int) for each in mask):
        return sum(
            _count_of_row(row, each, int(lengths[row]), slice(int(first[row]), int(end[row])))
            for row, each in enumerate(mask)
        )
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        raise _invalid(
            f"loss_mask has shape {tuple(mask.shape)} of bool: give marks [rows, positions], or "
            "the number of positions that count of each row"
        )
    counts = whole_numbers(mask, "loss_mask", (len(lengths),))
    wrong = ((counts < 0) | (counts > most)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise _invalid(
            f"loss_mask says that {int(counts[row])} positions of row {row} count, and "
            f"{int(most[row])} of it are written and have a next token",
            row=row,
            count=int(counts[row]),
            most=int(most[row]),
        )
    return int(counts.sum())


def _count_of_row(row: int, mask: object, length: int, inside: slice) -> int:
    try:
        marks = torch.as_tensor(mask).detach().cpu()
    except UNREADABLE as error:
        raise _invalid(
            f"the loss_mask of row {row} cannot be read ({error}): give {length} marks, 1 where a "
            "position counts and 0 elsewhere",
            row=row,
        ) from None
    if marks.shape != (length,):
        raise _invalid(
            f"the loss_mask of row {row} has shape {tuple(marks.shape)}, and the row {length} "
            "tokens",
            row=row,
            length=length,
        )
    _check_marks(marks.unsqueeze(0), first_row=row)
    return int((marks != 0)[inside].sum())


def _readable(mask: LossMask) -> LossMask:
    """Return a mask that is a tensor or can be gone through; NumPy's arrays become tensors."""
    if isinstance(mask, torch.Tensor) and not mask.is_meta:
        return mask
    if not isinstance(mask, torch.Tensor | str | bytes | Mapping):
        if not hasattr(mask, "__array__") and isinstance(mask, Sequence):
            return mask
        try:
            return torch.as_tensor(mask)
        except UNREADABLE:
            pass
    raise _invalid(
        f"loss_mask is a {type(mask).__name__} that cannot be read: give marks [rows, positions], "
        "marks of each row, or the number of positions that count of each row"
    )


def _check_marks(marks: torch.Tensor, *, first_row: int) -> None:
    """Refuse marks [N,S] that are neither 0 nor 1; NaN is neither."""
    wrong = ((marks != 0) & (marks != 1)).nonzero()
    if len(wrong):
        row, at = wrong[0].tolist()
        raise _invalid(
            f"the loss_mask of row {first_row + row} is {marks[row, at].item()} at position {at}: "
            "give 1 where a position counts and 0 elsewhere",
            row=first_row + row,
            position=at,
        )


def whole_numbers(given: object, what: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return whole numbers of a shape, int64 on the CPU.

    Raises:
        PayloadInvalidError: they are none, or of another shape; ``what`` names the argument.
    """
    try:
        numbers = torch.as_tensor(given)
    except UNREADABLE as error:
        raise _invalid(f"{what} cannot be read ({error}): give integers {list(shape)}") from None
    if tuple(numbers.shape) != shape or numbers.dtype not in INTEGERS or numbers.is_meta:
        kind = str(numbers.dtype).removeprefix("torch.")
        raise _invalid(
            f"{what} has shape {tuple(numbers.shape)} of {kind}: give integers {list(shape)}",
            shape=str(tuple(numbers.shape)),
        )
    return numbers.detach().to("cpu", torch.int64)


def _invalid(message: str, **facts: int | str) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
