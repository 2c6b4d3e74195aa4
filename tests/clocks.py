"""Time as servers that tests run in their own process see it: passed at once when a test says so.

What must be met in time then has all the time there is, and what must expire does so soon,
however slow the machine is.
"""

import pytest

from teacher_logits.clock import MonotonicClock
from teacher_logits_server.services.waiting import Waiting


class AheadClock(MonotonicClock):
    """The machine's clock, as far ahead of it as a test says."""

    def __init__(self) -> None:
        self._ahead_seconds = 0.0

    def now(self) -> float:
        """Return the seconds."""
        return super().now() + self._ahead_seconds

    def advance(self, seconds: float) -> None:
        """Have so much more time pass at once."""
        self._ahead_seconds += seconds


def answer_early(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.2) -> None:
    """Have servers give up waits so soon that an answer is there long before its caller's deadline.

    They leave a quarter of a second for it at most, and an answer behind the deadline is lost.
    """
    monkeypatch.setattr(Waiting, "seconds_for", lambda waiting, context: seconds)
