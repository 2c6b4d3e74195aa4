"""Steps and reservations between their Python form and their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from teacher_logits.errors import RequestInvalidError, TeacherLogitsError
from teacher_logits.terms import (
    Mail,
    Reservation,
    RoomFreed,
    SlabsGone,
    StepFailure,
    StepGrant,
    StepWithdrawn,
    WritersCame,
)
from teacher_logits.v1 import line_pb2, payload_pb2, registry_service_pb2
from teacher_logits.wire.errors import from_status, to_status
from teacher_logits.wire.payloads import (
    extent_from_wire,
    extent_to_wire,
    lease_from_wire,
    lease_to_wire,
)
from teacher_logits.wire.transport import (
    probe_from_wire,
    probe_to_wire,
    settlement_from_wire,
    settlement_to_wire,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.terms import LeaseTerms

    LeaseMessage = Callable[[LeaseTerms], payload_pb2.Lease]


def grant_to_wire(
    grant: StepGrant | StepFailure, *, lease_message: LeaseMessage = lease_to_wire
) -> payload_pb2.StepGrant:
    """Return the message of what became of a step; ``lease_message`` makes those of its leases."""
    if isinstance(grant, StepFailure):
        status = to_status(grant.error).SerializeToString()
        return payload_pb2.StepGrant(step=grant.step, status=status)
    return payload_pb2.StepGrant(
        step=grant.step,
        leases=[lease_message(lease) for lease in grant.leases],
        real_rows=grant.real_rows,
        global_count=grant.global_count,
        settlements=[settlement_to_wire(s) for s in grant.settlements],
        awaited=[extent_to_wire(extent) for extent in grant.awaited],
    )


def grant_from_wire(message: payload_pb2.StepGrant) -> StepGrant | StepFailure:
    """Return what became of a step.

    Raises:
        RequestInvalidError: a source, reason or status that this release does not know.
        PayloadInvalidError: a payload does not hold together.
    """
    if message.status:
        return StepFailure(step=message.step, error=_error(message))
    return StepGrant(
        step=message.step,
        leases=tuple(lease_from_wire(lease) for lease in message.leases),
        real_rows=message.real_rows,
        global_count=message.global_count if message.HasField("global_count") else None,
        settlements=tuple(settlement_from_wire(s) for s in message.settlements),
        awaited=tuple(extent_from_wire(extent) for extent in message.awaited),
    )


def _error(message: payload_pb2.StepGrant) -> TeacherLogitsError:
    try:
        error = from_status(status_pb2.Status.FromString(message.status))
    except DecodeError:
        error = None
    if error is None:
        raise RequestInvalidError(f"step {message.step} failed with a status that cannot be read")
    return error


def mail_to_wire(mail: Mail, *, lease_message: LeaseMessage = lease_to_wire) -> line_pb2.LineReply:
    """Return the packet that is sent ahead over a line; ``lease_message`` as there."""
    if isinstance(mail, RoomFreed):
        freed = line_pb2.RoomFreed(
            payload_ids=mail.payload_ids, lowest_open_step=mail.lowest_open_step
        )
        return line_pb2.LineReply(freed=freed)
    if isinstance(mail, SlabsGone):
        return line_pb2.LineReply(slabs_gone=line_pb2.SlabsGone(slab_ids=mail.slab_ids))
    if isinstance(mail, WritersCame):
        came = line_pb2.WritersCame(probes=map(probe_to_wire, mail.probes))
        return line_pb2.LineReply(writers_came=came)
    if isinstance(mail, StepWithdrawn):
        return line_pb2.LineReply(withdrawn=line_pb2.StepWithdrawn(step=mail.step))
    return line_pb2.LineReply(step=grant_to_wire(mail, lease_message=lease_message))


def mail_from_wire(message: line_pb2.LineReply) -> Mail:
    """Return what came ahead over a line.

    Raises:
        RequestInvalidError: it is of a kind that this release does not know; or as for
            ``grant_from_wire``.
    """
    kind = message.WhichOneof("body")
    if kind == "freed":
        return RoomFreed(
            payload_ids=tuple(message.freed.payload_ids),
            lowest_open_step=message.freed.lowest_open_step,
        )
    if kind == "slabs_gone":
        return SlabsGone(slab_ids=tuple(message.slabs_gone.slab_ids))
    if kind == "writers_came":
        return WritersCame(probes=tuple(map(probe_from_wire, message.writers_came.probes)))
    if kind == "withdrawn":
        return StepWithdrawn(step=message.withdrawn.step)
    if kind == "step":
        return grant_from_wire(message.step)
    raise RequestInvalidError(f"{kind or 'nothing'} came ahead over a line")


def reservation_to_wire(
    reservation: Reservation,
) -> registry_service_pb2.ReservePayloadResponse:
    """Return the message of a right to write."""
    return registry_service_pb2.ReservePayloadResponse(
        payload_id=reservation.payload_id,
        is_repeat=reservation.is_repeat,
        lowest_open_step=reservation.lowest_open_step,
        host_copy=reservation.host_copy,
    )


def reservation_from_wire(message: registry_service_pb2.ReservePayloadResponse) -> Reservation:
    """Return the right to write of a message."""
    return Reservation(
        payload_id=message.payload_id,
        is_repeat=message.is_repeat,
        lowest_open_step=message.lowest_open_step,
        host_copy=message.host_copy,
    )
