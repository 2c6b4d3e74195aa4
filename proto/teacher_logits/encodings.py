"""Encodings: how the entries of a payload travel in a stream, where they are made smaller.

A session has a ``StreamCodec``: one way for log-probabilities, one for ids. What is encoded is a
payload's columns one behind the other, without padding, whole rows each:

    payload   | topk_ids | topk_logprobs | log_tail | logsumexp | ... | row_status |
    encoded   | log_tail | logsumexp | ... | row_status | scale | codes | low16 | high8 |

Columns other than those two go as they are and come first, since some say how the others are to be
read. Both sides compute the layout from the payload's description; its size follows from that
alone, so that a stream can be taken up at any byte. The decoded payload has the element types that
were written: whoever reads it cannot tell from its shape how it came.

Refuses nothing by itself: where a codec has nothing to give, a column goes as it was written.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import Column, ColumnKind, ElementType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Payload

CODEC_FACT = "codec"
"""The fact by which a ``CodecError`` is told from other invalid payloads behind the wire."""

MOST_PLANE_IDS, MOST_PACKED_IDS = (1 << 24) - 1, 1 << 18
"""The largest vocabularies of ``planes24`` and ``packed18``."""


class CodecError(PayloadInvalidError):
    """A codec cannot carry what was written; ``facts`` names it. As it was written, it can go."""


class ValueCodec(enum.Enum):
    """How ``topk_logprobs`` travel."""

    #: Bit for bit, in the element type that was written.
    AS_WRITTEN = "as_written"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    #: fp32 log-probabilities of logits that were bf16, as those: two bytes, and bit for bit.
    BFLOAT16_EXACT = "bfloat16_exact"
    #: 256 even steps between the largest and the smallest of each position.
    UINT8 = "uint8"

    @property
    def type_bytes(self) -> int:
        """Bytes of an entry; of ``as_written`` more than any, since nothing is smaller by it."""
        return _VALUE_BYTES[self]


class IdCodec(enum.Enum):
    """How ``topk_ids`` travel. All of them lose nothing."""

    INT32 = "int32"
    #: The low 16 bits of each, then the high 8: three bytes an id.
    PLANES24 = "planes24"
    #: 18 bits an id, the lowest first, each position in whole bytes.
    PACKED18 = "packed18"

    @property
    def most_ids(self) -> int:
        """The largest vocabulary that it can carry."""
        return {IdCodec.PLANES24: MOST_PLANE_IDS, IdCodec.PACKED18: MOST_PACKED_IDS}.get(
            self, 1 << 31
        )


_VALUE_BYTES = {
    ValueCodec.AS_WRITTEN: 8,
    ValueCodec.FLOAT32: 4,
    ValueCodec.FLOAT16: 2,
    ValueCodec.BFLOAT16: 2,
    ValueCodec.BFLOAT16_EXACT: 2,
    ValueCodec.UINT8: 1,
}


class Plane(enum.Enum):
    """What stands in an encoded column, by position; K entries each unless it says otherwise."""

    #: The column itself.
    AS_WRITTEN = "as_written"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    #: fp32: the first log-probability.
    FIRST = "first"
    #: bf16: logits, to be taken relative to the first of them.
    RAW = "raw"
    #: Two fp32: the largest log-probability, and the step; see ``value_codecs``.
    SCALE = "scale"
    #: uint8: steps below the largest.
    CODES = "codes"
    LOW16 = "low16"
    HIGH8 = "high8"
    PACKED18 = "packed18"


@dataclass(frozen=True, kw_only=True)
class StreamCodec:
    """What a session's streams are encoded in; by default they are as they were written."""

    values: ValueCodec = ValueCodec.AS_WRITTEN
    ids: IdCodec = IdCodec.INT32


AS_WRITTEN = StreamCodec()
"""Nothing is done to what was written."""


