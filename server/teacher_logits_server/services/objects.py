"""The object service: leased payloads go into a Ray cluster's store, and readers get tickets.

A call waits, without polling, until its payload is there: for its put, and before that for room in
the budget, as long as its deadline and ``default_wait`` allow.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from teacher_logits.v1 import object_service_pb2 as messages
from teacher_logits.v1 import object_service_pb2_grpc as stubs
from teacher_logits.wire.objects import ticket_to_wire
from teacher_logits.wire.session import duration_from_wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from grpc.aio import ServicerContext

    from teacher_logits.terms import ObjectTicket, StoredTicket
    from teacher_logits_server.exporters.ray_object import RayObjectExporter
    from teacher_logits_server.services.waiting import Waiting

T = TypeVar("T")


class ObjectService(stubs.ObjectServiceServicer):
    """Says who hands out the reference of a leased payload."""

    def __init__(self, *, exporter: RayObjectExporter, waiting: Waiting) -> None:
        self._exporter = exporter
        self._waiting = waiting
        exporter.on_change(waiting.objects.ring)

    async def PutObject(
        self,
        request: messages.PutObjectRequest,
        context: ServicerContext[messages.PutObjectRequest, messages.PutObjectResponse],
    ) -> messages.PutObjectResponse:
        """Have a leased payload in the store, and return its lease's ticket."""
        session_id, lease_id = request.session_id, request.lease_id
        seconds = self._waiting.seconds_for(context)
        room_seconds = seconds
        if request.HasField("room_wait"):
            wait = duration_from_wire(request.room_wait, field="room_wait")
            room_seconds = min(seconds, wait.total_seconds())
        found: ObjectTicket | StoredTicket | None = None

        async def look() -> ObjectTicket | StoredTicket | None:
            return self._exporter.ticket(session_id, lease_id, seconds=room_seconds)

        async def has_room() -> bool | None:
            nonlocal found
            found = await look()
            return None if found is None and self._exporter.waits(lease_id) else True

        try:
            await self._until(has_room, session_id, lease_id, room_seconds)
            left = self._waiting.seconds_for(context)
            if found is None:
                return ticket_to_wire(await self._until(look, session_id, lease_id, left))
        finally:
            self._exporter.give_up(lease_id)
        return ticket_to_wire(found)

    async def _until(
        self,
        look: Callable[[], Awaitable[T | None]],
        session_id: str,
        lease_id: str,
        seconds: float,
    ) -> T:
        too_late = partial(self._exporter.too_late, lease_id)
        bell = self._waiting.objects
        return await self._waiting.until(
            look, bell=bell, seconds=seconds, too_late=too_late, session_id=session_id
        )
