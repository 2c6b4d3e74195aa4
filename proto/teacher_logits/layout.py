"""Columns and where they lie: the one place that knows a payload's memory layout.

A payload is one run of bytes. Its columns lie in it one after another, each C-contiguous
and each starting at a multiple of 256 bytes:

    | column 0 ......... | pad | column 1 ... | pad | ... | column n |
    0                    256·a                                       size_bytes

P positions lie flat over the rows (jagged): row ``i`` owns positions
``row_offsets[i]:row_offsets[i+1]``.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALIGNMENT_BYTES = 256


class ElementType(enum.Enum):
    """Element types that every transport carries bit-exactly."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _SIZES[self]


_SIZES = {
    ElementType.BFLOAT16: 2,
    ElementType.FLOAT16: 2,
    ElementType.FLOAT32: 4,
    ElementType.INT32: 4,
    ElementType.INT64: 8,
    ElementType.UINT8: 1,
}


class ColumnKind(enum.Enum):
    """What a column means. Axes: P positions, N rows, K or M entries, T temperatures, V ids.

    R: two numbers a run, its first position and their count.
    """

    TOPK_IDS = "topk_ids"
    TOPK_LOGPROBS = "topk_logprobs"
    TOPK_LOGITS = "topk_logits"
    LOG_TAIL = "log_tail"
    LOGSUMEXP = "logsumexp"
    ACTUAL_LOGPROB = "actual_logprob"
    ROW_OFFSETS = "row_offsets"
    ROW_WINDOWS = "row_windows"
    ROW_DIGESTS = "row_digests"
    ROW_STATUS = "row_status"
    LOGITS = "logits"
    HIDDEN_STATES = "hidden_states"
    SAMPLED_IDS = "sampled_ids"
    SAMPLED_WEIGHTS = "sampled_weights"
    SCORED_IDS = "scored_ids"
    SCORED_LOGPROBS = "scored_logprobs"
    ENTROPY = "entropy"
    ROW_RUNS = "row_runs"

    # Each is there once; the hash of their names is asked of Python, for every look into a table.
    __hash__ = object.__hash__


_ROW_KINDS = (
    ColumnKind.ACTUAL_LOGPROB,
    ColumnKind.ROW_OFFSETS,
    ColumnKind.ROW_WINDOWS,
    ColumnKind.ROW_DIGESTS,
    ColumnKind.ROW_STATUS,
)
SAMPLED_COLUMNS = (
    ColumnKind.SAMPLED_IDS,
    ColumnKind.SAMPLED_WEIGHTS,
    ColumnKind.ENTROPY,
    *_ROW_KINDS,
)
"""What an engine's payloads have in a session of sampled targets."""
SCORED_ID_COLUMNS = (
    ColumnKind.SCORED_IDS,
    ColumnKind.SCORED_LOGPROBS,
    ColumnKind.LOG_TAIL,
    ColumnKind.LOGSUMEXP,
    *_ROW_KINDS,
)
"""What payloads of client-chosen ids have."""

VALUE_TYPES = (ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32)
"""What log-probabilities may be."""

_VALUES = frozenset(VALUE_TYPES)
_F32 = frozenset({ElementType.FLOAT32})
_I32 = frozenset({ElementType.INT32})
_U8 = frozenset({ElementType.UINT8})

# Kind -> (element types it may have, its axes). A letter is an axis, a number is fixed.
COLUMN_RULES: dict[ColumnKind, tuple[frozenset[ElementType], tuple[str | int, ...]]] = {
    ColumnKind.TOPK_IDS: (_I32, ("P", "K")),
    ColumnKind.TOPK_LOGPROBS: (_VALUES, ("P", "K")),
    ColumnKind.TOPK_LOGITS: (frozenset({ElementType.BFLOAT16, ElementType.FLOAT32}), ("P", "K")),
    ColumnKind.LOG_TAIL: (_F32, ("P", "T")),
    ColumnKind.LOGSUMEXP: (_F32, ("P", "T")),
    ColumnKind.ACTUAL_LOGPROB: (_F32, ("P",)),
    ColumnKind.ROW_OFFSETS: (frozenset({ElementType.INT64}), ("N+1",)),
    ColumnKind.ROW_WINDOWS: (_I32, ("N", 2)),
    ColumnKind.ROW_DIGESTS: (_U8, ("N", 16)),
    ColumnKind.ROW_STATUS: (_U8, ("N",)),
    ColumnKind.LOGITS: (_VALUES, ("P", "V")),
    ColumnKind.HIDDEN_STATES: (_VALUES, ("P", "H")),
    ColumnKind.SAMPLED_IDS: (_I32, ("P", "M")),
    ColumnKind.SAMPLED_WEIGHTS: (_F32, ("P", "M")),
    ColumnKind.SCORED_IDS: (_I32, ("P", "M")),
    ColumnKind.SCORED_LOGPROBS: (_F32, ("P", "M")),
    ColumnKind.ENTROPY: (_F32, ("P",)),
    ColumnKind.ROW_RUNS: (_I32, ("N", "R")),
}


