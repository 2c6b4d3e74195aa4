"""The object service: leased payloads go into a Ray cluster's store, and readers get tickets.

A call waits, without polling, until its payload is there: for its put, and before that for room in
the budget, as long as its deadline and ``default_wait`` allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.v1 import object_service_pb2 as messages
from teacher_logits.v1 import object_service_pb2_grpc as stubs
from teacher_logits.wire.objects import ticket_to_wire

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.terms import ObjectTicket
    from teacher_logits_server.exporters.ray_object import RayObjectExporter
    from teacher_logits_server.services.waiting import Waiting


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

        async def look() -> ObjectTicket | None:
            return self._exporter.ticket(session_id, lease_id, seconds=seconds)

        def too_late(waited: float) -> TeacherLogitsError:
            return self._exporter.too_late(lease_id, waited)

        try:
            ticket = await self._waiting.until(
                look, bell=self._waiting.objects, seconds=seconds, too_late=too_late
            )
        finally:
            self._exporter.give_up(lease_id)
        return ticket_to_wire(ticket)
