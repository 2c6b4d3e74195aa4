"""Views of a server between their Python form and their messages."""

from __future__ import annotations

from teacher_logits.pool import PoolUsage
from teacher_logits.v1 import operator_service_pb2 as messages
from teacher_logits.views import (
    DeviceSlabView,
    LeaseView,
    MetricView,
    QueueView,
    Reclaimed,
    RegisteredView,
    ServerView,
    SessionView,
    StepView,
)
from teacher_logits.wire import teacher_from_wire, teacher_to_wire
from teacher_logits.wire.objects import store_from_wire, store_to_wire
from teacher_logits.wire.replica import replica_from_wire, replica_to_wire
from teacher_logits.wire.session import duration_from_wire, duration_to_wire
from teacher_logits.wire.transport import settlement_from_wire, settlement_to_wire


def server_view_to_wire(view: ServerView) -> messages.InspectResponse:
    """Return the message of a server's view."""
    return messages.InspectResponse(
        epoch=view.epoch,
        version=view.version,
        uptime=duration_to_wire(view.uptime),
        draining=view.draining,
        teachers=[teacher_to_wire(each) for each in view.teachers],
        sessions=[_session_to_wire(each) for each in view.sessions],
        leases=[_lease_to_wire(each) for each in view.leases],
        pool=_pool_to_wire(view.pool),
        queue=_queue_to_wire(view.queue),
        steps=[_step_to_wire(each) for each in view.steps],
        registered=_registered_to_wire(view.registered),
        object_store=None if view.object_store is None else store_to_wire(view.object_store),
        replicas=[replica_to_wire(each) for each in view.replicas],
        metrics=[_metric_to_wire(each) for each in view.metrics],
        queues=[_queue_to_wire(each) for each in view.queues],
    )


def server_view_from_wire(message: messages.InspectResponse) -> ServerView:
    """Return the view of a message.

    Raises:
        RequestInvalidError: a transport, a refusal's reason or a span of time is not known to this
            release.
    """
    return ServerView(
        epoch=message.epoch,
        version=message.version,
        uptime=duration_from_wire(message.uptime, field="uptime"),
        draining=message.draining,
        teachers=tuple(teacher_from_wire(each) for each in message.teachers),
        sessions=tuple(_session_from_wire(each) for each in message.sessions),
        leases=tuple(_lease_from_wire(each) for each in message.leases),
        pool=_pool_from_wire(message.pool),
        queue=_queue_from_wire(message.queue),
        steps=tuple(_step_from_wire(each) for each in message.steps),
        registered=_registered_from_wire(message.registered),
        object_store=store_from_wire(message.object_store)
        if message.HasField("object_store")
        else None,
        replicas=tuple(replica_from_wire(each) for each in message.replicas),
        metrics=tuple(_metric_from_wire(each) for each in message.metrics),
        queues=tuple(_queue_from_wire(each) for each in message.queues),
    )


def reclaimed_to_wire(reclaimed: Reclaimed) -> messages.ReclaimResponse:
    """Return the message of what a reclaim came to."""
    return messages.ReclaimResponse(
        freed_bytes=reclaimed.freed_bytes,
        lease_count=reclaimed.lease_count,
        session_count=reclaimed.session_count,
    )


def reclaimed_from_wire(message: messages.ReclaimResponse) -> Reclaimed:
    """Return what a reclaim came to."""
    return Reclaimed(
        freed_bytes=message.freed_bytes,
        lease_count=message.lease_count,
        session_count=message.session_count,
    )


def _session_to_wire(view: SessionView) -> messages.SessionState:
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
        kind=view.kind,
        state=view.state,
    )


def _session_from_wire(message: messages.SessionState) -> SessionView:
    return SessionView(
        session_id=message.session_id,
        student_id=message.student_id,
        teacher_id=message.teacher_id,
        data_parallel_rank=message.data_parallel_rank,
        settlements=tuple(settlement_from_wire(each) for each in message.transports),
        liveness=message.liveness,
        age=duration_from_wire(message.age, field="age"),
        silent=duration_from_wire(message.silent, field="silent"),
        pid=message.pid,
        host_name=message.host_name,
        lease_count=message.lease_count,
        leased_bytes=message.leased_bytes,
        kind=message.kind,
        state=message.state,
    )


def _lease_to_wire(view: LeaseView) -> messages.LeaseState:
    return messages.LeaseState(
        lease_id=view.lease_id,
        session_id=view.session_id,
        payload_id=view.payload_id,
        size_bytes=view.size_bytes,
        age=duration_to_wire(view.age),
        quarantined=view.quarantined,
        doubt=view.doubt,
    )