def is_on_device(kind: ColumnKind) -> bool:
    """Say whether a column lies on the device in a slab of device memory.

    Columns over positions do; those over rows stay on the host, where they are checked
    (``device_slab``).
    """
    return COLUMN_RULES[kind][1][0] == "P"


class RowStatus(enum.IntEnum):
    """What ``row_status`` says of a row; NaN wins over the others."""

    OK = 0
    NAN = 1
    POSITIVE_INFINITY = 2
    EMPTY_SUPPORT = 3


@dataclass(frozen=True, kw_only=True)
class Column:
    """One dense column; ``offset_bytes`` counts from the start of the payload."""

    kind: ColumnKind
    element_type: ElementType
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the column, padding left out."""
        return math.prod(self.shape) * self.element_type.size_bytes

    @property
    def end_bytes(self) -> int:
        """First byte behind the column."""
        return self.offset_bytes + self.size_bytes


def round_up(size_bytes: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size_bytes``."""
    return -(-size_bytes // multiple) * multiple


def lay_out(
    specs: Iterable[tuple[ColumnKind, ElementType, Sequence[int]]],
) -> tuple[tuple[Column, ...], int]:
    """Place columns one after another; return them and the payload's size in bytes."""
    columns: list[Column] = []
    end = 0
    for kind, element_type, shape in specs:
        offset = round_up(end, ALIGNMENT_BYTES)
        column = Column(
            kind=kind, element_type=element_type, shape=tuple(shape), offset_bytes=offset
        )
        columns.append(column)
        end = column.end_bytes
    return tuple(columns), round_up(max(end, 1), ALIGNMENT_BYTES)


def logit_type(value_type: ElementType) -> ElementType:
    """Return the type of ``topk_logits`` beside values of a type: raw logits overflow fp16."""
    is_brain_float = value_type is ElementType.BFLOAT16
    return ElementType.BFLOAT16 if is_brain_float else ElementType.FLOAT32


def top_k_columns(
    *,
    row_count: int,
    position_count: int,
    top_k: int,
    temperature_count: int,
    value_type: ElementType,
    with_logits: bool = False,
) -> tuple[tuple[Column, ...], int]:
    """Place the columns of a scored payload; return them and the payload's size in bytes.

    ``with_logits`` puts ``topk_logits`` behind the log-probabilities.
    """
    if value_type not in _VALUES:
        raise PayloadInvalidError(
            f"log-probabilities cannot be {value_type.value}: use float16, bfloat16 or float32",
            facts={"value_type": value_type.value},
        )
    p, k, t = position_count, top_k, temperature_count
    logits = [(ColumnKind.TOPK_LOGITS, logit_type(value_type), (p, k))] if with_logits else []
    return lay_out(
        [
            (ColumnKind.TOPK_IDS, ElementType.INT32, (p, k)),
            (ColumnKind.TOPK_LOGPROBS, value_type, (p, k)),
            *logits,
            (ColumnKind.LOG_TAIL, ElementType.FLOAT32, (p, t)),
            (ColumnKind.LOGSUMEXP, ElementType.FLOAT32, (p, t)),
            *_of_rows(row_count, position_count),
        ]
    )


def sampled_columns(
    *, row_count: int, position_count: int, entry_count: int
) -> tuple[tuple[Column, ...], int]:
    """Place the columns of a payload of sampled targets; return them and its size in bytes."""
    entries = (position_count, entry_count)
    return lay_out(
        [
            (ColumnKind.SAMPLED_IDS, ElementType.INT32, entries),
            (ColumnKind.SAMPLED_WEIGHTS, ElementType.FLOAT32, entries),
            (ColumnKind.ENTROPY, ElementType.FLOAT32, (position_count,)),
            *_of_rows(row_count, position_count),
        ]
    )


def scored_id_columns(
    *, row_count: int, position_count: int, entry_count: int, temperature_count: int
) -> tuple[tuple[Column, ...], int]:
    """Place the columns of a payload of client-chosen ids; return them and its size in bytes."""
    entries, beside = (position_count, entry_count), (position_count, temperature_count)
    return lay_out(
        [
            (ColumnKind.SCORED_IDS, ElementType.INT32, entries),
            (ColumnKind.SCORED_LOGPROBS, ElementType.FLOAT32, entries),
            (ColumnKind.LOG_TAIL, ElementType.FLOAT32, beside),
            (ColumnKind.LOGSUMEXP, ElementType.FLOAT32, beside),
            *_of_rows(row_count, position_count),
        ]
    )


def _of_rows(n: int, p: int) -> list[tuple[ColumnKind, ElementType, tuple[int, ...]]]:
    """Return the columns that stand in every scored payload: the next token's, and the rows'."""
    return [
        (ColumnKind.ACTUAL_LOGPROB, ElementType.FLOAT32, (p,)),
        (ColumnKind.ROW_OFFSETS, ElementType.INT64, (n + 1,)),
        (ColumnKind.ROW_WINDOWS, ElementType.INT32, (n, 2)),
        (ColumnKind.ROW_DIGESTS, ElementType.UINT8, (n, 16)),
        (ColumnKind.ROW_STATUS, ElementType.UINT8, (n,)),
    ]
