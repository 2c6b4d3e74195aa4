"""Time as a thing that is handed in.

Tables below the rim take ``now`` as an argument; only the rim holds a clock.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed instant, never going backwards."""

    def now(self) -> float:
        """Return the seconds."""


class MonotonicClock:
    """The machine's clock; it goes on while the machine sleeps, where the system has such a one."""

    def now(self) -> float:
        """Return the seconds."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to, for tests."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new time."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back {-seconds} s")
        self._now += seconds
        return self._now