@dataclass(frozen=True, kw_only=True)
class EncodedColumn:
    """One plane of a column: ``row_count`` rows of ``row_bytes`` from ``offset_bytes`` on."""

    kind: ColumnKind
    plane: Plane
    row_count: int
    row_bytes: int
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        """First byte behind it."""
        return self.offset_bytes + self.row_count * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How one payload travels: ``codec`` is what was done to it in fact."""

    codec: StreamCodec
    columns: tuple[EncodedColumn, ...] = field(repr=False)
    size_bytes: int


def value_codec_for(
    asked: ValueCodec, written: ElementType, *, has_logsumexp: bool = True
) -> ValueCodec | None:
    """Return what an asked codec comes to where values were written in a type.

    ``as_written`` where it is that very type; None where it would save nothing.
    """
    if asked is ValueCodec.AS_WRITTEN or asked.value == written.value:
        return ValueCodec.AS_WRITTEN
    is_exact = asked is ValueCodec.BFLOAT16_EXACT
    if asked.type_bytes >= written.size_bytes or (is_exact and not has_logsumexp):
        return None
    return asked


def encoding_of(payload: Payload, codec: StreamCodec) -> Encoding | None:
    """Return how a payload travels under a session's codec; None where nothing is done to it."""
    by_kind = {column.kind: column for column in payload.columns}
    values, ids = ValueCodec.AS_WRITTEN, IdCodec.INT32
    logprobs = by_kind.get(ColumnKind.TOPK_LOGPROBS)
    if logprobs is not None and logprobs.size_bytes:
        has_logsumexp = ColumnKind.LOGSUMEXP in by_kind
        found = value_codec_for(codec.values, logprobs.element_type, has_logsumexp=has_logsumexp)
        values = found or values
    column = by_kind.get(ColumnKind.TOPK_IDS)
    if column is not None and column.size_bytes and payload.vocabulary_size <= codec.ids.most_ids:
        ids = codec.ids
    if values is ValueCodec.AS_WRITTEN and ids is IdCodec.INT32:
        return None
    return _lay_out(payload, StreamCodec(values=values, ids=ids))


def _lay_out(payload: Payload, codec: StreamCodec) -> Encoding:
    encoded = {
        ColumnKind.TOPK_LOGPROBS: codec.values is not ValueCodec.AS_WRITTEN,
        ColumnKind.TOPK_IDS: codec.ids is not IdCodec.INT32,
    }
    last = [payload.column(kind) for kind, is_encoded in encoded.items() if is_encoded]
    columns: list[EncodedColumn] = []
    end = 0
    for column in (*(c for c in payload.columns if c not in last), *last):
        for plane, row_bytes in _planes(column, codec):
            if column.size_bytes:
                placed = EncodedColumn(
                    kind=column.kind,
                    plane=plane,
                    row_count=column.shape[0],
                    row_bytes=row_bytes,
                    offset_bytes=end,
                )
                columns.append(placed)
                end = placed.end_bytes
    return Encoding(codec=codec, columns=tuple(columns), size_bytes=end)


def _planes(column: Column, codec: StreamCodec) -> Iterator[tuple[Plane, int]]:
    """Yield the planes of a column, with the bytes of a row in each."""
    k = column.shape[-1]
    if column.kind is ColumnKind.TOPK_LOGPROBS and codec.values in _VALUE_PLANES:
        yield from ((plane, size(k)) for plane, size in _VALUE_PLANES[codec.values])
    elif column.kind is ColumnKind.TOPK_IDS and codec.ids is IdCodec.PLANES24:
        yield Plane.LOW16, 2 * k
        yield Plane.HIGH8, k
    elif column.kind is ColumnKind.TOPK_IDS and codec.ids is IdCodec.PACKED18:
        yield Plane.PACKED18, packed_bytes(k)
    else:
        yield Plane.AS_WRITTEN, column.size_bytes // max(1, column.shape[0])


def packed_bytes(count: int) -> int:
    """Return the bytes of so many ids of 18 bits."""
    return -(-18 * count // 8)


_VALUE_PLANES = {
    ValueCodec.FLOAT16: ((Plane.FLOAT16, lambda k: 2 * k),),
    ValueCodec.BFLOAT16: ((Plane.BFLOAT16, lambda k: 2 * k),),
    ValueCodec.BFLOAT16_EXACT: ((Plane.FIRST, lambda k: 4), (Plane.RAW, lambda k: 2 * k)),
    ValueCodec.UINT8: ((Plane.SCALE, lambda k: 8), (Plane.CODES, lambda k: k)),
}
