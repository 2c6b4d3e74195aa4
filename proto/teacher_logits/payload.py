"""Payloads: what one teacher says about a run of rows, and the invariants of its description.

``check_payload`` is what a receiver runs on every description before it touches a byte:
kinds known and single, shapes that agree, columns inside the payload and apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ALIGNMENT_BYTES, COLUMN_RULES, Column, ColumnKind
from teacher_logits.selection_rules import TOP_K, ClientIds, Sampled

if TYPE_CHECKING:
    from teacher_logits.keys import PayloadKey
    from teacher_logits.selection_rules import SelectionRule
    from teacher_logits.shard_parts import ShardPart

MAX_TEMPERATURES = 5
MAX_SIZE_BYTES = 1 << 46


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Description of one payload. Immutable once sealed.

    ``temperatures`` names the columns of ``log_tail`` and ``logsumexp``, temperature 1
    first. ``vocabulary_size`` counts the vocabulary columns that took part. ``whole_rows``:
    every row has all its positions, so that no token comes after a row's last. ``selection``
    says what its entries are, and ``top_k`` how many a position. ``part`` says which part of its
    rows it holds, where several ranks of a teacher divide them (``shard_parts``).
    """

    payload_id: str
    teacher_id: str
    teacher_revision: str
    first_row: int
    row_count: int
    position_count: int
    top_k: int
    temperatures: tuple[float, ...]
    vocabulary_size: int
    columns: tuple[Column, ...]
    size_bytes: int
    bad_row_count: int = 0
    whole_rows: bool = False
    key: PayloadKey | None = None
    selection: SelectionRule = TOP_K
    part: ShardPart | None = None

    def column(self, kind: ColumnKind) -> Column:
        """Return the column of a kind.

        Raises:
            PayloadInvalidError: the payload has none, with those it has.
        """
        for column in self.columns:
            if column.kind is kind:
                return column
        has = ", ".join(c.kind.value for c in self.columns)
        raise PayloadInvalidError(
            f"payload {self.payload_id} has no column {kind.value}; it has {has}",
            facts={"column": kind.value, "columns": has},
        )


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A run of bytes in a slab; ``generation`` is what its slot holds while it may be read."""

    slab_id: str
    offset_bytes: int
    size_bytes: int
    slot: int
    generation: int


def check_payload(payload: Payload) -> Payload:
    """Return ``payload`` if its description holds together.

    Raises:
        PayloadInvalidError: naming the column, its numbers and what they should be.
    """
    if not 0 < payload.size_bytes <= MAX_SIZE_BYTES:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} claims {payload.size_bytes} bytes",
            facts={"size_bytes": payload.size_bytes},
        )
    _check_counts(payload)
    if not 1 <= len(payload.temperatures) <= MAX_TEMPERATURES or payload.temperatures[0] != 1.0:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has temperatures {payload.temperatures}; the first is "
            f"1.0 and there are at most {MAX_TEMPERATURES}",
            facts={"temperature_count": len(payload.temperatures)},
        )
    sizes = {
        "P": payload.position_count,
        "N": payload.row_count,
        "N+1": payload.row_count + 1,
        "K": payload.top_k,
        "T": len(payload.temperatures),
    }
    _check_entries(payload)
    _check_part(payload)
    if isinstance(payload.selection, Sampled | ClientIds):
        sizes["M"] = payload.top_k
    end = 0
    seen: set[ColumnKind] = set()
    for column in payload.columns:
        if column.kind in seen:
            raise _bad(payload, column, "is there twice")
        seen.add(column.kind)
        _check_column(payload, column, end, sizes)
        end = column.end_bytes
    if end > payload.size_bytes:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has columns up to byte {end}, and {payload.size_bytes} "
            "bytes in all",
            facts={"end_bytes": end, "size_bytes": payload.size_bytes},
        )
    return payload


def _check_entries(payload: Payload) -> None:
    """Refuse entries of another kind than the selection says: a loss goes by its word.

    The K best may have others beside them, which are then not what targets are made of.
    """
    rule, kinds = payload.selection, {column.kind for column in payload.columns}
    best, others = ColumnKind.TOPK_IDS, {ColumnKind.SAMPLED_IDS, ColumnKind.SCORED_IDS}
    own = {Sampled: ColumnKind.SAMPLED_IDS, ClientIds: ColumnKind.SCORED_IDS}.get(type(rule))
    there = kinds & {best, *others}
    if there == {own} or (own is None and (best in there or not there)):
        return
    names = ", ".join(sorted(kind.value for kind in there)) or "none"
    raise PayloadInvalidError(
        f"payload {payload.payload_id} says that its entries are {rule.name}, and has the ids "
        f"{names}",
        facts={"selection": rule.name, "columns": names},
    )


def _check_part(payload: Payload) -> None:
    """Refuse a part that is none, or whose positions nothing says."""
    part = payload.part
    runs = [c.shape for c in payload.columns if c.kind is ColumnKind.ROW_RUNS]
    has_runs = bool(runs) and len(runs[0]) == 2 and runs[0][1] >= 2 and runs[0][1] % 2 == 0
    if part is None and not runs:
        return
    if (
        part is not None
        and 0 <= part.sequence_part < part.sequence_parts
        and 0 <= part.first_id < part.stop_id <= payload.vocabulary_size
        and has_runs == (part.sequence_parts > 1)
        and len(runs) == has_runs
    ):
        return
    text = "none" if part is None else part.text
    raise PayloadInvalidError(
        f"payload {payload.payload_id} is a part that cannot be: {text}, of a vocabulary of "
        f"{payload.vocabulary_size}, with row_runs {runs[0] if runs else 'none'}; a part of the "
        "sequence has two numbers a run of each row",
        facts={"part": text, "vocabulary_size": payload.vocabulary_size},
    )


def _check_counts(payload: Payload) -> None:
    counts = {
        "first_row": payload.first_row,
        "row_count": payload.row_count,
        "position_count": payload.position_count,
        "top_k": payload.top_k,
        "vocabulary_size": payload.vocabulary_size,
        "bad_row_count": payload.bad_row_count,
    }
    negative = {name: count for name, count in counts.items() if count < 0}
    if negative or payload.bad_row_count > payload.row_count:
        named = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has counts that cannot be: {named}", facts=counts
        )


def _check_column(
    payload: Payload, column: Column, previous_end: int, sizes: dict[str, int]
) -> None:
    types, axes = COLUMN_RULES[column.kind]
    if column.element_type not in types:
        allowed = ", ".join(sorted(t.value for t in types))
        raise _bad(payload, column, f"is {column.element_type.value}, and may be {allowed}")
    expected = tuple(axis if isinstance(axis, int) else sizes.get(axis) for axis in axes)
    if len(column.shape) != len(expected) or any(
        size < 0 or (want is not None and size != want)
        for size, want in zip(column.shape, expected, strict=False)
    ):
        raise _bad(payload, column, f"has shape {column.shape}, and should have {expected}")
    if column.offset_bytes % ALIGNMENT_BYTES or column.offset_bytes < previous_end:
        raise _bad(
            payload,
            column,
            f"starts at byte {column.offset_bytes}, which is not a multiple of {ALIGNMENT_BYTES} "
            f"at or behind {previous_end}",
        )


def _bad(payload: Payload, column: Column, what: str) -> PayloadInvalidError:
    return PayloadInvalidError(
        f"column {column.kind.value} of payload {payload.payload_id} {what}",
        facts={
            "column": column.kind.value,
            "offset_bytes": column.offset_bytes,
            "size_bytes": column.size_bytes,
        },
    )
