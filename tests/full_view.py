"""A server's view with something in every field, for who must forget none."""

from datetime import timedelta

from teacher_logits.pool import PoolUsage
from teacher_logits.profiles import TeacherProfile
from teacher_logits.transport import Refusal, RefusalReason, Settlement, Transport
from teacher_logits.views import (
    DeviceSlabView,
    LeaseView,
    MetricView,
    NodeStoreView,
    ObjectStoreView,
    QueueView,
    RegisteredView,
    ReplicaView,
    ServerView,
    SessionView,
    StepView,
)

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
            name="teacher_logits_granted_bytes_total", labels=(("transport", "stream"),), value=1.0
        ),
        MetricView(
            name="teacher_logits_refusals_total",
            labels=(("reason", "DRAINING"), ("surface", "rpc")),
            value=2.5,
        ),
    ),
)
