"""Valid counts: how many positions of a publisher's rows count in the students' losses.

A mask marks positions, as the losses take it: position s stands for the token after it. The
last position of a row has none, and never counts, whatever the mask says of it; nor does one
that is not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from teacher_logits.errors import PayloadInvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        return int(((mask.detach().cpu() != 0) & inside).sum())
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
    marks = torch.as_tensor(mask)
    if marks.shape != (length,):
        raise _invalid(
            f"the loss_mask of row {row} has shape {tuple(marks.shape)}, and the row {length} "
            "tokens",
            row=row,
            length=length,
        )
    return int((marks.cpu() != 0)[inside].sum())


def whole_numbers(given: object, what: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return whole numbers of a shape, int64 on the CPU.

    Raises:
        PayloadInvalidError: they are none, or of another shape; ``what`` names the argument.
    """
    try:
        numbers = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _invalid(f"{what} cannot be read ({error}): give integers {list(shape)}") from None
    if tuple(numbers.shape) != shape or numbers.is_floating_point() or numbers.is_complex():
        kind = str(numbers.dtype).removeprefix("torch.")
        raise _invalid(
            f"{what} has shape {tuple(numbers.shape)} of {kind}: give integers {list(shape)}",
            shape=str(tuple(numbers.shape)),
        )
    return numbers.detach().to("cpu", torch.int64)


def _invalid(message: str, **facts: int | str) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
