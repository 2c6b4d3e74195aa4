"""Calls of the object service: payloads into a Ray cluster's store."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.v1 import object_service_pb2 as messages
from teacher_logits.v1 import object_service_pb2_grpc as stubs
from teacher_logits.wire.objects import ticket_from_wire
from teacher_logits.wire.session import duration_to_wire

if TYPE_CHECKING:
    from teacher_logits.terms import ObjectTicket, StoredTicket
    from teacher_logits_client.calls.channels import Channels
    from teacher_logits_client.calls.invoking import Invoker


class ObjectCalls:
    """What a reader of objects calls."""

    def __init__(self, channels: Channels, *, invoke: Invoker) -> None:
        self._service = stubs.ObjectServiceStub(channels.control)
        self._invoke = invoke

    def put(
        self, session_id: str, lease_id: str, *, timeout: float, room_wait: float
    ) -> ObjectTicket | StoredTicket:
        """Have a leased payload in the store; return what the holder is to be shown.

        It waits for room there ``room_wait`` seconds at most.

        Raises:
            ObjectLostError: the server has no cluster any more, or could not put it.
            PoolFullError: the store had no room for it.
            ProducerLostError: it lay where it was computed, and is lost with that node.
        """
        reply = self._invoke(
            self._service.PutObject,
            messages.PutObjectRequest(
                session_id=session_id,
                lease_id=lease_id,
                room_wait=duration_to_wire(timedelta(seconds=max(0.0, room_wait))),
            ),
            what=f"the payload of lease {lease_id} in the object store",
            timeout=timeout,
        )
        return ticket_from_wire(reply)
