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
    """Log how a session reads, or writes: over what, and why not over the rest.

    Names of facts are few: that of a writer stands in ``writers``, where it is not the server.
    """
    said: dict[str, list[str]] = {}
    for settlement in terms.settlements:
        transport = settlement.transport.value if settlement.transport else "none"
        said.setdefault("transport", []).append(transport)
        if settlement.writer_id != SERVER_WRITER:
            said.setdefault("writers", []).append(f"{settlement.writer_id}: {transport}")
        for refusal in settlement.refusals:
            why = f"{refusal.reason.value}: {refusal.message}"
            said.setdefault(f"no_{refusal.transport.value}", []).append(why)
    what = "publisher settled" if who.get("kind") == PUBLISHER else "session settled"
    facts = {name: "; ".join(dict.fromkeys(texts)) for name, texts in said.items()}
    _log.info(what, extra={"facts": {"session_id": terms.session_id, **who, **facts}})
