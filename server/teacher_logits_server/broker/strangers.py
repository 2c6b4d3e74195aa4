"""Strangers: connections of the broker's that have not said hello yet, and are given up in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from teacher_logits.clock import Clock


class Strangers:
    """Connections by their descriptors, oldest first; each has as long to say hello."""

    def __init__(self, *, clock: Clock, hello_within: timedelta) -> None:
        self._clock = clock
        self._seconds = hello_within.total_seconds()
        self._give_up: dict[int, float] = {}

    def add(self, fd: int) -> None:
        """Take one that has just come."""
        self._give_up[fd] = self._clock.now() + self._seconds

    def discard(self, fd: int) -> None:
        """Let go of one that said hello or went; one not known is fine."""
        self._give_up.pop(fd, None)

    @property
    def next_time(self) -> float | None:
        """When the next one is given up."""
        return next(iter(self._give_up.values()), None)

    def late(self, now: float) -> list[int]:
        """Return those whose time is over; the caller closes them."""
        return [fd for fd, give_up in self._give_up.items() if give_up <= now]
