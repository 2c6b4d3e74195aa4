"""What an operator sees of a running server: its sessions, leases, pool and queue at one instant.

Asks and changes nothing. What comes back are plain values; ``inspect_view`` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from teacher_logits.v1 import operator_service_pb2, operator_service_pb2_grpc
from teacher_logits.wire import teacher_from_wire
from teacher_logits.wire_session import settlement_from_wire
from teacher_logits_client.calls.channels import Channels, check_socket
from teacher_logits_client.calls.failures import Waiting, error_of

if TYPE_CHECKING:
    from datetime import timedelta

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.transport import Settlement
    from teacher_logits_client.config import Address


@dataclass(frozen=True, kw_only=True)
class SessionView:
    """One session. ``liveness`` is how its end is learnt; ``silent`` since its last sign of life.

    ``pid`` is 0 where the server does not know it, which is so without a broker line.
    """

    session_id: str
    student_id: str
    teacher_id: str
    data_parallel_rank: int
    settlements: tuple[Settlement, ...]
    liveness: str
    age: timedelta
    silent: timedelta
    pid: int
    host_name: str
    lease_count: int
    leased_bytes: int


@dataclass(frozen=True, kw_only=True)
class LeaseView:
    """One lease. ``quarantined``: its session is gone, and a reader may be left."""

    lease_id: str
    session_id: str
    payload_id: str
    size_bytes: int
    age: timedelta
    quarantined: bool


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """The byte budget. ``committed_bytes`` are of slabs that exist."""

    budget_bytes: int
    committed_bytes: int
    used_bytes: int
    quarantined_bytes: int
    free_bytes: int
    slab_count: int
    extent_count: int


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """Scoring requests that wait or run, and what was scored since the server's start."""

    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    scored_requests: int
    scored_tokens: int


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """A server at one instant."""

    address: str
    epoch: str
    version: str
    uptime: timedelta
    draining: bool
    teachers: tuple[TeacherProfile, ...]
    sessions: tuple[SessionView, ...]
    leases: tuple[LeaseView, ...]
    pool: PoolView
    queue: QueueView


def inspect_server(address: Address, *, timeout: float) -> ServerView:
    """Ask a server what it holds. A server that drains answers too.

    Raises:
        ConfigError: what is at its path can be no server.
        ServerUnreachableError: nobody answers at the address.
        DeadlinePassedError: it did not answer within ``timeout`` seconds.
        RequestInvalidError: what answers is no teacher-logits server.
    """
    check_socket(address.path)
    channels = Channels(address)
    waiting = Waiting(what="an inspection", address=address, seconds=timeout)
    try:
        reply = operator_service_pb2_grpc.OperatorServiceStub(channels.control).Inspect(
            operator_service_pb2.InspectRequest(), timeout=timeout
        )
    except grpc.RpcError as error:
        raise error_of(error, waiting) from None
    finally:
        channels.close()
    return view_from_wire(reply, address=str(address))


def view_from_wire(reply: operator_service_pb2.InspectResponse, *, address: str) -> ServerView:
    """Return the view of a message."""
    pool, queue = reply.pool, reply.queue
    return ServerView(
        address=address,
        epoch=reply.epoch,
        version=reply.version,
        uptime=reply.uptime.ToTimedelta(),
        draining=reply.draining,
        teachers=tuple(teacher_from_wire(teacher) for teacher in reply.teachers),
        sessions=tuple(_session(session) for session in reply.sessions),
        leases=tuple(_lease(lease) for lease in reply.leases),
        pool=PoolView(
            budget_bytes=pool.budget_bytes,
            committed_bytes=pool.committed_bytes,
            used_bytes=pool.used_bytes,
            quarantined_bytes=pool.quarantined_bytes,
            free_bytes=pool.free_bytes,
            slab_count=pool.slab_count,
            extent_count=pool.extent_count,
        ),
        queue=QueueView(
            waiting_requests=queue.waiting_requests,
            waiting_tokens=queue.waiting_tokens,
            running_requests=queue.running_requests,
            scored_requests=queue.scored_requests,
            scored_tokens=queue.scored_tokens,
        ),
    )


def _session(message: operator_service_pb2.SessionState) -> SessionView:
    return SessionView(
        session_id=message.session_id,
        student_id=message.student_id,
        teacher_id=message.teacher_id,
        data_parallel_rank=message.data_parallel_rank,
        settlements=tuple(settlement_from_wire(each) for each in message.transports),
        liveness=message.liveness,
        age=message.age.ToTimedelta(),
        silent=message.silent.ToTimedelta(),
        pid=message.pid,
        host_name=message.host_name,
        lease_count=message.lease_count,
        leased_bytes=message.leased_bytes,
    )


def _lease(message: operator_service_pb2.LeaseState) -> LeaseView:
    return LeaseView(
        lease_id=message.lease_id,
        session_id=message.session_id,
        payload_id=message.payload_id,
        size_bytes=message.size_bytes,
        age=message.age.ToTimedelta(),
        quarantined=message.quarantined,
    )
