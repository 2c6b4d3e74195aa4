"""What the server says to whoever it admits, before it is settled where that one lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.v1.teacher_logits_service_pb2 import OpenSessionRequest, OpenSessionResponse
from teacher_logits.wire.objects import holder_from_wire
from teacher_logits.wire.session import session_from_wire
from teacher_logits.wire.transport import probe_from_wire
from teacher_logits_client.calls.told import Telling

if TYPE_CHECKING:
    import grpc

    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.terms import RayHolder, SessionTerms


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """A session that was admitted and has yet to prove where it lives.

    ``device_probes`` is device memory of the writers that it needs, to be opened on trial;
    ``ray_holder`` is who to ask for a challenge in the server's Ray cluster, if it has one.
    """

    terms: SessionTerms
    broker_path: str
    nonce: bytes = field(repr=False)
    device_probes: tuple[DeviceProbe, ...] = ()
    ray_holder: RayHolder | None = None


def opening_call(
    channel: grpc.Channel, *, what: str
) -> Telling[OpenSessionRequest, OpenSessionResponse]:
    """Return the call that opens a session, which tells what it waits for; see ``Telling``."""
    path = "/teacher_logits.v1.TeacherLogitsService/OpenSession"
    return Telling(channel, path, reply=OpenSessionResponse, what=what)


def opened_from_wire(reply: OpenSessionResponse) -> OpenedSession:
    """Read what the server said."""
    return OpenedSession(
        terms=session_from_wire(reply.session),
        broker_path=reply.broker_path,
        nonce=reply.nonce,
        device_probes=tuple(map(probe_from_wire, reply.device_probes)),
        ray_holder=holder_from_wire(reply.ray_holder) if reply.HasField("ray_holder") else None,
    )
