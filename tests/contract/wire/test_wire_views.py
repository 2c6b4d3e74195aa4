"""What a server holds crosses the wire whole, and no field of a view is forgotten."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.pool import PoolUsage
from teacher_logits.profiles import TeacherProfile
from teacher_logits.transport import Refusal, RefusalReason, Settlement, Transport
from teacher_logits.v1 import operator_service_pb2 as messages
from teacher_logits.views import (
    DeviceSlabView,
    LeaseView,
    MetricView,
    NodeStoreView,
    ObjectStoreView,
    QueueView,
    Reclaimed,
    RegisteredView,
    ReplicaView,
    ServerView,
    SessionView,
    StepView,
)
from teacher_logits.wire.views import (
    reclaimed_from_wire,
    reclaimed_to_wire,
    server_view_from_wire,
    server_view_to_wire,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

counts = st.integers(0, 2**63 - 1)
spans = st.timedeltas(timedelta(0), timedelta(days=9999))

REFUSAL = Refusal(
    transport=Transport.CUDA_IPC, reason=RefusalReason.NOT_OFFERED, message="no device"
)
FULL = ServerView(
    epoch="e",
    version="1.2",
    uptime=timedelta(hours=1),
    draining=True,
    teachers=(
        TeacherProfile(teacher_id="t", vocabulary_size=9, head_rows=9, top_k=2, max_row_tokens=5),
    ),
    sessions=(
        SessionView(
            session_id="s",
            student_id="trainer",
            teacher_id="t",
            data_parallel_rank=3,
            settlements=(
                Settlement(writer_id="server", transport=Transport.STREAM, refusals=(REFUSAL,)),
            ),
            liveness="line",
            age=timedelta(seconds=2),
            silent=timedelta(milliseconds=5),
            pid=4711,
            host_name="node",
            lease_count=1,
            leased_bytes=4096,
            kind="student",
            state="unresponsive",
        ),
    ),
    leases=(
        LeaseView(
            lease_id="l",
            session_id="s",
            payload_id="p",
            size_bytes=4096,
            age=timedelta(seconds=1),
            quarantined=True,
            doubt="line_ended",
        ),
    ),
    pool=PoolUsage(
        budget_bytes=100,
        committed_bytes=50,
        used_bytes=20,
        quarantined_bytes=10,
        slab_count=2,
        extent_count=3,
    ),
    queue=QueueView(
        waiting_requests=1,
        waiting_tokens=2,
        running_requests=3,
        scored_requests=4,
        scored_tokens=5,
    ),
    steps=(
        StepView(
            teacher_id="t",
            step=7,
            stage="complete",
            sealed_rows=8,
            real_rows=6,
            waiting_ranks=2,
            waits_for=("trainer:0", "trainer:3"),
        ),
    ),
    registered=RegisteredView(
        payload_count=1,
        payload_bytes=2,
        slab_count=3,
        committed_bytes=4,
        used_bytes=5,
        quarantined_bytes=6,
        device_slabs=(
            DeviceSlabView(
                slab_id="slab",
                writer_id="publisher-0",
                session_id="s",
                device_uuid="GPU-0",
                size_bytes=7,
                used_bytes=6,
                reader_count=2,
            ),
        ),
    ),
    object_store=ObjectStoreView(
        state="joined",
        budget_bytes=1,
        used_bytes=2,
        object_count=3,
        waiting_count=4,
        store_bytes=5,
        store_used_bytes=6,
        spilled_bytes=7,
        holder="holder",
        holder_restarts=8,
        nodes=(
            NodeStoreView(
                node_id="n0",
                budget_bytes=1,
                used_bytes=2,
                object_count=3,
                holder="of n0",
                holder_restarts=4,
            ),
        ),
    ),
    replicas=(
        ReplicaView(
            number=1,
            state="unresponsive",
            node_id="n0",
            host_name="node",
            pid=4712,
            outstanding_passes=2,
            outstanding_tokens=8192,
            restarts=3,
            reason="gone",
            teacher_id="own",
        ),
    ),
    queues=(
        QueueView(
            waiting_requests=1,
            waiting_tokens=2,
            running_requests=3,
            scored_requests=4,
            scored_tokens=5,
            teacher_id="own",
            serving=True,
        ),
    ),
    metrics=(
        MetricView(
            name="teacher_logits_refusals_total",
            labels=(("reason", "DRAINING"), ("surface", "rpc")),
            value=2.5,
        ),
    ),
)


def sent(view: ServerView) -> ServerView:
    """A view after its bytes have crossed."""
    data = server_view_to_wire(view).SerializeToString()
    return server_view_from_wire(messages.InspectResponse.FromString(data))


def unset(message: Message) -> Iterator[str]:
    """Fields of the inspection's own messages that were left at their defaults."""
    there = {field.name for field, _ in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name not in there:
            yield f"{message.DESCRIPTOR.name}.{field.name}"


def test_a_view_crosses_whole() -> None:
    assert sent(FULL) == FULL


def test_every_field_of_the_messages_is_filled() -> None:
    message = server_view_to_wire(FULL)
    parts = (
        message,
        *message.sessions,
        *message.leases,
        message.pool,
        *message.queues,
        *message.steps,
        message.registered,
        *message.registered.device_slabs,
        message.object_store,
        *message.metrics,
    )

    assert [name for part in parts for name in unset(part)] == []


QUEUE_COUNTS = [each.name for each in dataclasses.fields(QueueView) if each.type == "int"]


@given(
    uptime=spans,
    queue=st.builds(QueueView, **dict.fromkeys(QUEUE_COUNTS, counts), teacher_id=st.text()),
    lease=st.builds(
        LeaseView,
        lease_id=st.text(),
        session_id=st.text(),
        payload_id=st.text(),
        size_bytes=counts,
        age=spans,
        quarantined=st.booleans(),
        doubt=st.text(),
    ),
)
def test_any_numbers_cross(uptime: timedelta, queue: QueueView, lease: LeaseView) -> None:
    view = dataclasses.replace(FULL, uptime=uptime, queue=queue, leases=(lease, lease))

    assert sent(view) == view


@given(reclaimed=st.builds(Reclaimed, freed_bytes=counts, lease_count=counts, session_count=counts))
def test_what_a_reclaim_came_to_crosses_whole(reclaimed: Reclaimed) -> None:
    data = reclaimed_to_wire(reclaimed).SerializeToString()

    assert reclaimed_from_wire(messages.ReclaimResponse.FromString(data)) == reclaimed


def test_a_server_that_has_joined_no_cluster_has_no_store() -> None:
    assert sent(dataclasses.replace(FULL, object_store=None)).object_store is None


def test_a_session_that_still_opens_has_settled_nothing() -> None:
    opening = dataclasses.replace(FULL.sessions[0], settlements=(), pid=0)
    view = dataclasses.replace(FULL, sessions=(opening,))

    assert sent(view).sessions == (opening,)


def test_clients_of_others_are_told_the_free_bytes() -> None:
    assert server_view_to_wire(FULL).pool.free_bytes == FULL.pool.free_bytes == 70
