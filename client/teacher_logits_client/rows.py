"""Rows to score: what a caller hands in, checked and made flat.

Rows come as a rectangle [N,S] with the true length of each row, or as a list of rows. They
leave as int32 on the CPU, one behind the other, without padding, with a digest of each. What
the server would refuse is refused here, before anything is sent: a length beyond the width, an
empty batch or row, an id that is no whole number, or none of the teacher's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from teacher_logits.digest import DIGEST_BYTES, row_digest
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.tensors import to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

Rows: TypeAlias = "torch.Tensor | Sequence[torch.Tensor | Sequence[int]]"
Numbers: TypeAlias = "torch.Tensor | Sequence[int]"

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


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


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBatch:
    """What one request asks to be scored.

    ``windows`` int64 [N,2] are the first position and the count wanted of each row;
    ``ids_bytes`` and ``prefix_bytes`` are the ids as they travel (int32, little-endian), and
    ``digests`` the digests of the rows, 16 bytes each, prefixes not included.
    """

    rows: FlatRows
    prefix: FlatRows | None
    windows: torch.Tensor
    has_windows: bool
    ids_bytes: bytes
    prefix_bytes: bytes
    digests: bytes

    @property
    def position_count(self) -> int:
        """Positions that are wanted."""
        return int(self.windows[:, 1].sum())

    @property
    def token_count(self) -> int:
        """Tokens to run the teacher over, prefixes included."""
        return self.rows.token_count + (self.prefix.token_count if self.prefix else 0)


def make_row_batch(
    input_ids: Rows,
    lengths: Numbers | None = None,
    *,
    prefix_ids: Rows | None = None,
    prefix_lengths: Numbers | None = None,
    windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
    vocabulary_size: int,
    prefix_vocabulary_size: int,
) -> RowBatch:
    """Check a request's rows and make them flat.

    Args:
        input_ids: integers [N,S], or a list of N rows (1-D tensors or lists of ints).
        lengths: true tokens of each row of a rectangle; all S where not given.
        prefix_ids, prefix_lengths: the same for tokens that only the teacher sees, in front
            of each row; a row's prefix may be empty.
        windows: [N,2], first position and count wanted of each row; all where not given.
        vocabulary_size, prefix_vocabulary_size: ids are below this; the prefix is the
            teacher's own text, and may use all of its vocabulary.

    Raises:
        PayloadInvalidError: naming the row, the place and the numbers.
    """
    rows = _flatten(input_ids, lengths, what="input_ids", shortest=1)
    rows = _as_int32(rows, vocabulary_size, what="input_ids")
    prefix = None
    if prefix_ids is not None:
        prefix = _flatten(prefix_ids, prefix_lengths, what="prefix_ids", shortest=0)
        prefix = _as_int32(prefix, prefix_vocabulary_size, what="prefix_ids")
        if prefix.row_count != rows.row_count:
            raise _invalid(
                f"prefix_ids has {prefix.row_count} rows and input_ids {rows.row_count}: give "
                "every row a prefix, empty where it has none",
                prefix_rows=prefix.row_count,
                rows=rows.row_count,
            )
    elif prefix_lengths is not None:
        raise _invalid("prefix_lengths came without prefix_ids")
    ids_bytes = to_bytes(rows.ids)
    return RowBatch(
        rows=rows,
        prefix=prefix,
        windows=_windows(windows, rows),
        has_windows=windows is not None,
        ids_bytes=ids_bytes,
        prefix_bytes=to_bytes(prefix.ids) if prefix else b"",
        digests=_digests(ids_bytes, rows.lengths.tolist()),
    )


def _flatten(given: Rows, lengths: Numbers | None, *, what: str, shortest: int) -> FlatRows:
    if not isinstance(given, torch.Tensor):
        _check_listed(given, what)
        if lengths is not None:
            raise _invalid(f"{what} is a list of rows, which have their lengths: give none beside")
        return _flatten_list([_row(row, what, at) for at, row in enumerate(given)], what, shortest)
    if given.dim() != 2:
        raise _invalid(
            f"{what} has shape {tuple(given.shape)}: give [rows, tokens], or a list of rows",
            axes=given.dim(),
        )
    _check_dtype(given, what)
    count, width = given.shape
    if not count:
        raise _invalid(f"{what} has no rows", rows=0)
    exact = _lengths(lengths, count, width, what=what, shortest=shortest)
    ids = given.detach().to("cpu", torch.int64)
    inside = torch.arange(width) < exact.unsqueeze(1)
    return FlatRows(ids=ids[inside], lengths=exact)


def _check_listed(given: object, what: str) -> None:
    if isinstance(given, Iterable) and not isinstance(given, Mapping | str | bytes):
        return
    way = "a tensor [rows, tokens] of token ids, or a list of rows"
    if isinstance(given, Mapping):
        way = "batch['input_ids'], and as lengths batch['attention_mask'].sum(1), padded right"
    raise _invalid(f"{what} is a {type(given).__name__}: give {way}")


def _flatten_list(rows: list[torch.Tensor], what: str, shortest: int) -> FlatRows:
    if not rows:
        raise _invalid(f"{what} has no rows", rows=0)
    lengths = torch.tensor([len(row) for row in rows])
    _check_lengths(lengths, int(lengths.max()), what=what, shortest=shortest)
    return FlatRows(ids=torch.cat(rows), lengths=lengths)


def _row(row: torch.Tensor | Sequence[int], what: str, at: int) -> torch.Tensor:
    if not isinstance(row, torch.Tensor):
        try:
            row = torch.tensor(row) if len(row) else torch.empty(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise _invalid(f"row {at} of {what} is no list of token ids: {error}", row=at) from None
    if row.dim() != 1:
        raise _invalid(
            f"row {at} of {what} has shape {tuple(row.shape)}: give one axis of tokens a row",
            row=at,
            axes=row.dim(),
        )
    _check_dtype(row, f"row {at} of {what}")
    return row.detach().to("cpu", torch.int64)


def _lengths(
    lengths: Numbers | None, count: int, width: int, *, what: str, shortest: int
) -> torch.Tensor:
    exact = torch.full((count,), width) if lengths is None else _given_lengths(lengths, what)
    if len(exact) != count:
        raise _invalid(
            f"{what} has {count} rows and {len(exact)} lengths", rows=count, lengths=len(exact)
        )
    _check_lengths(exact, width, what=what, shortest=shortest)
    return exact


def _given_lengths(lengths: Numbers, what: str) -> torch.Tensor:
    name = "lengths" if what == "input_ids" else what.replace("ids", "lengths")
    meaning = "the true tokens of each row, integers [rows]"
    try:
        exact = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _invalid(f"{name} cannot be read ({error}): give {meaning}") from None
    if exact.dim() != 1:
        way = "; of a mask of right-padded rows, attention_mask.sum(1)" if exact.dim() == 2 else ""
        raise _invalid(f"{name} has shape {tuple(exact.shape)}: give {meaning}{way}")
    if exact.dtype not in _INTEGERS and len(exact):
        raise _invalid(f"{name} holds {_dtype_text(exact)}: give {meaning}")
    return exact.detach().to("cpu", torch.int64)


def _check_lengths(lengths: torch.Tensor, width: int, *, what: str, shortest: int) -> None:
    wrong = ((lengths < shortest) | (lengths > width)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        length = int(lengths[row])
        why = (
            f"and {what} is {width} wide: pass the true lengths of the rows as they were tokenised"
            if length > width
            else "and a row to be scored has at least 1: leave it out"
        )
        raise _invalid(
            f"row {row} of {len(lengths)} has length {length}, {why}",
            row=row,
            length=length,
            width=width,
        )


def _check_dtype(ids: torch.Tensor, what: str) -> None:
    if ids.dtype not in _INTEGERS:
        raise _invalid(
            f"{what} holds {_dtype_text(ids)}: token ids are integers", dtype=_dtype_text(ids)
        )


def _dtype_text(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_int32(rows: FlatRows, vocabulary_size: int, *, what: str) -> FlatRows:
    """Refuse ids outside the vocabulary (padding is gone by now), and narrow the rest."""
    wrong = ((rows.ids < 0) | (rows.ids >= vocabulary_size)).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        starts = rows.lengths.cumsum(0)
        row = int(torch.searchsorted(starts, at, right=True))
        place = at - (int(starts[row - 1]) if row else 0)
        raise _invalid(
            f"row {row}, position {place} of {what} is {int(rows.ids[at])}, and the teacher's "
            f"ids are 0 to {vocabulary_size - 1}: padding belongs behind a row's length, and an "
            "ignored label is no token id",
            row=row,
            position=place,
            token_id=int(rows.ids[at]),
            vocabulary_size=vocabulary_size,
        )
    return FlatRows(ids=rows.ids.to(torch.int32), lengths=rows.lengths)


def _windows(
    windows: torch.Tensor | Sequence[Sequence[int]] | None, rows: FlatRows
) -> torch.Tensor:
    if windows is None:
        return torch.stack([torch.zeros_like(rows.lengths), rows.lengths], 1)
    pairs = torch.as_tensor(windows)
    if pairs.dtype not in _INTEGERS or pairs.shape != (rows.row_count, 2):
        raise _invalid(
            f"windows has shape {tuple(pairs.shape)} of {pairs.dtype}: give integers "
            f"[{rows.row_count}, 2], the first position and the count wanted of each row",
            rows=rows.row_count,
        )
    pairs = pairs.detach().to("cpu", torch.int64)
    first, count = pairs[:, 0], pairs[:, 1]
    wrong = ((first < 0) | (count < 0) | (first + count > rows.lengths)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise _invalid(
            f"row {row} wants {int(count[row])} positions from {int(first[row])} on, and has "
            f"{int(rows.lengths[row])} tokens",
            row=row,
            first=int(first[row]),
            count=int(count[row]),
            length=int(rows.lengths[row]),
        )
    return pairs


def _digests(ids_bytes: bytes, lengths: list[int]) -> bytes:
    ids = memoryview(ids_bytes).cast("i") if ids_bytes else memoryview(b"")
    digests = bytearray(len(lengths) * DIGEST_BYTES)
    start = 0
    for at, length in enumerate(lengths):
        digest = row_digest(ids[start : start + length])
        digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] = digest
        start += length
    return bytes(digests)


def _invalid(message: str, **facts: int | str) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
