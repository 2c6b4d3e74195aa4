"""Sinks: where the bytes of a stream go, as they come.

    its own bytes   copied to where they belong
    encoded         decoded on the way, a tile at a time, into the columns that they stand for

Either way the buffer holds the payload as its description has it, in the element types that were
written, and nothing of the size of a payload is held beside it. A stream that breaks is taken up
behind the last byte that was taken in.

Promises of what was decoded: it keeps the invariants of a payload, within what its codec may cost;
what does not is a ``PayloadInvalidError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from teacher_logits.codec.id_codecs import decode_ids, mark_absent, restore_absent
from teacher_logits.codec.value_codecs import decode_values
from teacher_logits.encodings import MOST_PACKED_IDS, Encoding, Plane
from teacher_logits.error_bounds import bound_of
from teacher_logits.layout import ColumnKind, RowStatus
from teacher_logits.selection.invariants import check_invariants
from teacher_logits.tensors import column_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.encodings import EncodedColumn
    from teacher_logits.payload import Payload

TILE_BYTES = 1 << 18
"""Encoded bytes that are decoded at a time, so that they are in the cache; at least a position."""

_HEADS = (Plane.FIRST, Plane.SCALE)
_NEEDED = (ColumnKind.TOPK_IDS, ColumnKind.TOPK_LOGPROBS, ColumnKind.ROW_OFFSETS)


class Sink(Protocol):
    """Takes in the bytes of one stream, in order."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole stream."""

    def take(self, data: memoryview, at: int) -> None:
        """Take in the bytes from ``at`` on, which is where the last ones ended."""

    def finish(self) -> None:
        """Note that all have come; refuses what cannot be a payload."""


class Copying:
    """The sink of a payload's own bytes."""

    def __init__(self, room: memoryview) -> None:
        self._room = room

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole stream."""
        return len(self._room)

    def take(self, data: memoryview, at: int) -> None:
        """Copy bytes to where they belong."""
        self._room[at : at + len(data)] = data

    def finish(self) -> None:
        """Do nothing: what came is what was written."""


class Decoder:
    """The sink of an encoded payload."""

    def __init__(self, payload: Payload, encoding: Encoding, room: memoryview) -> None:
        self._payload = payload
        self._encoding = encoding
        self._room = room
        self._columns = column_tensors(room, payload.columns)
        widest = max(column.row_bytes for column in encoding.columns)
        #: Bytes that have come and are not decoded: less than a position between two chunks.
        self._held = bytearray(max(TILE_BYTES, widest))
        self._held_bytes = torch.frombuffer(self._held, dtype=torch.uint8)
        self._count = 0
        self._head: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole stream."""
        return self._encoding.size_bytes

    def take(self, data: memoryview, at: int) -> None:
        """Decode bytes; of a position that is not whole yet they are kept."""
        for column in self._encoding.columns:
            start = max(at, column.offset_bytes)
            stop = min(at + len(data), column.end_bytes)
            if start < stop:
                self._take(column, data[start - at : stop - at], start - column.offset_bytes)

    def _take(self, column: EncodedColumn, data: memoryview, at: int) -> None:
        """Take in bytes of one column, from its byte ``at`` on."""
        if column.plane is Plane.AS_WRITTEN:
            start = self._payload.column(column.kind).offset_bytes + at
            self._room[start : start + len(data)] = data
            return
        if column.plane in _HEADS and at == 0:
            self._head = torch.empty(column.row_count, column.row_bytes, dtype=torch.uint8)
        first = (at - self._count) // column.row_bytes
        most = len(self._held) // column.row_bytes * column.row_bytes
        while data:
            size = min(len(data), most - self._count)
            self._held[self._count : self._count + size] = data[:size]
            self._count, data = self._count + size, data[size:]
            rows = self._count // column.row_bytes
            whole = rows * column.row_bytes
            planes = self._held_bytes[:whole].view(rows, column.row_bytes)
            if rows:
                self._decode(column, planes, slice(first, first + rows))
            self._held[: self._count - whole] = self._held[whole : self._count]
            self._count, first = self._count - whole, first + rows

    def _decode(self, column: EncodedColumn, planes: torch.Tensor, rows: slice) -> None:
        out = self._columns[column.kind][rows]
        if column.kind is ColumnKind.TOPK_IDS:
            decode_ids(column.plane, planes, out)
            if column.plane is Plane.PACKED18 and self._payload.vocabulary_size < MOST_PACKED_IDS:
                mark_absent(out)
        elif column.plane in _HEADS and self._head is not None:
            self._head[rows] = planes
        else:
            head = None if self._head is None else self._head[rows]
            decode_values(column.plane, planes, out, head=head)

    def finish(self) -> None:
        """Hold what was decoded against the invariants of a payload.

        Raises:
            PayloadInvalidError: naming the first fault, by its row and position.
        """
        payload, codec = self._payload, self._encoding.codec
        for kind in _NEEDED:  # also a server that is not ours says what its payloads have
            payload.column(kind)
        columns = dict(self._columns)
        offsets = columns[ColumnKind.ROW_OFFSETS]
        # A cut of a payload keeps the offsets that its rows had there.
        columns[ColumnKind.ROW_OFFSETS] = offsets - offsets[:1]
        if any(c.plane is Plane.PACKED18 for c in self._encoding.columns):
            self._tell_absent(columns)
        written = payload.column(ColumnKind.TOPK_LOGPROBS).element_type
        check_invariants(
            columns,
            vocab_size=payload.vocabulary_size,
            temperatures=payload.temperatures,
            first_row=payload.first_row,
            bound=bound_of(codec, written=written, top_k=payload.top_k),
        )

    def _tell_absent(self, columns: Mapping[ColumnKind, torch.Tensor]) -> None:
        """Mark absent ids where the vocabulary leaves no number for that."""
        if self._payload.vocabulary_size < MOST_PACKED_IDS:
            return
        ids, values = columns[ColumnKind.TOPK_IDS], columns[ColumnKind.TOPK_LOGPROBS]
        scored = torch.ones(len(ids), dtype=torch.bool)
        status, lengths = columns.get(ColumnKind.ROW_STATUS), columns[ColumnKind.ROW_OFFSETS].diff()
        may_be = int(lengths.sum()) == len(ids) and bool((lengths >= 0).all())
        if status is not None and may_be:
            scored = (status == RowStatus.OK).repeat_interleave(lengths)
        restore_absent(ids, values, scored)
