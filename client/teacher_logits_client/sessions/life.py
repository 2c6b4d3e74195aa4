"""Whether a session lives: a table of one row, told what became of its renewals.

A session with a TTL ends here when no renewal got through for that long, counted from when
the last good one was *sent*: the server, which counts from its arrival, ends it no sooner.
A session with a broker line has no TTL and ends when its line does. An ended session stays
ended, and says why to whoever uses it next.

Pure: time comes in as an argument, and nothing here waits or sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import SessionExpiredError, StaleReference

if TYPE_CHECKING:
    from teacher_logits.errors import TeacherLogitsError

#: After a renewal that failed, the next is tried after this part of the usual interval.
_RETRY_PART = 0.1


class SessionLife:
    """What is known of one session's life. Times are seconds of one clock.

    Args:
        ttl: None for a session with a broker line.
        renew_interval: how often the server wants to hear of the session.
    """

    def __init__(
        self, session_id: str, *, ttl: float | None, renew_interval: float, now: float
    ) -> None:
        self.session_id = session_id
        self._ttl = ttl
        self._interval = renew_interval
        self._heard = now
        self._failed = 0
        self._problem: TeacherLogitsError | None = None
        self._end: TeacherLogitsError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the session is known to be over. See also ``check``, which asks the clock."""
        return self._end is not None

    def wait_before_renewal(self, now: float) -> float | None:
        """Return the seconds until the next renewal is due; None where none ever is."""
        if self._ttl is None or self._end is not None:
            return None
        interval = self._interval * (_RETRY_PART if self._failed else 1.0)
        return max(0.0, min(interval, self._heard + self._ttl - now))

    def renewal_timeout(self, now: float) -> float:
        """Return the deadline of a renewal that is sent now: never past the TTL."""
        left = self._heard + (self._ttl or 0.0) - now
        return max(0.001, min(self._interval, left))

    def renewed(self, *, sent: float) -> None:
        """Note a renewal that the server answered."""
        self._heard = max(self._heard, sent)
        self._failed, self._problem = 0, None

    def renewal_failed(self, problem: TeacherLogitsError, *, now: float) -> None:
        """Note a renewal that failed: a stale reference ends the session, others are retried."""
        self._failed += 1
        self._problem = problem
        if isinstance(problem, StaleReference):
            self.end(problem)
        self._look_at_clock(now)

    def end(self, reason: TeacherLogitsError) -> None:
        """End the session; the first reason stays."""
        self._end = self._end or reason

    def close(self) -> None:
        """End the session because its owner is done with it."""
        self.end(
            SessionExpiredError(
                f"session {self.session_id} was closed by this client; open a new one",
                facts={"session_id": self.session_id},
            )
        )

    def check(self, now: float) -> None:
        """Let a session that lives pass.

        Raises:
            SessionExpiredError, EpochChangedError or whatever else ended it, anew each time.
        """
        self._look_at_clock(now)
        if self._end is not None:
            end = self._end
            raise type(end)(end.message, facts=end.facts)

    def _look_at_clock(self, now: float) -> None:
        if self._ttl is None or now < self._heard + self._ttl:
            return
        why = f"; the last try said: {self._problem.message}" if self._problem else ""
        self.end(
            SessionExpiredError(
                f"session {self.session_id} ended: no renewal got through for "
                f"{span_text(now - self._heard)}, and its TTL is {span_text(self._ttl)} "
                f"({self._failed} tries failed{why}); open a new one",
                facts={
                    "session_id": self.session_id,
                    "ttl_seconds": self._ttl,
                    "failed_renewals": self._failed,
                },
            )
        )
