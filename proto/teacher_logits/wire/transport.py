"""Transports, device memory and proofs between their Python form and their messages."""

from __future__ import annotations

from teacher_logits.device_memory import (
    PROBE_BYTES,
    DeviceMemoryPart,
    DeviceProbe,
    ExportedMemory,
)
from teacher_logits.devices.ranges import check_claimed
from teacher_logits.errors import RequestInvalidError
from teacher_logits.transport import Refusal, RefusalReason, Settlement
from teacher_logits.v1 import device_pb2, transport_pb2
from teacher_logits.wire import transport_from_wire, transport_to_wire


def refusal_to_wire(refusal: Refusal) -> transport_pb2.TransportRefusal:
    """Return the message of a refusal."""
    return transport_pb2.TransportRefusal(
        transport=transport_to_wire(refusal.transport),
        reason=refusal.reason.value,
        message=refusal.message,
        writer_id=refusal.writer_id,
    )


def refusal_from_wire(message: transport_pb2.TransportRefusal) -> Refusal:
    """Return the refusal of a message.

    Raises:
        RequestInvalidError: the reason is not known to this release.
    """
    try:
        reason = RefusalReason(message.reason)
    except ValueError:
        raise RequestInvalidError(
            f"{message.reason[:80]!r} is no refusal's reason that this release knows"
        ) from None
    return Refusal(
        transport=transport_from_wire(message.transport),
        reason=reason,
        message=message.message,
        writer_id=message.writer_id,
    )


def settlement_to_wire(settlement: Settlement) -> transport_pb2.SettledTransport:
    """Return the message of one writer's settlement."""
    return transport_pb2.SettledTransport(
        writer_id=settlement.writer_id,
        transport=transport_to_wire(settlement.transport)
        if settlement.transport
        else transport_pb2.TRANSPORT_UNSPECIFIED,
        refusals=[refusal_to_wire(r) for r in settlement.refusals],
        probe=None if settlement.probe is None else probe_to_wire(settlement.probe),
    )


def settlement_from_wire(message: transport_pb2.SettledTransport) -> Settlement:
    """Return the settlement of a message.

    Raises:
        RequestInvalidError: a word that this release does not know, or a probe that cannot be.
    """
    return Settlement(
        writer_id=message.writer_id,
        transport=transport_from_wire(message.transport) if message.transport else None,
        refusals=tuple(refusal_from_wire(r) for r in message.refusals),
        probe=probe_from_wire(message.probe) if message.HasField("probe") else None,
    )


def part_to_wire(part: DeviceMemoryPart) -> device_pb2.DeviceMemory:
    """Return the message of a slab's part in device memory."""
    return _memory_to_wire(part.memory, part.size_bytes)


def part_from_wire(message: device_pb2.DeviceMemory, *, slab_id: str) -> DeviceMemoryPart:
    """Return a slab's part in device memory, checked as far as its numbers go.

    Raises:
        RequestInvalidError: handle, UUID or numbers that cannot be.
    """
    size_bytes = message.size_bytes
    what = f"the device memory of slab {slab_id[:128]!r}"
    memory = check_claimed(_memory_from_wire(message), what=what, size_bytes=size_bytes)
    return DeviceMemoryPart(memory=memory, size_bytes=size_bytes)


def probe_to_wire(probe: DeviceProbe) -> device_pb2.DeviceProbe:
    """Return the message of a probe."""
    return device_pb2.DeviceProbe(
        writer_id=probe.writer_id,
        memory=_memory_to_wire(probe.memory, PROBE_BYTES),
        pid_namespace=probe.pid_namespace,
        host=probe.host,
    )


def probe_from_wire(message: device_pb2.DeviceProbe) -> DeviceProbe:
    """Return the probe of a message, checked as far as its numbers go.

    Raises:
        RequestInvalidError: handle, UUID or numbers that cannot be.
    """
    whose = f"writer {message.writer_id[:128]!r}" if message.writer_id else "the publisher"
    memory = _memory_from_wire(message.memory)
    return DeviceProbe(
        writer_id=message.writer_id,
        memory=check_claimed(memory, what=f"the probe of {whose}", size_bytes=PROBE_BYTES),
        pid_namespace=message.pid_namespace,
        host=message.host,
    )


def _memory_to_wire(memory: ExportedMemory, size_bytes: int) -> device_pb2.DeviceMemory:
    return device_pb2.DeviceMemory(
        handle=memory.handle,
        device_uuid=memory.device_uuid,
        base_offset_bytes=memory.base_offset_bytes,
        allocation_bytes=memory.allocation_bytes,
        size_bytes=size_bytes,
    )


def _memory_from_wire(message: device_pb2.DeviceMemory) -> ExportedMemory:
    return ExportedMemory(
        handle=message.handle,
        device_uuid=message.device_uuid,
        base_offset_bytes=message.base_offset_bytes,
        allocation_bytes=message.allocation_bytes,
    )
