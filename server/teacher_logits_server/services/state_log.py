"""What is logged of the server as a whole, once a change: its health, and whether room is there.

Looked at once a pass of the clockwork: what comes and goes between two looks is not logged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from teacher_logits.clock import Clock
    from teacher_logits.pool import PoolUsage
    from teacher_logits_server.engines.served import ServedTeacher

_log = logging.getLogger(__name__)


class StateLog:
    """Logs changes of one server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sick_since: float | None = None
        self._full_since: float | None = None

    def health(self, healthy: bool, facts: Callable[[], Mapping[str, str | bool]]) -> None:
        """Note whether every thread works; ``facts`` say which does not."""
        now = self._clock.now()
        if not healthy and self._sick_since is None:
            self._sick_since = now
            _log.error("unhealthy", extra={"facts": facts()})
        elif healthy and self._sick_since is not None:
            seconds, self._sick_since = now - self._sick_since, None
            _log.info("healthy again", extra={"facts": {"seconds": round(seconds, 3)}})

    def room(self, full: bool, usage: Callable[[], PoolUsage]) -> None:
        """Note whether the last reservation found no room."""
        now = self._clock.now()
        if full and self._full_since is None:
            self._full_since = now
            _log.warning("pool full", extra={"facts": _facts(usage())})
        elif not full and self._full_since is not None:
            seconds, self._full_since = now - self._full_since, None
            facts = {"seconds": round(seconds, 3), **_facts(usage())}
            _log.info("pool has room again", extra={"facts": facts})


def log_loaded(teachers: Iterable[ServedTeacher], seconds: float) -> None:
    """Log the teachers that the server runs itself."""
    for each in teachers:
        facts = {"teacher_id": each.teacher_id, "engine": each.config.engine_name}
        _log.info("teacher loaded", extra={"facts": {**facts, "seconds": round(seconds, 3)}})


def _facts(usage: PoolUsage) -> dict[str, int]:
    return {
        "free_bytes": usage.free_bytes,
        "used_bytes": usage.used_bytes,
        "quarantined_bytes": usage.quarantined_bytes,
        "budget_bytes": usage.budget_bytes,
    }
