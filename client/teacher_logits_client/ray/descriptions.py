"""Descriptions: what is said of a payload beside its bytes, and what is checked of it.

A payload that goes past the driver is one run of bytes (``flat``) and this: a few hundred bytes
that the driver reads in its place. Its columns lie as those of any payload (``layout``), each
C-contiguous from a multiple of 256 bytes on:

    | topk_logits [N,S,K] ... | pad | topk_indices [N,S,K] ... | pad |

Pure. Promises that what a step expects is checked by driver and student alike, by one function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ALIGNMENT_BYTES, ElementType, round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LOGITS = "topk_logits"
INDICES = "topk_indices"

VALUE_TYPES = (ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16)
ID_TYPES = (ElementType.INT64, ElementType.INT32)


@dataclass(frozen=True, kw_only=True)
class FlatColumn:
    """One tensor of a payload, by the name that the trainer gives it."""

    name: str
    element_type: ElementType
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        """First byte behind the column."""
        return self.offset_bytes + math.prod(self.shape) * self.element_type.size_bytes


@dataclass(frozen=True, kw_only=True)
class RowTokens:
    """Each row's digest (``digest.row_digest``): of its first ``lengths`` tokens, or of all S."""

    digests: tuple[bytes, ...]
    lengths: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class PayloadDescription:
    """What is said of one payload.

    ``rows`` are global indices, in the payload's order. ``id_range`` is the least and the greatest
    id, and None where nobody has looked. ``tokens`` says of what tokens the rows are, and is None
    where the teacher was given none.
    """

    step: int
    data_parallel_rank: int
    rows: tuple[int, ...]
    columns: tuple[FlatColumn, ...]
    id_range: tuple[int, int] | None = None
    tokens: RowTokens | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """N rows, S positions each, K entries a position."""
        n, s, k = self.columns[0].shape
        return n, s, k

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole payload."""
        return round_up(max(1, *(each.end_bytes for each in self.columns)), ALIGNMENT_BYTES)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one rank expects of a payload; what is None is not checked."""

    step: int | None = None
    rows: tuple[int, ...] | None = None
    row_count: int | None = None
    sequence_length: int | None = None
    top_k: int | None = None
    vocabulary_size: int | None = None
    value_types: Sequence[ElementType] = VALUE_TYPES
    id_types: Sequence[ElementType] = ID_TYPES


def lay_out_columns(
    specs: Iterable[tuple[str, ElementType, Sequence[int]]],
) -> tuple[FlatColumn, ...]:
    """Place columns one after another."""
    columns: list[FlatColumn] = []
    end = 0
    for name, element_type, shape in specs:
        column = FlatColumn(
            name=name,
            element_type=element_type,
            shape=tuple(shape),
            offset_bytes=round_up(end, ALIGNMENT_BYTES),
        )
        columns.append(column)
        end = column.end_bytes
    return tuple(columns)


def check_description(told: PayloadDescription, expected: Expected) -> None:
    """Let a payload pass that is what a rank expects.

    Raises:
        PayloadInvalidError: with what differs, both numbers, and the rank that made it.
    """
    who = f"the payload of teacher rank {told.data_parallel_rank}"
    by_name = {each.name: each for each in told.columns}
    if sorted(by_name) != sorted((LOGITS, INDICES)):
        raise _invalid(f"{who} has {sorted(by_name)}", "columns", sorted(by_name))
    logits, ids = by_name[LOGITS], by_name[INDICES]
    if len(logits.shape) != 3 or logits.shape != ids.shape:
        raise _invalid(
            f"{who} has {LOGITS} of shape {logits.shape} and {INDICES} of {ids.shape}: give both "
            "as [N,S,K]",
            "shapes",
            [logits.shape, ids.shape],
        )
    for column, types in ((logits, expected.value_types), (ids, expected.id_types)):
        if column.element_type not in types:
            wanted = [each.value for each in types]
            message = f"{who} has {column.name} of {column.element_type.value}, not of {wanted}"
            raise _invalid(message, column.name, column.element_type.value)
    rows, sequence_length, top_k = told.shape
    _check_equal(who, "steps", told.step, expected.step)
    _check_equal(who, "rows", len(told.rows), rows)
    _check_equal(who, "rows", rows, expected.row_count)
    _check_equal(who, "positions a row", sequence_length, expected.sequence_length)
    _check_equal(who, "entries a position", top_k, expected.top_k)
    _check_rows(who, told.rows, expected.rows)
    _check_ids(who, told.id_range, expected.vocabulary_size)


def _check_equal(who: str, what: str, has: int, wanted: int | None) -> None:
    if wanted is None or has == wanted:
        return
    if what == "steps":
        raise PayloadInvalidError(
            f"{who} is of step {has} and step {wanted} is trained",
            facts={"has_step": has, "wanted_step": wanted},
        )
    raise PayloadInvalidError(
        f"{who} has {has} {what}, and {wanted} are expected",
        facts={"what": what, "has": has, "wanted": wanted},
    )


def _check_rows(who: str, has: tuple[int, ...], wanted: tuple[int, ...] | None) -> None:
    if wanted is None or has == wanted:
        return
    place = next((at for at, (a, b) in enumerate(zip(has, wanted, strict=False)) if a != b), -1)
    if place < 0:
        raise _invalid(f"{who} has {len(has)} rows of {len(wanted)}", "rows", len(has))
    raise PayloadInvalidError(
        f"{who} has row {has[place]} of the batch at place {place}, where row {wanted[place]} is "
        "expected: it was made of rows in another order",
        facts={"place": place, "has_row": has[place], "wanted_row": wanted[place]},
    )


def _check_ids(who: str, id_range: tuple[int, int] | None, vocabulary_size: int | None) -> None:
    if id_range is None or vocabulary_size is None:
        return
    least, most = id_range
    if least < 0 or most >= vocabulary_size:
        raise PayloadInvalidError(
            f"{who} has ids from {least} to {most}, and the vocabulary {vocabulary_size}: they "
            "reach beyond it",
            facts={"least_id": least, "greatest_id": most, "vocabulary_size": vocabulary_size},
        )


def _invalid(message: str, name: str, has: object) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts={name: str(has)})
