"""``inspect --reclaim``: what a forced reclaim would end, or has ended, for people and programs.

Promises: nothing is ended without ``--yes``. What would be ended is what the server showed a
moment ago; the lines say so.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    ConfigError,
    LeaseLostError,
    SessionExpiredError,
    UnknownTeacherError,
)
from teacher_logits.keys import is_text
from teacher_logits_client.calls.inspection import inspect_server, reclaim
from teacher_logits_client.units import size_text

if TYPE_CHECKING:
    from teacher_logits.views import LeaseView, Reclaimed, ServerView
    from teacher_logits_client.config import Connection

QUARANTINED = "quarantined"
TEACHER = "teacher:"


def reclaim_or_tell(
    connection: Connection, target: str, *, yes: bool, as_json: bool, timeout: float
) -> str:
    """Reclaim ``s-...``, ``l-...``, ``quarantined`` or ``teacher:ID``, or say what would end.

    Raises:
        ConfigError: the target is none of these.
        SessionExpiredError, LeaseLostError, UnknownTeacherError: there is no such session, lease
            or teacher.
        NotAllowedError: somebody publishes or reads the teacher.
        ServerUnreachableError, DeadlinePassedError: the server could not be asked.
    """
    address = connection.address
    see = partial(inspect_server, address, credentials=connection.credentials, timeout=timeout)
    kinds = ("s-", "l-", QUARANTINED, TEACHER)
    kind = next((kind for kind in kinds if target.startswith(kind)), "")
    is_none = (kind == QUARANTINED) != (target == QUARANTINED) or target == TEACHER
    if not kind or is_none or not is_text(target):
        raise ConfigError(
            f"--reclaim {target[:128]!r} is no session (s-...), no lease (l-...), no teacher "
            f"({TEACHER}...) and not {QUARANTINED!r}: `teacher-logits inspect {connection}` shows "
            "what there is",
            facts={"flag": "--reclaim", "value": target[:128]},
        )
    teacher_id = target.removeprefix(TEACHER) if kind == TEACHER else ""
    if not yes and teacher_id:
        return _plan_teacher(see(), teacher_id, as_json=as_json)
    if not yes:
        leases = _targeted(see(), kind, target)
        return _plan_json(target, leases) if as_json else _plan_text(target, leases)
    done = reclaim(
        address,
        session_id=target if kind == "s-" else "",
        lease_id=target if kind == "l-" else "",
        quarantined=kind == QUARANTINED,
        teacher_id=teacher_id,
        timeout=timeout,
        credentials=connection.credentials,
    )
    if as_json:
        return json.dumps({"target": target, "done": True, **asdict(done)}, indent=2)
    return _done_text(target, done)


def _targeted(view: ServerView, kind: str, target: str) -> list[LeaseView]:
    """Return the leases that would end."""
    if kind == QUARANTINED:
        return [lease for lease in view.leases if lease.quarantined]
    if kind == "s-":
        if not any(session.session_id == target for session in view.sessions):
            raise SessionExpiredError(
                f"there is no session {target[:128]!r} here", facts={"session_id": target[:128]}
            )
        return [lease for lease in view.leases if lease.session_id == target]
    leases = [lease for lease in view.leases if lease.lease_id == target]
    if not leases:
        raise LeaseLostError(
            f"there is no lease {target[:128]!r} here", facts={"lease_id": target[:128]}
        )
    return leases


def _plan_teacher(view: ServerView, teacher_id: str, *, as_json: bool) -> str:
    """Say which steps would be retired."""
    if all(teacher.teacher_id != teacher_id for teacher in view.teachers):
        raise UnknownTeacherError(
            f"there is no teacher {teacher_id[:128]!r} here", facts={"teacher_id": teacher_id[:128]}
        )
    named = TEACHER + teacher_id
    steps = [step.step for step in view.steps if step.teacher_id == teacher_id]
    if as_json:
        return json.dumps({"target": named, "done": False, "steps": steps}, indent=2)
    return (
        f"{_count(len(steps), 'step')} of teacher {teacher_id} would be retired, if nobody "
        "publishes or reads it; nothing was done.\nRepeat with --yes to do it."
    )


def _plan_text(target: str, leases: list[LeaseView]) -> str:
    size = size_text(sum(lease.size_bytes for lease in leases))
    what = f"{_count(len(leases), 'lease')} would be ended, holding up to {size}"
    if target.startswith("s-"):
        what = f"session {target} would be ended; {what}"
    lines = [
        f"{what}; nothing was done.",
        *(f"  {lease.lease_id}  session {lease.session_id}" for lease in leases),
        "Whoever still reads there raises StalePayloadError when it closes its lease, and has to "
        "discard that step.",
        "Repeat with --yes to do it.",
    ]
    return "\n".join(lines)


def _plan_json(target: str, leases: list[LeaseView]) -> str:
    document = {
        "target": target,
        "done": False,
        "leases": [lease.lease_id for lease in leases],
        "size_bytes": sum(lease.size_bytes for lease in leases),
    }
    return json.dumps(document, indent=2)


def _done_text(target: str, done: Reclaimed) -> str:
    text = (
        f"reclaimed {target}: {_count(done.session_count, 'session')} and "
        f"{_count(done.lease_count, 'lease')} ended, {size_text(done.freed_bytes)} came free"
    )
    if done.lease_count and not done.freed_bytes:
        text += " (the rest is held by other leases, or by steps that are not retired)"
    return text


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
