"""Encodings of streams, and what they may cost, between their Python form and their messages.

Both sides lay an encoded payload out by the same rule. What a lease says of it is compared with
that rule here, so that nobody decodes by another layout than was sent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from teacher_logits.encodings import StreamCodec, encoding_of
from teacher_logits.error_bounds import ErrorBound
from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits.terms import StreamTerms
from teacher_logits.v1 import payload_pb2, session_pb2, tensor_pb2
from teacher_logits.wire import (
    column_kind_to_wire,
    enum_to_wire,
    id_codec_from_wire,
    id_codec_to_wire,
    value_codec_from_wire,
    value_codec_to_wire,
)

if TYPE_CHECKING:
    from teacher_logits.encodings import Encoding
    from teacher_logits.payload import Payload


def stream_terms_to_wire(terms: StreamTerms) -> session_pb2.StreamTerms:
    """Return the message of a session's codec and its bound."""
    bound = terms.bound
    return session_pb2.StreamTerms(
        values=value_codec_to_wire(terms.codec.values),
        ids=id_codec_to_wire(terms.codec.ids),
        bound=session_pb2.ErrorBound(
            relative=bound.relative,
            of_range=bound.of_range,
            absolute=bound.absolute,
            kl=bound.kl,
            gradient=bound.gradient,
        ),
    )


def stream_terms_from_wire(message: session_pb2.StreamTerms) -> StreamTerms:
    """Return a session's codec and its bound.

    Raises:
        RequestInvalidError: a codec that this release does not know, or a bound that is none.
    """
    codec = StreamCodec(
        values=value_codec_from_wire(message.values), ids=id_codec_from_wire(message.ids)
    )
    return StreamTerms(codec=codec, bound=_bound_from_wire(message.bound))


def _bound_from_wire(message: session_pb2.ErrorBound) -> ErrorBound:
    bound = ErrorBound(
        relative=message.relative,
        of_range=message.of_range,
        absolute=message.absolute,
        kl=message.kl if message.HasField("kl") else None,
        gradient=message.gradient if message.HasField("gradient") else None,
    )
    numbers = [number for number in vars(bound).values() if number is not None]
    if not all(0 <= number < math.inf for number in numbers) or not bound.relative < 1:
        raise RequestInvalidError(
            f"the session's error bound is {bound}: its numbers are finite and none is negative, "
            "and relative is below 1; use the same release on both sides",
            facts={"field": "bound"},
        )
    return bound


def stream_source_to_wire(encoding: Encoding) -> payload_pb2.StreamSource:
    """Return the message of how a payload is streamed where that is not as its own bytes."""
    return payload_pb2.StreamSource(
        values=value_codec_to_wire(encoding.codec.values),
        ids=id_codec_to_wire(encoding.codec.ids),
        columns=[
            tensor_pb2.EncodedColumn(
                kind=column_kind_to_wire(column.kind),
                plane=enum_to_wire(column.plane, tensor_pb2.Plane, "PLANE_"),
                row_count=column.row_count,
                row_bytes=column.row_bytes,
                offset_bytes=column.offset_bytes,
            )
            for column in encoding.columns
        ],
        size_bytes=encoding.size_bytes,
    )


def stream_source_from_wire(message: payload_pb2.StreamSource, payload: Payload) -> Encoding | None:
    """Return how a payload is streamed; None for its own bytes.

    Raises:
        RequestInvalidError: a codec that this release does not know.
        PayloadInvalidError: the columns are not those that its codec makes of the payload.
    """
    if not message.size_bytes and not message.columns:
        return None
    codec = StreamCodec(
        values=value_codec_from_wire(message.values), ids=id_codec_from_wire(message.ids)
    )
    encoding = encoding_of(payload, codec)
    if encoding is not None and stream_source_to_wire(encoding) == message:
        return encoding
    expected = 0 if encoding is None else encoding.size_bytes
    raise PayloadInvalidError(
        f"payload {payload.payload_id} is said to be streamed in {message.size_bytes} bytes of "
        f"{len(message.columns)} columns, which is not what {codec.values.value} and "
        f"{codec.ids.value} make of it ({expected} bytes); use the same release on both sides",
        facts={"size_bytes": message.size_bytes, "expected_bytes": expected},
    )
