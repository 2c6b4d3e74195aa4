"""Encoder: any run of bytes of an encoded payload, made from the payload where it lies.

What is asked for is made when it is asked for, and nothing is kept: a stream costs one chunk of
memory, can be taken up at any byte, and its bytes are the same each time. Positions that a chunk
cuts through are encoded for both chunks.

Refuses (``CodecError``) what the codec cannot carry, with the number of the position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from teacher_logits.codec.id_codecs import encode_ids
from teacher_logits.codec.value_codecs import encode_values
from teacher_logits.encodings import CodecError, Encoding, Plane
from teacher_logits.layout import ColumnKind
from teacher_logits.tensors import column_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.encodings import EncodedColumn
    from teacher_logits.payload import Payload
    from teacher_logits_server.lending.rooms import Pinned

TILE_ENTRIES = 1 << 16
"""Entries that are encoded at a time: what is made on the way stays in the cache."""


class Encoder:
    """One payload in one encoding.

    Its tensors view ``room``: drop it before that goes to somebody else.
    """

    def __init__(self, pinned: Pinned, encoding: Encoding, room: memoryview) -> None:
        self._encoding = encoding
        self._payload = pinned.payload
        self._bytes = _Bytes(pinned, room)
        self._ids = self._tensor(ColumnKind.TOPK_IDS)
        self._values = self._tensor(ColumnKind.TOPK_LOGPROBS)
        has_logsumexp = any(c.kind is ColumnKind.LOGSUMEXP for c in pinned.payload.columns)
        self._logsumexp = self._tensor(ColumnKind.LOGSUMEXP)[:, 0] if has_logsumexp else None

    def stop_of(self, start: int, most: int) -> int:
        """Return where a chunk from ``start`` on ends, of at most so many bytes and entries.

        A position's scale is a few bytes, and all of its entries are looked at for them. One
        position is encoded in any case, however many entries it has.
        """
        stop = min(start + most, self._encoding.size_bytes)
        rows = max(1, most // self._ids.shape[1])
        for column in self._encoding.columns:
            first = max(start, column.offset_bytes)
            if column.plane is Plane.SCALE and first < min(stop, column.end_bytes):
                stop = min(stop, first + rows * column.row_bytes)
        return stop

    def parts(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the encoded bytes from ``start`` to ``stop``."""
        for column in self._encoding.columns:
            first = max(start, column.offset_bytes) - column.offset_bytes
            last = min(stop, column.end_bytes) - column.offset_bytes
            if first >= last:
                continue
            if column.plane is Plane.AS_WRITTEN:
                yield self._bytes.of(column.kind)[first:last]
            else:
                yield self._encode(column, first, last)

    def _encode(self, column: EncodedColumn, start: int, stop: int) -> memoryview:
        """Encode the positions that some bytes of a column are of, and return these bytes."""
        first, last = start // column.row_bytes, -(-stop // column.row_bytes)
        made = bytearray((last - first) * column.row_bytes)
        out = torch.frombuffer(made, dtype=torch.uint8).view(-1, column.row_bytes)
        step = max(1, TILE_ENTRIES // self._ids.shape[1])
        for row in range(first, last, step):
            end = min(row + step, last)
            self._encode_rows(column, slice(row, end), out[row - first : end - first])
        skipped = first * column.row_bytes
        return memoryview(made)[start - skipped : stop - skipped]

    def _encode_rows(self, column: EncodedColumn, rows: slice, out: torch.Tensor) -> None:
        logsumexp = None if self._logsumexp is None else self._logsumexp[rows]
        try:
            if column.kind is ColumnKind.TOPK_IDS:
                encode_ids(column.plane, self._ids[rows], out)
            else:
                encode_values(column.plane, self._values[rows], out, logsumexp=logsumexp)
        except CodecError as error:
            raise CodecError(
                f"payload {self._payload.payload_id}, from position {rows.start} on: "
                f"{error.message}",
                facts={**error.facts, "payload_id": self._payload.payload_id},
            ) from None

    def _tensor(self, kind: ColumnKind) -> torch.Tensor:
        column = replace(self._payload.column(kind), offset_bytes=0)
        return column_tensor(self._bytes.of(kind), column)


class _Bytes:
    """Where the columns of a pinned payload lie; each of them is in one run."""

    def __init__(self, pinned: Pinned, room: memoryview) -> None:
        self._payload: Payload = pinned.payload
        self._segments = pinned.segments
        self._room = room

    def of(self, kind: ColumnKind) -> memoryview:
        """Return the bytes of a column."""
        column = self._payload.column(kind)
        for each in self._segments:
            first = column.offset_bytes - each.offset_bytes
            if 0 <= first and first + column.size_bytes <= each.size_bytes:
                start = each.source_offset_bytes + first
                return self._room[start : start + column.size_bytes]
        raise ValueError(f"column {kind.value} of {self._payload.payload_id} lies in no run")
