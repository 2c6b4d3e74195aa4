"""What the ledger holds at one instant, for whoever looks: inspection, metrics, drain."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits.pool import PoolUsage
    from teacher_logits.transport import Settlement
    from teacher_logits_server.leases import Lease
    from teacher_logits_server.lending import Lending
    from teacher_logits_server.sessions import Phase, Session, Sessions


@dataclass(frozen=True, kw_only=True)
class SessionView:
    """One session. ``silent`` counts from the last sign of life; ``pid`` is 0 without a line."""

    session_id: str
    student_id: str
    teacher_id: str
    data_parallel_rank: int
    settlements: tuple[Settlement, ...]
    phase: Phase
    liveness: str
    age: timedelta
    silent: timedelta
    pid: int
    host_name: str
    lease_count: int
    leased_bytes: int


@dataclass(frozen=True, kw_only=True)
class LeaseView:
    """One lease; ``size_bytes`` is the room it holds."""

    lease_id: str
    session_id: str
    payload_id: str
    size_bytes: int
    age: timedelta
    quarantined: bool


@dataclass(frozen=True, kw_only=True)
class LedgerView:
    """Everything, taken under the ledger's lock."""

    draining: bool
    sessions: tuple[SessionView, ...]
    leases: tuple[LeaseView, ...]
    pool: PoolUsage


def view_ledger(
    *, sessions: Sessions, lending: Lending, teacher_id: str, draining: bool, now: float
) -> LedgerView:
    """Describe the tables."""
    leases = tuple(
        _view_lease(lease, lending.sealed(lease).extent.size_bytes, now) for lease in lending.leases
    )
    by_session: dict[str, list[LeaseView]] = {}
    for lease in leases:
        by_session.setdefault(lease.session_id, []).append(lease)
    return LedgerView(
        draining=draining,
        sessions=tuple(
            _view_session(session, teacher_id, by_session.get(session.session_id, []), now)
            for session in sessions
        ),
        leases=leases,
        pool=lending.usage(),
    )


def _view_lease(lease: Lease, size_bytes: int, now: float) -> LeaseView:
    return LeaseView(
        lease_id=lease.lease_id,
        session_id=lease.session_id,
        payload_id=lease.payload_id,
        size_bytes=size_bytes,
        age=timedelta(seconds=now - lease.granted_at),
        quarantined=lease.quarantined,
    )


def _view_session(
    session: Session, teacher_id: str, leases: list[LeaseView], now: float
) -> SessionView:
    return SessionView(
        session_id=session.session_id,
        student_id=session.student.student_id,
        teacher_id=teacher_id,
        data_parallel_rank=session.student.data_parallel_rank,
        settlements=() if session.settlement is None else (session.settlement,),
        phase=session.phase,
        liveness=session.liveness,
        age=timedelta(seconds=now - session.opened_at),
        silent=timedelta(seconds=now - session.heard_at),
        pid=session.line.pid if session.line is not None else 0,
        host_name=session.student.hints.host_name,
        lease_count=len(leases),
        leased_bytes=sum(lease.size_bytes for lease in leases),
    )
