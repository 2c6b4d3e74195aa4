"""Packing: what of a pass is sent to a replica, and what comes back from it.

    part of an answer -> PackedPart --Ray--> the same rows as an answer of its own, computed there
    its columns <- Returned <--Ray-- one flat buffer: of each part its columns, then the status
    its status  <- StoredObject <----        and its columns stay there, as rows of their payload

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
from teacher_logits_server.engines.stored import StoredAnswer
from teacher_logits_server.replicas.instructions import Piece

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
    ``is_stored``: their payload stays where it is computed, and ``first_position`` is where their
    positions begin in it.
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
    is_stored: bool = False
    first_position: int = 0

    @property
    def position_count(self) -> int:
        """Wanted positions of all rows."""
        return sum(count for _, count in self.row_windows)

    def lay_out(self) -> tuple[tuple[Column, ...], int, int]:
        """Return the columns, where the status of positions lies, and the size in bytes."""
        columns, size = lay_out(self.columns)
        return columns, size, size + round_up(self.position_count, ALIGNMENT_BYTES)


def piece_of(part: Part, *, key: int) -> Piece:
    """Return what the dispatch table is to know of a part."""
    answer = part.answer
    if not isinstance(answer, StoredAnswer):
        return Piece(key=key, tokens=part.token_count)
    _, size = lay_out(_specs(part))
    return Piece(key=key, tokens=part.token_count, stored_bytes=size, near=answer.near)


def pack(part: Part) -> PackedPart:
    """Pack a part; its arrays view the request."""
    answer, request = part.answer, part.answer.request
    is_stored = isinstance(answer, StoredAnswer)
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
        columns=_specs(part),
        is_stored=is_stored,
        first_position=positions.start if is_stored else 0,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed:
    """A pass that was computed.

    ``returned`` has the parts that go to the server, one behind the other, each with the status of
    its positions; ``stored`` those that stay, each as some rows of its payload, and ``statuses``
    of those what there is to say of their positions.
    """

    returned: Bytes
    stored: tuple[Bytes, ...] = ()
    statuses: tuple[bytes, ...] = ()


def compute(engine: Engine, parts: Sequence[PackedPart]) -> Computed:
    """Run an engine over a pass, and return its columns.

    Raises:
        Exception: whatever the engine raises.
    """
    buffer: Bytes = numpy.zeros(size_of(parts, is_stored=False), numpy.uint8)
    filled: list[tuple[PackedPart, Part, Bytes]] = []
    start = 0
    for part in parts:
        _, stored_size, size = part.lay_out()
        if part.is_stored:
            room: Bytes = numpy.zeros(stored_size, numpy.uint8)
        else:
            room, start = buffer[start : start + size], start + size
        filled.append((part, _unpack(part, room.data), room))
    fill(engine, [each for _, each, _ in filled], wanted=lambda: True)
    stored, statuses = [], []
    for given, part_here, room in filled:
        answer = part_here.written
        if given.is_stored:
            stored.append(room)
            statuses.append(_finish(answer, given, room))
        else:
            status = answer.keeper.status.numpy()
            _, at, _ = given.lay_out()
            room[at : at + len(status)] = status
    return Computed(returned=buffer, stored=tuple(stored), statuses=tuple(statuses))


def size_of(parts: Sequence[PackedPart], *, is_stored: bool) -> int:
    """Return the bytes of a pass's parts that stay, or that go to the server."""
    own = [part.lay_out() for part in parts if part.is_stored is is_stored]
    return sum(stored if is_stored else size for _, stored, size in own)


def _finish(answer: Answer, given: PackedPart, room: Bytes) -> bytes:
    """Complete rows that stay; return their positions' statuses, nothing where all are fine.

    Bad rows are masked here, where their bytes are: who does not want them so is refused them.
    """
    answer.finish(mask=True)
    columns, _, _ = given.lay_out()
    offsets = column_tensors(
        room.data, [each for each in columns if each.kind is ColumnKind.ROW_OFFSETS]
    )
    offsets[ColumnKind.ROW_OFFSETS] += given.first_position
    status = answer.keeper.status.numpy()
    return status.tobytes() if status.any() else b""


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
        part.written.take(part.positions, tensors, status)

    def drop(self) -> None:
        """See ``engines.passes.Scores``: it goes with who has it."""


def returned(parts: Sequence[PackedPart], data: Bytes) -> tuple[Returned, ...]:
    """Cut a buffer that came back into the parts of its pass that are in it."""
    made, start = [], 0
    for part in parts:
        size = part.lay_out()[2]
        made.append(Returned(part, data[start : start + size]))
        start += size
    return tuple(made)


def _lengths(starts: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in pairwise(starts))


def _specs(part: Part) -> tuple[tuple[ColumnKind, ElementType, tuple[int, ...]], ...]:
    """Return kind, type and shape of a part's columns."""
    rows, positions = part.row_count, len(part.positions)
    return tuple(
        (each.kind, each.element_type, _shape(each, rows, positions))
        for each in part.answer.columns
    )


def _shape(column: Column, rows: int, positions: int) -> tuple[int, ...]:
    """Return the shape of a column for so many rows and positions."""
    sizes = {"P": positions, "N": rows, "N+1": rows + 1}
    axes = COLUMN_RULES[column.kind][1]
    return tuple(
        sizes.get(axis, size) if isinstance(axis, str) else size
        for axis, size in zip(axes, column.shape, strict=True)
    )
