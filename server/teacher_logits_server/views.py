"""How the ledger describes its tables at one instant, in the contract's views."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING

from teacher_logits.views import LeaseView, RegisteredView, SessionView, StepView
from teacher_logits_server.sessions.session import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from teacher_logits.pool import PoolUsage
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.transport import Transport
    from teacher_logits_server.lending import Lending
    from teacher_logits_server.lending.granted import Lent
    from teacher_logits_server.lending.leases import Lease
    from teacher_logits_server.publishers import Published, Publishers
    from teacher_logits_server.sessions import Sessions
    from teacher_logits_server.sessions.session import Session
    from teacher_logits_server.steps import Steps
    from teacher_logits_server.steps.parts import Step

SHOWN_RANKS = 8
"""Ranks that a step waits for and that are named; the others are counted."""
SHOWN_STEPS = 3
"""Likewise of steps, in messages."""


@dataclass(frozen=True, kw_only=True)
class LedgerView:
    """Everything, taken under the ledger's lock.

    ``reserved_bytes`` are those of ``pool.used_bytes`` that are being written; likewise of the
    engines' device memory, where they have some. ``granted`` counts from the server's start.
    """

    draining: bool
    teachers: tuple[TeacherProfile, ...]
    sessions: tuple[SessionView, ...]
    leases: tuple[LeaseView, ...]
    steps: tuple[StepView, ...]
    pool: PoolUsage
    registered: RegisteredView
    reserved_bytes: int
    device_pool: PoolUsage | None
    device_reserved_bytes: int
    granted: Mapping[Transport, Lent]


def view_ledger(
    *,
    sessions: Sessions,
    lending: Lending,
    publishers: Publishers,
    draining: bool,
    renew_seconds: float,
    now: float,
) -> LedgerView:
    """Describe the tables. Who is silent for two ``renew_seconds`` has missed a renewal."""
    leases = tuple(
        _view_lease(lease, lending.sealed(lease).size_bytes, now) for lease in lending.leases
    )
    device_pool = lending.own_device.pool.usage() if lending.own_device is not None else None
    by_session: dict[str, list[LeaseView]] = {}
    for lease in leases:
        by_session.setdefault(lease.session_id, []).append(lease)
    return LedgerView(
        draining=draining,
        teachers=publishers.profiles(),
        sessions=tuple(
            _view_session(
                session,
                by_session.get(session.session_id, []),
                state=_state(session, silent=now - session.heard_at >= 2 * renew_seconds),
                now=now,
            )
            for session in sessions
        ),
        leases=leases,
        steps=tuple(step for published in publishers for step in _view_steps(published)),
        pool=lending.usage(),
        registered=_view_registered(lending),
        reserved_bytes=_reserved_bytes(lending, lending.usage(), on_device=False),
        device_pool=device_pool,
        device_reserved_bytes=_reserved_bytes(lending, device_pool, on_device=True),
        granted=lending.leases.granted.view(),
    )


def describe_session(session: Session) -> dict[str, str | int]:
    """Return who a session is, for logs."""
    profile = session.profile
    facts: dict[str, str | int] = {
        "kind": session.kind,
        "teacher_id": session.teacher_id,
        "rank": profile.data_parallel_rank,
        "host_name": profile.hints.host_name,
        "pid": profile.hints.pid,
    }
    if not session.is_publisher:
        facts["student_id"] = session.student.student_id
    return facts


def _view_steps(published: Published) -> Iterator[StepView]:
    for step in published.steps:
        waiting = published.steps.seats.waited_for(step)
        stage = "deserted" if published.is_left_over else step.stage.value
        yield StepView(
            teacher_id=published.profile.teacher_id,
            step=step.number,
            stage=stage,
            sealed_rows=step.sealed_rows,
            real_rows=step.real_rows,
            waiting_ranks=sum(map(len, waiting.values())),
            waits_for=tuple(islice(waiting_names(step, published.steps), SHOWN_RANKS)),
        )


def waiting_names(step: Step, steps: Steps) -> Iterator[str]:
    """Yield the student ranks that a step waits for, as ``student:rank``."""
    for student_id, ranks in steps.seats.waited_for(step).items():
        for rank in ranks:
            yield f"{student_id}:{rank}"


def _reserved_bytes(lending: Lending, pool: PoolUsage | None, *, on_device: bool) -> int:
    """Return how many bytes of a pool of the server's own are being written."""
    if pool is None:
        return 0
    sealed = sum(
        each.extent.size_bytes
        for each in lending.payloads()
        if each.extent is not None and not each.owner and each.on_device is on_device
    )
    return pool.used_bytes + pool.quarantined_bytes - sealed


def _view_registered(lending: Lending) -> RegisteredView:
    usage = lending.relays.usage()
    registered = [each for each in lending.payloads() if each.is_registered]
    own = lending.own_device.views() if lending.own_device is not None else ()
    return RegisteredView(
        payload_count=len(registered),
        payload_bytes=sum(sealed.size_bytes for sealed in registered),
        slab_count=usage.slab_count,
        committed_bytes=usage.committed_bytes,
        used_bytes=usage.used_bytes,
        quarantined_bytes=usage.quarantined_bytes,
        device_slabs=(*own, *lending.relays.device_slabs()),
    )


def _view_lease(lease: Lease, size_bytes: int, now: float) -> LeaseView:
    return LeaseView(
        lease_id=lease.lease_id,
        session_id=lease.session_id,
        payload_id=lease.payload_id,
        size_bytes=size_bytes,
        age=timedelta(seconds=now - lease.granted_at),
        quarantined=lease.quarantined,
        doubt=lease.doubt.value if lease.doubt is not None else "",
    )


def _state(session: Session, *, silent: bool) -> str:
    """Return how a session is, as far as the tables know; see ``SessionView``."""
    if session.phase in (Phase.LOCAL, Phase.REMOTE):
        return "silent" if silent and session.liveness == "ttl" else "alive"
    name: str = session.phase.value
    return name


def _view_session(
    session: Session, leases: list[LeaseView], *, state: str, now: float
) -> SessionView:
    return SessionView(
        session_id=session.session_id,
        kind=session.kind,
        state=state,
        student_id="" if session.is_publisher else session.student.student_id,
        teacher_id=session.teacher_id,
        data_parallel_rank=session.profile.data_parallel_rank,
        settlements=tuple(session.settlements.values()),
        liveness=session.liveness,
        age=timedelta(seconds=now - session.opened_at),
        silent=timedelta(seconds=now - session.heard_at),
        pid=session.last_line.pid if session.last_line is not None else 0,
        host_name=session.profile.hints.host_name,
        lease_count=len(leases),
        leased_bytes=sum(lease.size_bytes for lease in leases),
    )
