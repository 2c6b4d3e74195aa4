"""What is logged of sessions as they are refused, opened and settled: each once, a call never."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from teacher_logits.terms import SERVER_WRITER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import SessionTerms
    from teacher_logits_server.ledger import OpenedSession

PUBLISHER = "publisher"
"""Kind of a session that writes."""

_log = logging.getLogger(__name__)


def who_asks(profile: StudentProfile) -> dict[str, str | int]:
    """Return who a student is, before it has a session."""
    return {
        "student_id": profile.student_id,
        "rank": profile.data_parallel_rank,
        "host_name": profile.hints.host_name,
        "pid": profile.hints.pid,
    }


def log_refused(
    who: Mapping[str, str | int], error: TeacherLogitsError, *, what: str = "session"
) -> None:
    """Log that somebody was refused, and why."""
    _log.warning(
        f"{what} refused",
        extra={
            "facts": {**who, "reason": error.reason, "message": error.message},
            "throttle": error.reason,
        },
    )


def log_opened(
    who: Mapping[str, str | int], opened: OpenedSession, *, what: str = "session"
) -> None:
    """Log that a session came about; nothing where the call was repeated."""
    if opened.is_new:
        facts = {"session_id": opened.terms.session_id, **who}
        _log.info(f"{what} opened", extra={"facts": facts})


def log_settled(who: Mapping[str, str | int], terms: SessionTerms) -> None:
    """Log how a session reads, or writes: over what, and why not over the rest."""
    facts: dict[str, str | int] = {"session_id": terms.session_id, **who}
    for settlement in terms.settlements:
        # One writer is the server itself, mostly; the shards of a published teacher are several.
        of = "" if settlement.writer_id == SERVER_WRITER else f" {settlement.writer_id}"
        facts[f"transport{of}"] = settlement.transport.value if settlement.transport else "none"
        for refusal in settlement.refusals:
            name = f"no_{refusal.transport.value}{of}"
            facts[name] = f"{refusal.reason.value}: {refusal.message}"
    what = "publisher settled" if who.get("kind") == PUBLISHER else "session settled"
    _log.info(what, extra={"facts": facts})
