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
    from collections.abc import Callable, Sequence

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
    rows, positions = range(first, first + row_count), range(start, stop)
    columns, size_bytes, segments = _cut(payload, rows, positions)
    cut = replace(
        payload,
        first_row=first_row,
        row_count=row_count,
        position_count=stop - start,
        columns=columns,
        size_bytes=size_bytes,
        bad_row_count=min(payload.bad_row_count, row_count),
    )
    return Cut(payload=cut, segments=segments)


def part_segments(
    payload: Payload, *, rows: range, positions: range
) -> tuple[int, tuple[Segment, ...]]:
    """Return the size of some rows as a payload of their own, and where each run of it belongs.

    The way back from a cut: sources count from the start of ``payload``, and are where the bytes
    of the part go. ``rows`` and ``positions`` are places in it.

    Raises:
        PayloadInvalidError: the payload has no such rows or positions.
    """
    inside = rows.stop <= payload.row_count and positions.stop <= payload.position_count
    if not inside or rows.start < 0 or positions.start < 0 or not rows:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has {payload.row_count} rows with "
            f"{payload.position_count} positions, and no rows {rows} with positions {positions}",
            facts={"row_count": payload.row_count, "position_count": payload.position_count},
        )
    _, size_bytes, segments = _cut(payload, rows, positions)
    return size_bytes, segments


def join_parts(
    payload: Payload,
    parts: Sequence[tuple[range, range, memoryview]],
    room: memoryview,
    *,
    copy: Callable[[memoryview, memoryview], None],
) -> None:
    """Write a payload's bytes into its room, from parts that hold some rows each.

    Args:
        parts: rows and positions by their places in the payload, in order, and their bytes as a
            payload of their own.
        copy: copies bytes from the first to the second, which is as long.

    Raises:
        PayloadInvalidError: they do not tile the payload, or have other sizes.
    """
    at_row, at_position, end = 0, 0, 0
    for column in payload.columns:
        room[end : column.offset_bytes] = bytes(column.offset_bytes - end)
        end = column.end_bytes
    room[end : payload.size_bytes] = bytes(payload.size_bytes - end)
    for rows, positions, data in parts:
        size_bytes, segments = part_segments(payload, rows=rows, positions=positions)
        if (rows.start, positions.start) != (at_row, at_position) or data.nbytes != size_bytes:
            raise _not_tiled(payload, rows, data.nbytes)
        at_row, at_position = rows.stop, positions.stop
        for run in segments:
            source, target, count = run.offset_bytes, run.source_offset_bytes, run.size_bytes
            copy(data[source : source + count], room[target : target + count])
    if (at_row, at_position) != (payload.row_count, payload.position_count):
        raise _not_tiled(payload, range(at_row, payload.row_count), 0)


def _not_tiled(payload: Payload, rows: range, size_bytes: int) -> PayloadInvalidError:
    return PayloadInvalidError(
        f"the parts of payload {payload.payload_id} are not its {payload.row_count} rows: at rows "
        f"{rows.start} to {rows.stop} there are {size_bytes} bytes",
        facts={"row_count": payload.row_count, "first_row": rows.start, "size_bytes": size_bytes},
    )


def _cut(
    payload: Payload, rows: range, positions: range
) -> tuple[tuple[Column, ...], int, tuple[Segment, ...]]:
    """Return columns, size and bytes of some rows, by their places in a payload."""
    #: (first, count) of the outermost axis, by its letter.
    runs = {
        "P": (positions.start, len(positions)),
        "N": (rows.start, len(rows)),
        "N+1": (rows.start, len(rows) + 1),
    }
    columns, size_bytes = lay_out(
        (column.kind, column.element_type, (_run(column, runs)[1], *column.shape[1:]))
        for column in payload.columns
    )
    segments = tuple(
        _segment(source, target, runs)
        for source, target in zip(payload.columns, columns, strict=True)
        if target.size_bytes
    )
    return columns, size_bytes, segments


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
