"""Columns of a run of rows, out of the payloads that hold them, and padding rows behind them.

    payloads   |  shard 0: rows 0..7  |  shard 1: rows 8..15  |
    parts                  |  6,7     |  8,9  |                 rows of one payload, each a view
    rows                   |  6,7     |  8,9  | pad |           one part: views; more: one copy

Promises: nothing is made before it is asked for, and nothing of the size of positions is
copied where the rows lie in one payload. Padding rows have no positions: only what has one
entry a row is longer by them.

Columns over rows are on the host. Those over positions are where the payload is, and those of
rows that span payloads on the device of the first of them that is on one: a copy on the device, but
for what has to come there from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.error_bounds import EXACT
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import (
    COLUMN_RULES,
    ColumnKind,
    ElementType,
    is_on_device,
    logit_type,
)
from teacher_logits.profiles import SCORED_COLUMNS
from teacher_logits.tensors import DTYPES
from teacher_logits_client.payloads.row_parts import RowPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits.error_bounds import ErrorBound
    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.payloads.columns import LeasedColumns


_HOST = torch.device("cpu")
#: The outermost axis of each kind.
_AXES = {kind: rules[1][0] for kind, rules in COLUMN_RULES.items()}


class Part(RowPart):
    """``row_count`` rows of one payload from its row ``first`` on, as views.

    ``row_offsets`` are counted anew from 0, which is a copy.
    """

    def __init__(
        self, payload: Payload, columns: LeasedColumns, *, first: int, row_count: int
    ) -> None:
        self.payload = payload
        self.first = first
        self.row_count = row_count
        self._columns = columns
        self._is_whole = row_count == payload.row_count
        self._runs: bytes | None = None
        self._start, self._stop = self._place()
        if not 0 <= self._start <= self._stop <= payload.position_count:
            raise PayloadInvalidError(
                f"payload {payload.payload_id} has {payload.position_count} positions, and its "
                f"row_offsets put rows {first} to {first + row_count - 1} at {self._start} to "
                f"{self._stop}",
                facts={
                    "positions": payload.position_count,
                    "start": self._start,
                    "stop": self._stop,
                },
            )

    def look_again(self) -> None:
        """Refuse rows that were looked at before their seal, and are elsewhere now.

        Raises:
            PayloadInvalidError: naming both places.
        """
        if self._runs is not None and self._runs != self._raw_runs():
            raise PayloadInvalidError(
                f"{self._run_kind.value} of payload {self.payload.payload_id} have changed between "
                "its announcement and its seal",
                facts={"payload_id": self.payload.payload_id},
            )
        if self._is_whole:
            return  # its place follows from no offset
        was, now = (self._start, self._stop), self._place()
        if was != now:
            raise PayloadInvalidError(
                f"row_offsets of payload {self.payload.payload_id} put rows {self.first} to "
                f"{self.first + self.row_count - 1} at {was} when it was announced, and at {now} "
                "when it was sealed",
                facts={"start": now[0], "stop": now[1]},
            )

    def runs(self) -> list[list[range]]:
        """Return the runs of positions of each row, in the order in which they lie there.

        Raises:
            PayloadInvalidError: they are not of as many positions as the row has.
        """
        kind = self._run_kind
        width = self.payload.column(kind).shape[1]
        self._runs = self._raw_runs()
        numbers = memoryview(self._runs).cast("i")
        offsets = self._columns.raw(ColumnKind.ROW_OFFSETS).cast("q")
        if self._is_whole and self._stop - self._start != self.payload.position_count:
            raise PayloadInvalidError(
                f"payload {self.payload.payload_id} has {self.payload.position_count} positions, "
                f"and its row_offsets speak of {self._stop - self._start}",
                facts={"positions": self.payload.position_count},
            )
        found = []
        for row in range(self.first, self.first + self.row_count):
            own = numbers[row * width : (row + 1) * width].tolist()
            count = offsets[row + 1] - offsets[row]
            if min(own) < 0 or sum(own[1::2]) != count:
                raise PayloadInvalidError(
                    f"row {self.payload.first_row + row} has {count} positions in payload "
                    f"{self.payload.payload_id}, and its {kind.value} are {own}",
                    facts={"row": self.payload.first_row + row, "positions": count},
                )
            runs = zip(own[::2], own[1::2], strict=True)
            found.append([range(start, start + length) for start, length in runs if length])
        return found

    @property
    def _run_kind(self) -> ColumnKind:
        """What says which positions of its rows it has."""
        part = self.payload.part
        is_parted = part is not None and part.sequence_parts > 1
        return ColumnKind.ROW_RUNS if is_parted else ColumnKind.ROW_WINDOWS

    def _raw_runs(self) -> bytes:
        return bytes(self._columns.raw(self._run_kind))

    def _place(self) -> tuple[int, int]:
        offsets = self._columns.raw(ColumnKind.ROW_OFFSETS).cast("q")
        # A cut of a payload keeps the offsets that its rows had there.
        base = offsets[0]
        return offsets[self.first] - base, offsets[self.first + self.row_count] - base

    @property
    def device(self) -> torch.device:
        """Where the columns over positions are."""
        return self._columns.device

    @property
    def bound(self) -> ErrorBound:
        """What the codec that they came in may have moved log-probabilities by."""
        return self._columns.bound

    @property
    def first_row(self) -> int:
        """The global number of the first row."""
        return self.payload.first_row + self.first

    @property
    def status(self) -> memoryview:
        """The status of each row, where it lies; see ``LeasedColumns.raw``."""
        stop = self.first + self.row_count
        return self._columns.raw(ColumnKind.ROW_STATUS)[self.first : stop]

    def rows(self, first: int, row_count: int) -> Part:
        """Return some of these rows."""
        return Part(self.payload, self._columns, first=self.first + first, row_count=row_count)

    def __getitem__(self, kind: ColumnKind) -> torch.Tensor:
        column = self._columns[kind]
        if self._is_whole and kind is not ColumnKind.ROW_OFFSETS:
            return column
        axis = _AXES[kind]
        if axis == "P":
            return column[self._start : self._stop]
        if axis == "N":
            return column[self.first : self.first + self.row_count]
        offsets = column[self.first : self.first + self.row_count + 1]
        return offsets - offsets[:1]

    def __iter__(self) -> Iterator[ColumnKind]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What columns look like that have no positions: kinds, K, T, the type of the values, where."""

    kinds: tuple[ColumnKind, ...]
    top_k: int
    temperatures: tuple[float, ...]
    value_type: ElementType
    device: torch.device

    @classmethod
    def of(cls, parts: Sequence[RowPart], profile: StudentProfile) -> Shape:
        """Return that of some parts, or of what a student asked for where it has none."""
        if not parts:
            return cls(
                kinds=tuple(dict.fromkeys((*SCORED_COLUMNS, *profile.columns))),
                top_k=profile.top_k,
                temperatures=profile.all_temperatures,
                value_type=profile.value_type or ElementType.FLOAT16,
                device=_HOST,
            )
        payload = parts[0].payload
        return cls(
            kinds=tuple(column.kind for column in payload.columns),
            top_k=payload.top_k,
            temperatures=payload.temperatures,
            value_type=payload.column(ColumnKind.TOPK_LOGPROBS).element_type,
            device=_device_of(parts),
        )

    def empty(self, kind: ColumnKind) -> torch.Tensor:
        """Return a column of no rows."""
        types, axes = COLUMN_RULES[kind]
        sizes = {"P": 0, "N": 0, "N+1": 1, "K": self.top_k, "T": len(self.temperatures)}
        shape = [axis if isinstance(axis, int) else sizes.get(axis, 0) for axis in axes]
        if kind is ColumnKind.TOPK_LOGITS:
            types = frozenset({logit_type(self.value_type)})
        element_type = self.value_type if self.value_type in types else next(iter(types))
        device = self.device if is_on_device(kind) else _HOST
        return torch.zeros(shape, dtype=DTYPES[element_type], device=device)


