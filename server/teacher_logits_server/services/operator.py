"""The service of whoever keeps the server running: everything it holds, at one instant."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits import __version__
from teacher_logits.v1 import operator_service_pb2 as messages
from teacher_logits.v1 import operator_service_pb2_grpc as stubs
from teacher_logits.wire import teacher_to_wire
from teacher_logits.wire_session import duration_to_wire, settlement_to_wire

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

    from teacher_logits.clock import Clock
    from teacher_logits.pool import PoolUsage
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.scorer import QueueView, Scorer
    from teacher_logits_server.views import LeaseView, SessionView


class OperatorService(stubs.OperatorServiceServicer):
    """Shows sessions, leases, the pool and the queue."""

    def __init__(self, *, ledger: Ledger, scorer: Scorer, clock: Clock) -> None:
        self._ledger = ledger
        self._scorer = scorer
        self._clock = clock
        self._started_at = clock.now()

    async def Inspect(
        self,
        request: messages.InspectRequest,
        context: ServicerContext[messages.InspectRequest, messages.InspectResponse],
    ) -> messages.InspectResponse:
        """Describe what the server holds."""
        view = self._ledger.view()
        uptime = timedelta(seconds=self._clock.now() - self._started_at)
        return messages.InspectResponse(
            epoch=self._ledger.epoch,
            version=__version__,
            uptime=duration_to_wire(uptime),
            draining=view.draining,
            teachers=[teacher_to_wire(self._ledger.teacher)],
            sessions=[_session(each) for each in view.sessions],
            leases=[_lease(each) for each in view.leases],
            pool=_pool(view.pool),
            queue=_queue(self._scorer.queue()),
        )


def _session(view: SessionView) -> messages.SessionState:
    return messages.SessionState(
        session_id=view.session_id,
        student_id=view.student_id,
        teacher_id=view.teacher_id,
        data_parallel_rank=view.data_parallel_rank,
        transports=[settlement_to_wire(each) for each in view.settlements],
        liveness=view.liveness,
        age=duration_to_wire(view.age),
        silent=duration_to_wire(view.silent),
        pid=view.pid,
        host_name=view.host_name,
        lease_count=view.lease_count,
        leased_bytes=view.leased_bytes,
    )


def _lease(view: LeaseView) -> messages.LeaseState:
    return messages.LeaseState(
        lease_id=view.lease_id,
        session_id=view.session_id,
        payload_id=view.payload_id,
        size_bytes=view.size_bytes,
        age=duration_to_wire(view.age),
        quarantined=view.quarantined,
    )


def _pool(usage: PoolUsage) -> messages.PoolState:
    return messages.PoolState(
        budget_bytes=usage.budget_bytes,
        committed_bytes=usage.committed_bytes,
        used_bytes=usage.used_bytes,
        quarantined_bytes=usage.quarantined_bytes,
        free_bytes=usage.free_bytes,
        slab_count=usage.slab_count,
        extent_count=usage.extent_count,
    )


def _queue(view: QueueView) -> messages.QueueState:
    return messages.QueueState(
        waiting_requests=view.waiting_requests,
        waiting_tokens=view.waiting_tokens,
        running_requests=view.running_requests,
        scored_requests=view.scored_requests,
        scored_tokens=view.scored_tokens,
    )
