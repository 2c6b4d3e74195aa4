"""Time as a thing that is handed in, and spans of it as people read them.

Tables below the rim take ``now`` as an argument; only the rim holds a clock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datetime import timedelta

_LEAST_SHOWN_SECONDS = 1e-4


class Clock(Protocol):
    """Seconds since some fixed instant, never going backwards."""

    def now(self) -> float:
        """Return the seconds."""


class MonotonicClock:
    """The machine's clock that nobody sets. On Linux it stands still while the machine sleeps."""

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


def span_text(span: timedelta | float) -> str:
    """Return a span of time with three digits, or its two largest units, for messages and tables.

    ``0.25 s``, ``12.3 s``, ``4 min 5 s``, ``1 h``, ``3 d 2 h``; never an exponent, and ``0 s`` for
    what is below a tenth of a millisecond. Programs take the exact number from an error's facts.
    """
    seconds = span if isinstance(span, int | float) else span.total_seconds()
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= _LEAST_SHOWN_SECONDS else "0 s"
    whole = round(seconds)
    for size, unit, lesser_size, lesser in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // lesser_size
            return f"{whole // size} {unit}" + (f" {rest} {lesser}" if rest else "")
    return f"{whole} s"
