"""Payloads to be encoded: written as an engine writes them, and streamed without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import crc32c
import torch
from hypothesis import strategies as st

from teacher_logits.cuts import Segment
from teacher_logits.encodings import IdCodec, StreamCodec, ValueCodec, encoding_of
from teacher_logits.layout import ColumnKind, ElementType, RowStatus, top_k_columns
from teacher_logits.payload import Extent, Payload
from teacher_logits.selection import select_top_k
from teacher_logits.tensors import column_tensors
from teacher_logits.v1 import bulk_service_pb2
from teacher_logits_server.exporters.encoder import Encoder
from teacher_logits_server.lending.rooms import Pinned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.encodings import Encoding

EXTENT = Extent(slab_id="s", offset_bytes=0, size_bytes=1 << 20, slot=0, generation=2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Written:
    """A payload and its bytes."""

    payload: Payload
    room: memoryview

    @property
    def columns(self) -> dict[ColumnKind, torch.Tensor]:
        return column_tensors(self.room, self.payload.columns)

    @property
    def pinned(self) -> Pinned:
        whole = Segment(source_offset_bytes=0, offset_bytes=0, size_bytes=self.payload.size_bytes)
        return Pinned(payload=self.payload, extent=EXTENT, writer_id="w", segments=(whole,))

    def encoding(self, values: str, ids: str = "int32") -> Encoding:
        codec = StreamCodec(values=ValueCodec(values), ids=IdCodec(ids))
        found = encoding_of(self.payload, codec)
        assert found is not None
        return found

    def encoded(self, encoding: Encoding) -> bytes:
        encoder = Encoder(self.pinned, encoding, self.room)
        return b"".join(encoder.parts(0, encoding.size_bytes))


def written(
    logits: torch.Tensor,
    *,
    top_k: int,
    value_type: ElementType = ElementType.FLOAT32,
    row_lengths: Sequence[int] = (),
    bad_rows: Sequence[int] = (),
    temperatures: tuple[float, ...] = (1.0, 0.5),
    vocabulary_size: int = 0,
) -> Written:
    """The payload of ``logits`` [P,V], cut into rows; one row where no lengths are given."""
    lengths = list(row_lengths) or [len(logits)]
    columns, size = top_k_columns(
        row_count=len(lengths),
        position_count=len(logits),
        top_k=top_k,
        temperature_count=len(temperatures),
        value_type=value_type,
    )
    room = memoryview(bytearray(size))
    found = column_tensors(room, columns)
    selection = select_top_k(logits, k=top_k, temperatures=temperatures)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    found[ColumnKind.TOPK_IDS].copy_(selection.topk_ids)
    found[ColumnKind.TOPK_LOGPROBS].copy_(selection.topk_logprobs)
    found[ColumnKind.LOG_TAIL].copy_(selection.log_tail)
    found[ColumnKind.LOGSUMEXP].copy_(selection.logsumexp)
    found[ColumnKind.ROW_OFFSETS].copy_(offsets)
    found[ColumnKind.ROW_WINDOWS][:, 1] = offsets.diff()
    for row in bad_rows:
        found[ColumnKind.ROW_STATUS][row] = RowStatus.NAN
        here = slice(int(offsets[row]), int(offsets[row + 1]))
        found[ColumnKind.TOPK_IDS][here] = -1
        found[ColumnKind.TOPK_LOGPROBS][here] = 0.0
    payload = Payload(
        payload_id="p",
        teacher_id="t",
        teacher_revision="",
        first_row=0,
        row_count=len(lengths),
        position_count=len(logits),
        top_k=top_k,
        temperatures=temperatures,
        vocabulary_size=vocabulary_size or logits.shape[1],
        columns=columns,
        size_bytes=size,
        bad_row_count=len(bad_rows),
    )
    return Written(payload=payload, room=room)


@st.composite
def rows_of_logits(draw: st.DrawFn, *, bfloat16: bool = False) -> torch.Tensor:
    """Logits [P,V] from flat to so peaked that most of them have no mass, some of them -inf."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    positions, width = draw(st.integers(1, 9)), draw(st.sampled_from([1, 5, 40, 300]))
    scale = draw(st.sampled_from([0.0, 0.1, 2.0, 9.0, 60.0]))
    logits = torch.randn(positions, width, generator=generator) * scale
    if draw(st.booleans()):
        logits[0, draw(st.integers(1, width)) :] = -torch.inf
    return logits.bfloat16() if bfloat16 else logits


def chunk(data: bytes | bytearray, offset: int) -> bytes:
    """A chunk of a stream, as a plain stub would send it."""
    return bulk_service_pb2.ReadPayloadResponse(
        offset_bytes=offset, crc32c=crc32c.crc32c(data), data=bytes(data)
    ).SerializeToString()
