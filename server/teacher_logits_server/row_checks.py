"""Row checks: whether the small columns of a payload say what was reserved.

Plain bytes, no tensors: a few reads and comparisons a seal, however many rows. The values of
the scores are the receiver's to check (``invariants``).
"""

from __future__ import annotations

import sys
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind, RowStatus, is_on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.payload import Payload

_END = 1 << 31
"""Where windows end at the latest."""

_KNOWN_STATUSES = bytes(RowStatus)
# A tuple: it is searched by identity first, and hashing a kind takes longer.
_CHECKED = (
    ColumnKind.ROW_OFFSETS,
    ColumnKind.ROW_WINDOWS,
    ColumnKind.ROW_STATUS,
    ColumnKind.ROW_RUNS,
)


def check_rows(
    payload: Payload,
    row_positions: Sequence[int],
    *,
    bad_row_count: int | None,
    read: Callable[[int, int], bytes],
) -> None:
    """Refuse a payload whose rows are not those that were reserved. Columns it lacks pass.

    Args:
        row_positions: positions of each row, by the reservation.
        bad_row_count: rows whose status is not OK, by the seal; None before that: statuses are
            not looked at yet.
        read: returns bytes of the payload, by (offset, size).

    Raises:
        PayloadInvalidError: naming the column, the first row, and both numbers.
    """

    for column in payload.columns:  # in their order, so that offsets come first
        kind = column.kind
        if kind not in _CHECKED:
            continue
        data = read(column.offset_bytes, column.size_bytes)
        if len(data) != column.size_bytes:
            raise _differs(payload, kind, "bytes in its room", len(data), column.size_bytes)
        if kind is ColumnKind.ROW_OFFSETS:
            offsets = array("q", accumulate(row_positions, initial=0))
            _compare(payload, kind, data, offsets)
        elif kind is ColumnKind.ROW_WINDOWS:
            numbers = _numbers("i", data)
            _compare(payload, kind, _bytes(numbers[1::2]), array("i", row_positions))
            _check_firsts(payload, numbers[0::2], row_positions)
        elif kind is ColumnKind.ROW_RUNS:
            _check_runs(payload, _numbers("i", data), column.shape[1], row_positions)
        elif bad_row_count is not None:
            _check_status(payload, data, bad_row_count)


def check_filled(payload: Payload, *, host_copy: bool, hole: Callable[[int, int], int]) -> None:
    """Refuse a payload in the host twin of device memory where columns lack memory there.

    Args:
        host_copy: whether those are there that lie on the device too.
        hole: returns the first byte of a run that is no memory, its end for none, by (start, end).

    Raises:
        PayloadInvalidError: naming the column, and where it ends.
    """
    for column in payload.columns:
        if not column.size_bytes or (is_on_device(column.kind) and not host_copy):
            continue
        found = hole(column.offset_bytes, column.end_bytes)
        if found < column.end_bytes:
            raise _differs(
                payload,
                column.kind,
                "bytes in the twin",
                found - column.offset_bytes,
                column.size_bytes,
            )


def count_bad_rows(payload: Payload, read: Callable[[int, int], bytes]) -> int:
    """Return how many rows are not OK, by their statuses; ``read`` as for ``check_rows``."""
    column = payload.column(ColumnKind.ROW_STATUS)
    statuses = read(column.offset_bytes, column.size_bytes)
    return len(statuses) - statuses.count(RowStatus.OK)


def _compare(payload: Payload, kind: ColumnKind, data: bytes, expected: array[int]) -> None:
    if data == _bytes(expected):
        return
    has = _numbers(expected.typecode, data)
    row = next(row for row, (a, b) in enumerate(zip(has, expected, strict=True)) if a != b)
    raise _differs(payload, kind, f"row {row}", has[row], expected[row])


def _check_firsts(payload: Payload, firsts: Sequence[int], counts: Sequence[int]) -> None:
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        if not 0 <= first <= _END - count:
            raise PayloadInvalidError(
                f"{ColumnKind.ROW_WINDOWS.value} of payload {payload.payload_id} has row {row} "
                f"begin at position {first}, with {count} positions; a window lies within 0 to "
                f"{_END}",
                facts={"column": ColumnKind.ROW_WINDOWS.value, "row": row, "first": first},
            )


def _check_runs(
    payload: Payload, numbers: array[int], width: int, row_positions: Sequence[int]
) -> None:
    for row, count in enumerate(row_positions):
        own = numbers[row * width : (row + 1) * width]
        if min(own) < 0:
            raise _differs(payload, ColumnKind.ROW_RUNS, f"row {row}", min(own), 0)
        if sum(own[1::2]) != count:
            raise _differs(payload, ColumnKind.ROW_RUNS, f"row {row}", sum(own[1::2]), count)


def _check_status(payload: Payload, data: bytes, bad_row_count: int) -> None:
    unknown = data.translate(None, _KNOWN_STATUSES)
    if unknown:
        row = data.index(unknown[:1])
        raise PayloadInvalidError(
            f"{ColumnKind.ROW_STATUS.value} of payload {payload.payload_id} has {unknown[0]} for "
            f"row {row}; the statuses are 0 to {max(RowStatus)}",
            facts={"column": ColumnKind.ROW_STATUS.value, "row": row, "status": unknown[0]},
        )
    bad = len(data) - data.count(RowStatus.OK)
    if bad != bad_row_count:
        raise _differs(payload, ColumnKind.ROW_STATUS, "the count of bad rows", bad, bad_row_count)


def _differs(
    payload: Payload, kind: ColumnKind, what: str, has: int, should: int
) -> PayloadInvalidError:
    return PayloadInvalidError(
        f"{kind.value} of payload {payload.payload_id} has {has} for {what}, and {should} was "
        "announced: write the columns before the seal, as they were reserved",
        facts={"column": kind.value, "what": what, "has": has, "should": should},
    )


def _numbers(typecode: str, data: bytes) -> array[int]:
    numbers = array(typecode)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers.tobytes()