class RowColumns(Mapping[ColumnKind, torch.Tensor]):
    """The columns of the rows of some parts, one behind the other, and of padding rows.

    ``copied`` says whether more than one payload holds them, so that positions are copied;
    ``whole_rows`` whether every row has all its positions.
    """

    def __init__(self, parts: Sequence[RowPart], *, padding_rows: int, shape: Shape) -> None:
        self._parts = tuple(parts)
        self._padding = padding_rows
        self._shape = shape
        self._made: dict[ColumnKind, torch.Tensor] = {}
        self.copied = is_copy(self._parts)
        self.whole_rows = all(part.payload.whole_rows for part in self._parts)
        #: Its teacher's; None where there is nothing but padding.
        sizes = [part.payload.vocabulary_size for part in parts]
        self.vocabulary_size = min(sizes, default=None)
        #: The widest of the parts': a session has one codec, and what it cannot carry is exact.
        self.bound = next((part.bound for part in parts if not part.bound.is_exact), EXACT)

    def __getitem__(self, kind: ColumnKind) -> torch.Tensor:
        made = self._made.get(kind)
        if made is None:
            made = self._made[kind] = self._make(kind)
        return made

    def __iter__(self) -> Iterator[ColumnKind]:
        return iter(self._parts[0] if self._parts else self._shape.kinds)

    def __len__(self) -> int:
        return len(self._parts[0] if self._parts else self._shape.kinds)

    def empty(self) -> None:
        """Let go of all tensors, and of what they are made from."""
        self._made.clear()
        self._parts = ()

    def _make(self, kind: ColumnKind) -> torch.Tensor:
        if kind is ColumnKind.ROW_OFFSETS:
            counts = [part[kind].diff() for part in self._parts]
            none = torch.zeros(self._padding + 1, dtype=torch.int64)
            return torch.cat([none[:1], *counts, none[1:]]).cumsum(0)
        if len(self._parts) == 1 and not self._padding:
            return self._parts[0][kind]
        pieces = [part[kind] for part in self._parts] or [self._shape.empty(kind)]
        if self._padding and _AXES[kind] == "N":
            pieces.append(pieces[0].new_zeros((self._padding, *pieces[0].shape[1:])))
        if len(pieces) == 1:
            return pieces[0]
        if is_on_device(kind):
            device = _device_of(self._parts)
            pieces = [piece.to(device) for piece in pieces]
        return torch.cat(pieces)


def is_copy(parts: Sequence[RowPart]) -> bool:
    """Say whether positions of the rows of some parts are copied, and not viewed."""
    return len(parts) > 1 or any(part.is_copy for part in parts)


def _device_of(parts: Sequence[RowPart]) -> torch.device:
    """Return the first device that some part is on; the host where none is."""
    return next((part.device for part in parts if part.device != _HOST), _HOST)
