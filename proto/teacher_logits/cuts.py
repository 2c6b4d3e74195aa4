"""Cuts: some rows of a payload as a payload of their own.

A student rank reads its own rows of a shard. Where memory is shared it views them; where
bytes travel, only theirs do: every column is row-major, so that a run of rows is one run of
bytes in each.

    payload   | ids ....[rows]... | logprobs ....[rows]... | ... | row_status .[rows]. |
    cut       | ids [rows] | logprobs [rows] | ... | row_status [rows] |

Both sides compute the same layout. ``row_offsets`` of a cut begin where they began in the
payload: a reader takes the first of them off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import COLUMN_RULES, Column, lay_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.payload import Payload


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of bytes of the payload, and where it stands in the cut."""

    source_offset_bytes: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Rows of a payload: what describes them, and the bytes that they are, in order.

    Bytes of the cut that no segment covers are padding, and zero.
    """

    payload: Payload
    segments: tuple[Segment, ...]


def cut_rows(
    payload: Payload, row_positions: Sequence[int], *, first_row: int, row_count: int
) -> Cut:
    """Cut ``row_count`` rows out of a payload, from global row ``first_row`` on.

    ``row_positions`` [N] counts the positions of each row of the payload. How many of the cut
    rows are bad is not known here: ``bad_row_count`` is that of the payload, at most their
    number.

    Raises:
        PayloadInvalidError: the payload does not hold these rows, or other positions.
    """
    first = _check(payload, row_positions, first_row, row_count)
    offsets = [0, *accumulate(row_positions)]
    start, stop = offsets[first], offsets[first + row_count]
    #: (first, count) of the outermost axis, by its letter.
    runs = {"P": (start, stop - start), "N": (first, row_count), "N+1": (first, row_count + 1)}
    columns, size_bytes = lay_out(
        (column.kind, column.element_type, (_run(column, runs)[1], *column.shape[1:]))
        for column in payload.columns
    )
    cut = replace(
        payload,
        first_row=first_row,
        row_count=row_count,
        position_count=stop - start,
        columns=columns,
        size_bytes=size_bytes,
        bad_row_count=min(payload.bad_row_count, row_count),
    )
    segments = tuple(
        _segment(source, target, runs)
        for source, target in zip(payload.columns, columns, strict=True)
        if target.size_bytes
    )
    return Cut(payload=cut, segments=segments)


def _check(payload: Payload, row_positions: Sequence[int], first_row: int, row_count: int) -> int:
    """Refuse rows or positions that are not the payload's; return the first row's place in it."""
    if len(row_positions) != payload.row_count or sum(row_positions) != payload.position_count:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has {payload.row_count} rows with "
            f"{payload.position_count} positions, and its positions were counted as "
            f"{sum(row_positions)} in {len(row_positions)} rows",
            facts={"row_count": payload.row_count, "position_count": payload.position_count},
        )
    first = first_row - payload.first_row
    if row_count < 1 or first < 0 or first + row_count > payload.row_count:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} holds {payload.row_count} rows from row "
            f"{payload.first_row} on, and not {row_count} from row {first_row} on",
            facts={
                "first_row": first_row,
                "row_count": row_count,
                "payload_first_row": payload.first_row,
                "payload_row_count": payload.row_count,
            },
        )
    return first


def _segment(source: Column, target: Column, runs: dict[str, tuple[int, int]]) -> Segment:
    first, count = _run(source, runs)
    stride = target.size_bytes // count
    return Segment(
        source_offset_bytes=source.offset_bytes + first * stride,
        offset_bytes=target.offset_bytes,
        size_bytes=target.size_bytes,
    )


def _run(column: Column, runs: dict[str, tuple[int, int]]) -> tuple[int, int]:
    axis = COLUMN_RULES[column.kind][1][0]
    return runs[str(axis)]