def _lease_from_wire(message: messages.LeaseState) -> LeaseView:
    return LeaseView(
        lease_id=message.lease_id,
        session_id=message.session_id,
        payload_id=message.payload_id,
        size_bytes=message.size_bytes,
        age=duration_from_wire(message.age, field="age"),
        quarantined=message.quarantined,
        doubt=message.doubt,
    )


def _pool_to_wire(usage: PoolUsage) -> messages.PoolState:
    return messages.PoolState(
        budget_bytes=usage.budget_bytes,
        committed_bytes=usage.committed_bytes,
        used_bytes=usage.used_bytes,
        quarantined_bytes=usage.quarantined_bytes,
        free_bytes=usage.free_bytes,
        slab_count=usage.slab_count,
        extent_count=usage.extent_count,
    )


def _pool_from_wire(message: messages.PoolState) -> PoolUsage:
    # free_bytes follows from the others; it is sent for clients that are not ours.
    return PoolUsage(
        budget_bytes=message.budget_bytes,
        committed_bytes=message.committed_bytes,
        used_bytes=message.used_bytes,
        quarantined_bytes=message.quarantined_bytes,
        slab_count=message.slab_count,
        extent_count=message.extent_count,
    )


def _queue_to_wire(view: QueueView) -> messages.QueueState:
    return messages.QueueState(
        waiting_requests=view.waiting_requests,
        waiting_tokens=view.waiting_tokens,
        running_requests=view.running_requests,
        scored_requests=view.scored_requests,
        scored_tokens=view.scored_tokens,
        teacher_id=view.teacher_id,
        serving=view.serving,
    )


def _queue_from_wire(message: messages.QueueState) -> QueueView:
    return QueueView(
        waiting_requests=message.waiting_requests,
        waiting_tokens=message.waiting_tokens,
        running_requests=message.running_requests,
        scored_requests=message.scored_requests,
        scored_tokens=message.scored_tokens,
        teacher_id=message.teacher_id,
        serving=message.serving,
    )


def _step_to_wire(view: StepView) -> messages.StepState:
    return messages.StepState(
        teacher_id=view.teacher_id,
        step=view.step,
        stage=view.stage,
        sealed_rows=view.sealed_rows,
        real_rows=view.real_rows,
        waiting_ranks=view.waiting_ranks,
        waits_for=view.waits_for,
    )


def _step_from_wire(message: messages.StepState) -> StepView:
    return StepView(
        teacher_id=message.teacher_id,
        step=message.step,
        stage=message.stage,
        sealed_rows=message.sealed_rows,
        real_rows=message.real_rows,
        waiting_ranks=message.waiting_ranks,
        waits_for=tuple(message.waits_for),
    )


def _registered_to_wire(view: RegisteredView) -> messages.RegisteredState:
    return messages.RegisteredState(
        payload_count=view.payload_count,
        payload_bytes=view.payload_bytes,
        slab_count=view.slab_count,
        committed_bytes=view.committed_bytes,
        used_bytes=view.used_bytes,
        quarantined_bytes=view.quarantined_bytes,
        device_slabs=[_device_slab_to_wire(each) for each in view.device_slabs],
    )


def _registered_from_wire(message: messages.RegisteredState) -> RegisteredView:
    return RegisteredView(
        payload_count=message.payload_count,
        payload_bytes=message.payload_bytes,
        slab_count=message.slab_count,
        committed_bytes=message.committed_bytes,
        used_bytes=message.used_bytes,
        quarantined_bytes=message.quarantined_bytes,
        device_slabs=tuple(_device_slab_from_wire(each) for each in message.device_slabs),
    )


def _device_slab_to_wire(view: DeviceSlabView) -> messages.DeviceSlabState:
    return messages.DeviceSlabState(
        slab_id=view.slab_id,
        writer_id=view.writer_id,
        session_id=view.session_id,
        device_uuid=view.device_uuid,
        size_bytes=view.size_bytes,
        used_bytes=view.used_bytes,
        reader_count=view.reader_count,
    )


def _device_slab_from_wire(message: messages.DeviceSlabState) -> DeviceSlabView:
    return DeviceSlabView(
        slab_id=message.slab_id,
        writer_id=message.writer_id,
        session_id=message.session_id,
        device_uuid=message.device_uuid,
        size_bytes=message.size_bytes,
        used_bytes=message.used_bytes,
        reader_count=message.reader_count,
    )


def _metric_to_wire(view: MetricView) -> messages.MetricSample:
    return messages.MetricSample(name=view.name, labels=dict(view.labels), value=view.value)


def _metric_from_wire(message: messages.MetricSample) -> MetricView:
    labels = tuple(sorted(message.labels.items()))
    return MetricView(name=message.name, labels=labels, value=message.value)
