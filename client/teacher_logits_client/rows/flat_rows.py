"""Flat rows: rows as callers have them, one behind the other and without their padding.

Rows come as a rectangle [N,S] of integers, a tensor or an array of NumPy, with the true length
of each row or a mask of its tokens; or as a list of rows. A row's tokens stand first and its
padding behind them: positions count from a row's first token, so padding on the left, or a gap,
would shift every one of them and is refused, with the row and the place. So is a length beyond
the width, and what is no whole number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from teacher_logits.errors import PayloadInvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence

Rows: TypeAlias = "torch.Tensor | Sequence[torch.Tensor | Sequence[int]]"
Numbers: TypeAlias = "torch.Tensor | Sequence[int]"
Mask: TypeAlias = "torch.Tensor | Sequence[Sequence[int | bool]]"

INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
UNREADABLE = (TypeError, ValueError, RuntimeError, OverflowError)
"""What torch raises for something that it makes no tensor of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatRows:
    """Rows without padding: ``ids`` int32 [sum of lengths], ``lengths`` int64 [N]; on the CPU."""

    ids: torch.Tensor
    lengths: torch.Tensor

    @property
    def row_count(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def token_count(self) -> int:
        """Tokens of all rows."""
        return len(self.ids)


def flatten(
    given: Rows,
    lengths: Numbers | None = None,
    attention_mask: Mask | None = None,
    *,
    what: str,
    shortest: int,
) -> FlatRows:
    """Return rows one behind the other, their ids still int64.

    Args:
        given: integers [N,S], or a list of N rows.
        lengths, attention_mask: of a rectangle, either of them: the true tokens of each row
            [N], or 1 at each token and 0 at padding behind them [N,S]. Without, all S count.
        what: the argument's name, for messages.
        shortest: the tokens that a row has at least.

    Raises:
        PayloadInvalidError: naming the row, the place and the numbers.
    """
    if lengths is not None and attention_mask is not None:
        raise invalid(f"{what} came with lengths and with attention_mask: give one of them")
    if not isinstance(given, torch.Tensor) and hasattr(given, "__array__"):
        given = _tensor(given, what)
    if not isinstance(given, torch.Tensor):
        _check_listed(given, what)
        if lengths is not None or attention_mask is not None:
            raise invalid(f"{what} is a list of rows, which have their lengths: give none beside")
        return _flatten_list([_row(row, what, at) for at, row in enumerate(given)], what, shortest)
    if given.dim() != 2:
        raise invalid(
            f"{what} has shape {tuple(given.shape)}: give [rows, tokens], or a list of rows"
            f"{_of_one_row(what) if given.dim() == 1 else ''}",
            axes=given.dim(),
        )
    _check_dtype(given, what)
    count, width = given.shape
    if not count:
        raise invalid(f"{what} has no rows", rows=0)
    if attention_mask is not None:
        lengths = _masked_lengths(attention_mask, count, width, what)
    exact = _lengths(lengths, count, width, what=what, shortest=shortest)
    ids = given.detach().to("cpu", torch.int64)
    inside = torch.arange(width) < exact.unsqueeze(1)
    return FlatRows(ids=ids[inside], lengths=exact)


def _of_one_row(what: str) -> str:
    if what == "prefix_ids":
        return "; where all N rows have one prefix, [prefix] * N"
    return f"; of one row, [{what}]"


def _check_listed(given: object, what: str) -> None:
    way = "a tensor [rows, tokens] of token ids, or a list of rows"
    if isinstance(given, Mapping):
        way = "batch['input_ids'], and attention_mask=batch['attention_mask'] beside it"
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return
    raise invalid(f"{what} is a {type(given).__name__}: give {way}")


def _flatten_list(rows: list[torch.Tensor], what: str, shortest: int) -> FlatRows:
    if not rows:
        raise invalid(f"{what} has no rows", rows=0)
    lengths = torch.tensor([len(row) for row in rows])
    _check_lengths(lengths, int(lengths.max()), what=what, shortest=shortest)
    return FlatRows(ids=torch.cat(rows), lengths=lengths)


def _row(row: torch.Tensor | Sequence[int], what: str, at: int) -> torch.Tensor:
    if isinstance(row, int):
        raise invalid(
            f"{what} is one list of numbers (its first is {row}): give a list of rows"
            f"{_of_one_row(what)}",
            axes=1,
        )
    if not isinstance(row, torch.Tensor):
        try:
            row = torch.tensor(row) if len(row) else torch.empty(0, dtype=torch.int64)
        except UNREADABLE as error:
            raise invalid(f"row {at} of {what} is no list of token ids: {error}", row=at) from None
    if row.dim() != 1:
        raise invalid(
            f"row {at} of {what} has shape {tuple(row.shape)}: give one axis of tokens a row",
            row=at,
            axes=row.dim(),
        )
    _check_dtype(row, f"row {at} of {what}")
    return row.detach().to("cpu", torch.int64)


def _masked_lengths(given: Mask, count: int, width: int, what: str) -> torch.Tensor:
    """Return the lengths [N] that a mask of tokens gives, if its ones stand first in each row."""
    mask = given if isinstance(given, torch.Tensor) else _tensor(given, "attention_mask")
    if tuple(mask.shape) != (count, width):
        raise invalid(
            f"attention_mask has shape {tuple(mask.shape)} and {what} {(count, width)}: give 1 at "
            "each token and 0 at each place of padding"
        )
    if mask.dtype not in INTEGERS | {torch.bool} or bool(((mask != 0) & (mask != 1)).any()):
        raise invalid(
            f"attention_mask holds {_dtype_text(mask)} that is not 0 or 1 throughout: give truth "
            "values or integers, 1 at each token and 0 at each place of padding; rows that share "
            "a line are to be given as a list of rows",
            dtype=_dtype_text(mask),
        )
    mask = mask.detach().to("cpu", torch.bool)
    lengths = mask.sum(1)
    wrong = (mask != (torch.arange(width) < lengths.unsqueeze(1))).any(1).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        ones = mask[row].nonzero().flatten()
        first = int(ones[0])
        gap = int((ones.diff() > 1).nonzero()[0]) if not first else 0
        where = (
            f"is padded on the left: its ones start at position {first} of {width}"
            if first
            else f"has a gap: its ones stop after position {int(ones[gap])} and go on at "
            f"{int(ones[gap + 1])}"
        )
        raise invalid(
            f"row {row} of attention_mask {where}; positions count from a row's first token, so "
            "pad on the right (tokenizer.padding_side = 'right'), or pass a list of rows, as in "
            "[ids[kept] for ids, kept in zip(input_ids, attention_mask.bool())]",
            row=row,
            first=first,
            width=width,
            length=len(ones),
        )
    return lengths


def _lengths(
    lengths: Numbers | None, count: int, width: int, *, what: str, shortest: int
) -> torch.Tensor:
    exact = torch.full((count,), width) if lengths is None else _given_lengths(lengths, what)
    if len(exact) != count:
        raise invalid(
            f"{what} has {count} rows and {len(exact)} lengths: give one length a row, of the "
            "very rows that are sent",
            rows=count,
            lengths=len(exact),
        )
    _check_lengths(exact, width, what=what, shortest=shortest)
    return exact


def _given_lengths(lengths: Numbers, what: str) -> torch.Tensor:
    name = "lengths" if what == "input_ids" else what.replace("ids", "lengths")
    meaning = "the true tokens of each row, integers [rows]"
    try:
        exact = torch.as_tensor(lengths)
    except UNREADABLE as error:
        raise invalid(f"{name} cannot be read ({error}): give {meaning}") from None
    if exact.dim() != 1:
        way = "; a mask goes to attention_mask=" if exact.dim() == 2 else ""
        raise invalid(f"{name} has shape {tuple(exact.shape)}: give {meaning}{way}")
    if exact.dtype not in INTEGERS and len(exact):
        raise invalid(f"{name} holds {_dtype_text(exact)}: give {meaning}")
    return exact.detach().to("cpu", torch.int64)


def _check_lengths(lengths: torch.Tensor, width: int, *, what: str, shortest: int) -> None:
    wrong = ((lengths < shortest) | (lengths > width)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        length = int(lengths[row])
        why = (
            f"and {what} is {width} wide: pass the true lengths of the rows as they were tokenised"
            if length > width
            else f"and a row of {what} has at least {shortest}: leave out what is none"
        )
        raise invalid(
            f"row {row} of {len(lengths)} has length {length}, {why}",
            row=row,
            length=length,
            width=width,
        )


def _tensor(given: object, what: str) -> torch.Tensor:
    """Return an array as a tensor of its own: one that shares memory would warn of read-only."""
    try:
        return torch.tensor(given)
    except UNREADABLE as error:
        raise invalid(f"{what} cannot be read ({error}): give integers [rows, tokens]") from None


def _check_dtype(ids: torch.Tensor, what: str) -> None:
    if ids.dtype not in INTEGERS:
        raise invalid(
            f"{what} holds {_dtype_text(ids)}: token ids are integers", dtype=_dtype_text(ids)
        )


def _dtype_text(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def invalid(message: str, **facts: int | str) -> PayloadInvalidError:
    """Return the error for rows that cannot be taken."""
    return PayloadInvalidError(message, facts=facts)
