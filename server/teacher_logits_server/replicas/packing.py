"""Packing: what of a pass is sent to a replica, and what comes back from it.

    part of an answer -> PackedPart --Ray--> the same rows as an answer of its own, computed there
    its columns <- Returned <--Ray-- one flat buffer: of each part its columns, then the status

Both ends lay the buffer out by the same numbers, so that nothing but bytes comes back. Ids and
columns are numpy arrays, which Ray carries out of band: the receiver sees the object store's own
memory, read-only. Promises: what is copied into an answer is, bit for bit, what an engine in this
process would have written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy
import torch

from teacher_logits.layout import (
    ALIGNMENT_BYTES,
    COLUMN_RULES,
    Column,
    ColumnKind,
    ElementType,
    is_on_device,
    lay_out,
    round_up,
)
from teacher_logits.payload_room import HostRoom
from teacher_logits.tensors import column_tensors
from teacher_logits_server.engines.answers import Answer, Part, fill
from teacher_logits_server.engines.keepers import Wanted
from teacher_logits_server.engines.requests import read_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.selection_rules import SelectionRule
    from teacher_logits_server.engines import Engine

Ids: TypeAlias = "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int32]]"
Bytes: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]"


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPart:
    """Rows of one request, all by themselves, and what is wanted of them.

    ``columns`` are kinds, element types and shapes, as those of the whole answer but for the
    number of rows and positions. ``chosen_ids`` int32 [P,M] are those of ``ClientIds``.
    """

    token_ids: Ids
    row_lengths: tuple[int, ...]
    prefix_ids: Ids
    prefix_lengths: tuple[int, ...]
    row_windows: tuple[tuple[int, int], ...]
    selection: SelectionRule
    temperatures: tuple[float, ...]
    vocabulary_size: int
    chosen_ids: Ids | None
    columns: tuple[tuple[ColumnKind, ElementType, tuple[int, ...]], ...]

    @property
    def position_count(self) -> int:
        """Wanted positions of all rows."""
        return sum(count for _, count in self.row_windows)

    def lay_out(self) -> tuple[tuple[Column, ...], int, int]:
        """Return the columns, where the status of positions lies, and the size in bytes."""
        columns, size = lay_out(self.columns)
        return columns, size, size + round_up(self.position_count, ALIGNMENT_BYTES)


def pack(part: Part) -> PackedPart:
    """Pack a part; its arrays view the request."""
    answer, request = part.answer, part.answer.request
    first, end = part.first_row, part.first_row + part.row_count
    rows, prefixes = request.row_starts[first : end + 1], request.prefix_starts[first : end + 1]
    positions = part.positions
    chosen = answer.wanted.ids
    return PackedPart(
        token_ids=request.token_ids[rows[0] : rows[-1]].numpy(),
        row_lengths=_lengths(rows),
        prefix_ids=request.prefix_ids[prefixes[0] : prefixes[-1]].numpy(),
        prefix_lengths=_lengths(prefixes),
        row_windows=request.windows[first:end],
        selection=answer.wanted.selection,
        temperatures=answer.wanted.temperatures,
        vocabulary_size=answer.wanted.vocabulary_size,
        chosen_ids=None if chosen is None else chosen[positions.start : positions.stop].numpy(),
        columns=tuple(
            (each.kind, each.element_type, _shape(each, part.row_count, len(positions)))
            for each in answer.columns
        ),
    )


def compute(engine: Engine, parts: Sequence[PackedPart]) -> Bytes:
    """Run an engine over a pass, and return its columns as one buffer.

    Raises:
        Exception: whatever the engine raises.
    """
    sizes = [part.lay_out()[2] for part in parts]
    buffer: Bytes = numpy.zeros(sum(sizes), numpy.uint8)
    unpacked, start = [], 0
    for part, size in zip(parts, sizes, strict=True):
        unpacked.append(_unpack(part, buffer[start : start + size].data))
        start += size
    fill(engine, unpacked, wanted=lambda: True)
    start = 0
    for given, filled, size in zip(parts, unpacked, sizes, strict=True):
        _, at, _ = given.lay_out()
        status = filled.answer.keeper.status.numpy()
        buffer[start + at : start + at + len(status)] = status
        start += size
    return buffer


def _unpack(part: PackedPart, room: memoryview) -> Part:
    request = read_request(
        input_ids=part.token_ids.tobytes(),
        row_lengths=part.row_lengths,
        prefix_ids=part.prefix_ids.tobytes(),
        prefix_lengths=part.prefix_lengths,
        row_windows=part.row_windows,
    )
    chosen = None if part.chosen_ids is None else torch.tensor(part.chosen_ids)
    columns, _, _ = part.lay_out()
    answer = Answer(
        request,
        room=HostRoom(room),
        columns=columns,
        wanted=Wanted(
            selection=part.selection,
            temperatures=part.temperatures,
            vocabulary_size=part.vocabulary_size,
            ids=chosen,
        ),
    )
    return Part(answer=answer, first_row=0, row_count=len(part.row_lengths))


class Returned:
    """What came back for one part. It keeps the object store's memory until it is dropped."""

    def __init__(self, packed: PackedPart, data: Bytes) -> None:
        self._packed = packed
        self._data = data

    def copy_to(self, part: Part) -> None:
        """See ``engines.passes.Scores``."""
        columns, at, size = self._packed.lay_out()
        if self._data.nbytes != size:
            raise ValueError(f"a replica returned {self._data.nbytes} bytes for {size}")
        tensors = column_tensors(
            self._data.data, [each for each in columns if is_on_device(each.kind)]
        )
        status = torch.tensor(self._data[at : at + self._packed.position_count])
        part.answer.take(part.positions, tensors, status)


def returned(parts: Sequence[PackedPart], data: Bytes) -> tuple[Returned, ...]:
    """Cut a buffer that came back into the parts of its pass."""
    made, start = [], 0
    for part in parts:
        size = part.lay_out()[2]
        made.append(Returned(part, data[start : start + size]))
        start += size
    return tuple(made)


def _lengths(starts: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in pairwise(starts))


def _shape(column: Column, rows: int, positions: int) -> tuple[int, ...]:
    """Return the shape of a column for so many rows and positions."""
    sizes = {"P": positions, "N": rows, "N+1": rows + 1}
    axes = COLUMN_RULES[column.kind][1]
    return tuple(
        sizes.get(axis, size) if isinstance(axis, str) else size
        for axis, size in zip(axes, column.shape, strict=True)
    )
