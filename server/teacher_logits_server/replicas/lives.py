"""The lives of a replica: whether it takes passes, and when it is started anew.

Pure: every change comes with ``now``. A replica that ends is started again at once, the next time
after a pause that doubles until it has answered a pass again; a start that fails counts as an end,
and leaves it ``down`` for that pause.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST_PAUSE_SECONDS = 60.0


class State(enum.Enum):
    """What a replica is doing."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    DOWN = "down"


class Replica:
    """One replica; the first of its lives is ready, and has the replica's own number.

    ``since`` is when the life began or, of one that is unresponsive, when it was last heard of or
    should have been. ``reason`` is why its last life ended, or its last start came to nothing.
    """

    def __init__(self, number: int, *, first_pause: float) -> None:
        self.number = number
        self.life = number
        self.state = State.READY
        self.since = 0.0
        self.restarts = 0
        self.reason = ""
        self._has_life = True
        self._start_at = 0.0
        self._failures = 0
        self._first_pause = first_pause
        self._unheard: set[int] = set()

    def is_in(self, life: int) -> bool:
        """Whether this is its present life."""
        return self._has_life and self.life == life

    def has_answered(self) -> None:
        """Note that a pass came back."""
        self._failures = 0

    def hangs(self, attempts: Iterable[int], now: float) -> None:
        """Note that it did not answer in time; it takes no passes until it has answered all."""
        self.state, self.since = State.UNRESPONSIVE, now
        self._unheard.update(attempts)

    def heard(self, attempt: int, now: float) -> bool:
        """Note an answer that comes late; return whether this replica was to give it."""
        if attempt not in self._unheard:
            return False
        self._unheard.discard(attempt)
        self.since = now
        if not self._unheard:
            self.state = State.READY
        return True

    def died(self, reason: str, now: float) -> None:
        """Note the end of a life; what fails as it starts goes ``down``."""
        if self.is_starting:
            self.start_failed(reason, now)
            return
        self._end(State.STARTING, reason)
        self._start_at = now + self._pause(self._failures - 1)

    def start_failed(self, reason: str, now: float) -> None:
        """Note that a life did not come to be."""
        self._end(State.DOWN, reason)
        self._start_at = now + self._pause(self._failures)

    def begin(self, life: int, now: float) -> None:
        """Begin a new life."""
        self.life, self._has_life, self.since = life, True, now
        self.restarts += 1
        if self.state is not State.DOWN:
            self.state = State.STARTING

    def started(self) -> None:
        """Note that it is ready for passes."""
        self.state = State.READY

    def is_due(self, now: float) -> bool:
        """Whether it is to be started now."""
        return not self._has_life and now >= self._start_at

    def start_is_late(self, patience: float, now: float) -> bool:
        """Whether a start takes too long."""
        return self.is_starting and now >= self.since + patience

    def is_lost(self, patience: float, now: float) -> bool:
        """Whether an unresponsive one has been silent for too long."""
        return self.state is State.UNRESPONSIVE and now >= self.since + patience

    @property
    def is_starting(self) -> bool:
        """Whether a life has begun and is not ready; one that was down stays so until it is."""
        return self._has_life and self.state in (State.STARTING, State.DOWN)

    def due(self, start_patience: float, answer_patience: float) -> float | None:
        """When there is something to do about it; None where nothing is foreseen."""
        if not self._has_life:
            return self._start_at
        if self.is_starting:
            return self.since + start_patience
        if self.state is State.UNRESPONSIVE:
            return self.since + answer_patience
        return None

    def _end(self, state: State, reason: str) -> None:
        self.state, self.reason, self._has_life = state, reason, False
        self._failures += 1
        self._unheard.clear()

    def _pause(self, failures: int) -> float:
        """Return the seconds before a start, behind so many ends without an answer before."""
        if failures < 1:
            return 0.0
        return min(LONGEST_PAUSE_SECONDS, self._first_pause * 2.0 ** min(failures - 1, 32))
