"""Views of servers that are not there, with counts, for frames and rates."""

from datetime import timedelta

from teacher_logits.pool import PoolUsage
from teacher_logits.profiles import TeacherProfile
from teacher_logits.transport import Settlement, Transport
from teacher_logits.views import (
    MetricView,
    QueueView,
    RegisteredView,
    ServerView,
    SessionView,
    StepView,
)
from teacher_logits_client.watching import rates

MIB = 1 << 20


def a_session(number: int = 1, **given: object) -> SessionView:
    """A student's session; ``given`` are fields."""
    values = {
        "session_id": f"s-e1-{number:06}tail",
        "student_id": f"trainer-{number}",
        "teacher_id": "own",
        "data_parallel_rank": number,
        "settlements": (Settlement(writer_id="server", transport=Transport.SHARED_MEMORY),),
        "liveness": "line",
        "age": timedelta(minutes=4),
        "silent": timedelta(seconds=number),
        "pid": 4711,
        "host_name": "node-7",
        "lease_count": number,
        "leased_bytes": number * MIB,
        **given,
    }
    return SessionView(**values)  # type: ignore[arg-type]


def a_teacher(name: str) -> TeacherProfile:
    return TeacherProfile(
        teacher_id=name, vocabulary_size=256, head_rows=256, top_k=8, max_row_tokens=64
    )


def metric(name: str, value: float, **labels: str) -> MetricView:
    return MetricView(name=name, labels=tuple(sorted(labels.items())), value=value)


def counted(times: float) -> tuple[MetricView, ...]:
    """What a server has counted after so many seconds of the same work."""
    return (
        metric(rates.GRANTED_BYTES, 3 * MIB * times, transport="shared_memory"),
        metric(rates.GRANTED_LEASES, 2 * times, transport="shared_memory"),
        metric(rates.GRANTED_BYTES, MIB * times, transport="stream"),
        metric(rates.SCORED_TOKENS, 1000 * times, teacher="own"),
        metric(rates.SCORED_REQUESTS, 4 * times, teacher="own"),
        metric(rates.QUEUE_REQUESTS, 5, teacher="own", state="waiting"),
        metric(rates.QUEUE_REQUESTS, 1, teacher="own", state="running"),
        metric(rates.WAITING_TOKENS, 640, teacher="own"),
        metric(rates.PASSES, 2 * times, teacher="own"),
        metric(rates.PASS_FILLS, 1.5 * times, teacher="own"),
        metric(rates.PASS_SECONDS, 0.5 * times, teacher="own"),
        metric(rates.REFUSALS, times, surface="rpc", reason="UNKNOWN_TEACHER"),
        metric(rates.REFUSALS, times, surface="line", reason="UNKNOWN_TEACHER"),
    )


def a_view(seconds: float = 10.0, **given: object) -> ServerView:
    """A busy server after so many seconds; ``given`` are fields."""
    values = {
        "epoch": "e1",
        "version": "0.1.0",
        "uptime": timedelta(seconds=seconds),
        "draining": False,
        "teachers": (a_teacher("own"), a_teacher("theirs")),
        "sessions": (a_session(1), a_session(2), a_session(3, state="unresponsive")),
        "leases": (),
        "pool": PoolUsage(
            budget_bytes=100 * MIB,
            committed_bytes=64 * MIB,
            used_bytes=50 * MIB,
            quarantined_bytes=10 * MIB,
            slab_count=1,
            extent_count=1,
        ),
        "queue": QueueView(
            waiting_requests=5,
            waiting_tokens=640,
            running_requests=1,
            scored_requests=7,
            scored_tokens=4096,
        ),
        "steps": (
            StepView(
                teacher_id="theirs",
                step=7,
                stage="complete",
                sealed_rows=8,
                real_rows=8,
                waiting_ranks=3,
                waits_for=("trainer:0", "trainer:1"),
            ),
        ),
        "registered": RegisteredView(slab_count=1, committed_bytes=8 * MIB, used_bytes=2 * MIB),
        "metrics": counted(seconds),
        **given,
    }
    return ServerView(**values)  # type: ignore[arg-type]
