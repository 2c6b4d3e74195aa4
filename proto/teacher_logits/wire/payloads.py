"""Payloads, the runs of bytes that they lie in, and leases: to their messages and back."""

from __future__ import annotations

from functools import lru_cache

from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits.keys import PayloadKey
from teacher_logits.layout import Column
from teacher_logits.payload import Extent, Payload, check_payload
from teacher_logits.selection_rules import TOP_K
from teacher_logits.shard_parts import ShardPart
from teacher_logits.terms import LeaseTerms
from teacher_logits.v1 import payload_pb2, tensor_pb2
from teacher_logits.wire import (
    column_kind_from_wire,
    column_kind_to_wire,
    element_type_from_wire,
    element_type_to_wire,
)
from teacher_logits.wire.selection import selection_from_wire, selection_to_wire
from teacher_logits.wire.streams import (
    stream_source_from_wire,
    stream_source_to_wire,
)


def payload_to_wire(payload: Payload) -> payload_pb2.Payload:
    """Return the message of a payload's description."""
    return payload_pb2.Payload(
        payload_id=payload.payload_id,
        key=payload_pb2.PayloadKey(
            teacher_id=payload.key.teacher_id, step=payload.key.step, shard=payload.key.shard
        )
        if payload.key
        else None,
        teacher_id=payload.teacher_id,
        teacher_revision=payload.teacher_revision,
        first_row=payload.first_row,
        row_count=payload.row_count,
        position_count=payload.position_count,
        top_k=payload.top_k,
        temperatures=payload.temperatures,
        vocabulary_size=payload.vocabulary_size,
        columns=[
            tensor_pb2.Column(
                kind=column_kind_to_wire(column.kind),
                element_type=element_type_to_wire(column.element_type),
                shape=column.shape,
                offset_bytes=column.offset_bytes,
            )
            for column in payload.columns
        ],
        size_bytes=payload.size_bytes,
        bad_row_count=payload.bad_row_count,
        whole_rows=payload.whole_rows,
        selection=None if payload.selection == TOP_K else selection_to_wire(payload.selection),
        part=None if payload.part is None else payload_pb2.ShardPart(**vars(payload.part)),
    )


def payload_from_wire(message: payload_pb2.Payload) -> Payload:
    """Return a payload's description, checked.

    Step after step they are the same but for payload id and key: what was read and checked of
    late is not read and checked again.

    Raises:
        PayloadInvalidError: the description does not hold together.
    """
    bare = payload_pb2.Payload()
    bare.CopyFrom(message)
    bare.ClearField("payload_id")
    bare.ClearField("key")
    try:
        known = _payload_of(bare.SerializeToString(deterministic=True))
    except PayloadInvalidError:
        return _read_payload(message)  # fails again, with the payload's id
    key = message.key
    found = (
        PayloadKey(teacher_id=key.teacher_id, step=key.step, shard=key.shard)
        if message.HasField("key")
        else None
    )
    # `replace` takes ten times as long, while a reader waits. The fields are the instance's own.
    payload = Payload.__new__(Payload)
    vars(payload).update(vars(known), payload_id=message.payload_id, key=found)
    return payload


_kind_of = lru_cache(maxsize=64)(column_kind_from_wire)
_type_of = lru_cache(maxsize=64)(element_type_from_wire)


@lru_cache(maxsize=64)
def _payload_of(data: bytes) -> Payload:
    return _read_payload(payload_pb2.Payload.FromString(data))


def _read_payload(message: payload_pb2.Payload) -> Payload:
    """Read all of a description but its key."""
    return check_payload(
        Payload(
            payload_id=message.payload_id,
            teacher_id=message.teacher_id,
            teacher_revision=message.teacher_revision,
            first_row=message.first_row,
            row_count=message.row_count,
            position_count=message.position_count,
            top_k=message.top_k,
            temperatures=tuple(message.temperatures),
            vocabulary_size=message.vocabulary_size,
            columns=tuple(
                Column(
                    kind=_kind_of(column.kind),
                    element_type=_type_of(column.element_type),
                    shape=tuple(column.shape),
                    offset_bytes=column.offset_bytes,
                )
                for column in message.columns
            ),
            size_bytes=message.size_bytes,
            bad_row_count=message.bad_row_count,
            whole_rows=message.whole_rows,
            selection=selection_from_wire(message.selection),
            part=_part_from_wire(message.part) if message.HasField("part") else None,
        )
    )


def _part_from_wire(message: payload_pb2.ShardPart) -> ShardPart:
    return ShardPart(
        sequence_part=message.sequence_part,
        sequence_parts=message.sequence_parts,
        first_id=message.first_id,
        stop_id=message.stop_id,
    )


def extent_to_wire(extent: Extent) -> payload_pb2.Extent:
    """Return the message of a run of bytes."""
    return payload_pb2.Extent(
        slab_id=extent.slab_id,
        offset_bytes=extent.offset_bytes,
        size_bytes=extent.size_bytes,
        slot=extent.slot,
        generation=extent.generation,
    )


def extent_from_wire(message: payload_pb2.Extent) -> Extent:
    """Return the run of bytes of a message; whether it lies in its slab is not looked at."""
    return Extent(
        slab_id=message.slab_id,
        offset_bytes=message.offset_bytes,
        size_bytes=message.size_bytes,
        slot=message.slot,
        generation=message.generation,
    )


def lease_to_wire(
    lease: LeaseTerms, *, payload: payload_pb2.Payload | None = None
) -> payload_pb2.Lease:
    """Return the message of a lease; ``payload`` is its payload's, where there is one already."""
    message = payload_pb2.Lease(
        lease_id=lease.lease_id,
        payload=payload_to_wire(lease.payload) if payload is None else payload,
        writer_id=lease.writer_id,
    )
    if lease.as_object:
        message.object.SetInParent()
    elif lease.extent is not None:
        message.slab.extent.CopyFrom(extent_to_wire(lease.extent))
        message.slab.on_device = lease.on_device
    elif lease.encoding is not None:
        message.stream.CopyFrom(stream_source_to_wire(lease.encoding))
    else:
        message.stream.SetInParent()
    return message


def lease_from_wire(message: payload_pb2.Lease) -> LeaseTerms:
    """Return a lease.

    Raises:
        RequestInvalidError: its source is of a kind this release does not know.
        PayloadInvalidError: its payload does not hold together, or is larger than its room.
    """
    source = message.WhichOneof("source")
    if source is None:
        raise RequestInvalidError(
            f"lease {message.lease_id} has a source that this release does not know"
        )
    payload = payload_from_wire(message.payload)
    extent = extent_from_wire(message.slab.extent)
    if source == "slab" and extent.size_bytes < payload.size_bytes:
        raise PayloadInvalidError(
            f"lease {message.lease_id} has a payload of {payload.size_bytes} bytes in "
            f"{extent.size_bytes} bytes of room",
            facts={"size_bytes": payload.size_bytes, "extent_bytes": extent.size_bytes},
        )
    return LeaseTerms(
        lease_id=message.lease_id,
        payload=payload,
        writer_id=message.writer_id,
        extent=extent if source == "slab" else None,
        on_device=source == "slab" and message.slab.on_device,
        encoding=stream_source_from_wire(message.stream, payload) if source == "stream" else None,
        as_object=source == "object",
    )
