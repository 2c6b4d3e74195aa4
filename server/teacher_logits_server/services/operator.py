"""The service of whoever keeps the server running: what it holds, and what is taken back by force.

Whether a local session's process is stopped is looked up as it is asked for, by the number and
the beginning of the process that the broker proved.
"""

from __future__ import annotations

import logging
from dataclasses import MISSING, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits import __version__
from teacher_logits.errors import RequestInvalidError
from teacher_logits.v1 import operator_service_pb2 as messages
from teacher_logits.v1 import operator_service_pb2_grpc as stubs
from teacher_logits.views import QueueView, ServerView
from teacher_logits.wire.views import reclaimed_to_wire, server_view_to_wire
from teacher_logits_server.broker.peers import looked_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from grpc.aio import ServicerContext

    from teacher_logits.clock import Clock
    from teacher_logits.views import (
        MetricView,
        NodeStoreView,
        ObjectStoreView,
        Reclaimed,
        ReplicaView,
    )
    from teacher_logits_server.exporters.ray_object import RayObjectExporter
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.scorer import Scorer
    from teacher_logits_server.services.publishing import PublisherCalls

_log = logging.getLogger(__name__)


class OperatorService(stubs.OperatorServiceServicer):
    """Shows sessions, leases, steps, the pool and the queue, and reclaims room.

    Args:
        publishing: hears of seals before a publisher's session is ended by force.
        scorers: of the server's own teachers, by their ids.
        objects: None where it has joined no Ray cluster.
        replicas: those of their engines, as they are when it is called.
        metrics: what the server has counted, likewise.
        node_stores: where what these compute stays, likewise.
        able: whether each of them takes requests, likewise.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        publishing: PublisherCalls,
        scorers: Mapping[str, Scorer],
        clock: Clock,
        objects: RayObjectExporter | None = None,
        replicas: Callable[[], tuple[ReplicaView, ...]] = tuple,
        metrics: Callable[[], tuple[MetricView, ...]] = tuple,
        node_stores: Callable[[], tuple[NodeStoreView, ...]] = tuple,
        able: Callable[[], Mapping[str, bool]] = dict,
    ) -> None:
        self._ledger = ledger
        self._publishing = publishing
        self._scorers = scorers
        self._clock = clock
        self._objects = objects
        self._node_stores = node_stores
        self._replicas = replicas
        self._metrics = metrics
        self._able = able
        self._started_at = clock.now()

    async def Inspect(
        self,
        request: messages.InspectRequest,
        context: ServicerContext[messages.InspectRequest, messages.InspectResponse],
    ) -> messages.InspectResponse:
        """Describe what the server holds."""
        held, queues = self._ledger.view(), self._queues()
        view = ServerView(
            epoch=self._ledger.epoch,
            version=__version__,
            uptime=timedelta(seconds=self._clock.now() - self._started_at),
            draining=held.draining,
            teachers=held.teachers,
            sessions=looked_at(held.sessions, self._ledger.processes()),
            leases=held.leases,
            pool=held.pool,
            steps=held.steps,
            registered=held.registered,
            object_store=None if self._objects is None else self._view_objects(self._objects),
            queue=sum_of(queues),
            replicas=self._replicas(),
            metrics=self._metrics(),
            queues=queues,
        )
        return server_view_to_wire(view)

    def _queues(self) -> tuple[QueueView, ...]:
        able = self._able()
        return tuple(
            replace(scorer.queue(), teacher_id=name, serving=able.get(name, False))
            for name, scorer in self._scorers.items()
        )

    async def Reclaim(
        self,
        request: messages.ReclaimRequest,
        context: ServicerContext[messages.ReclaimRequest, messages.ReclaimResponse],
    ) -> messages.ReclaimResponse:
        """End leases by force, and say what came free."""
        what = request.WhichOneof("what") or "nothing"
        named = {"what": what.removesuffix("_id")}
        if what != "quarantined":  # which is all of it, and has no name
            named["id"] = str(getattr(request, what, ""))
        reclaimed = self._reclaim(request, what)
        _log.warning(
            "reclaimed by force",
            extra={
                "facts": {
                    **named,
                    "freed_bytes": reclaimed.freed_bytes,
                    "leases": reclaimed.lease_count,
                    "sessions": reclaimed.session_count,
                }
            },
        )
        return reclaimed_to_wire(reclaimed)

    def _reclaim(self, request: messages.ReclaimRequest, what: str) -> Reclaimed:
        if what == "session_id":
            self._publishing.hear_seals(request.session_id)
            return self._ledger.reclaim_session(request.session_id)
        if what == "lease_id":
            return self._ledger.reclaim_lease(request.lease_id)
        if what == "teacher_id":
            return self._ledger.reclaim_teacher(request.teacher_id)
        if request.quarantined:
            return self._ledger.reclaim_quarantined()
        raise RequestInvalidError(
            "nothing to reclaim was named: give a session id, a lease id, a teacher "
            "id, or all in quarantine"
        )

    def _view_objects(self, objects: RayObjectExporter) -> ObjectStoreView:
        return replace(objects.view(), nodes=self._node_stores())


def sum_of(queues: Sequence[QueueView]) -> QueueView:
    """Return the queues of several teachers as one; nothing waits where there is none."""
    names = [each.name for each in fields(QueueView) if each.default is MISSING]
    return QueueView(**{name: sum(getattr(each, name) for each in queues) for name in names})
