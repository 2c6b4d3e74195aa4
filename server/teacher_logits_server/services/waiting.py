"""Waiting: calls that wait for what the ledger does not have yet, on the loop and without polling.

    ledger, any thread --ring--> bell --> every call that waits looks once more

Promises: what changes between a look and the wait behind it is not missed; a call that is
cancelled leaves nothing behind; at the server's end whoever waits is told.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from teacher_logits.errors import DrainingError
from teacher_logits_server.metrics.instruments import Instruments

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from grpc.aio import ServicerContext

    from teacher_logits.clock import Clock
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits_server.ledger import Ledger

T = TypeVar("T")
Q = TypeVar("Q")
R = TypeVar("R")

ANSWER_MARGIN_SECONDS = 0.25
"""An answer, an error too, leaves this long before the caller's deadline: one that arrives
with it is lost, and the caller hears of a deadline and not of what it waited for."""


class Bell:
    """Rings for whoever waits on the loop that it was made on.

    Args:
        what: what they wait for, for metrics.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] | None = None

    def next_ring(self) -> asyncio.Future[None]:
        """Return what is done with the next ring. Take it before the look, not behind it."""
        if self._rung is None:
            self._rung = self._loop.create_future()
        return self._rung

    def ring(self) -> None:
        """Have everybody who waits look again; from any thread, and free where nobody waits."""
        if self._rung is not None:
            with suppress(RuntimeError):  # the loop is over, and with it whoever waited
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        rung, self._rung = self._rung, None
        if rung is not None and not rung.done():
            rung.set_result(None)


class Waiting:
    """How calls wait, with one bell for each thing that they wait for.

    Args:
        longest_wait: what a call waits at most, whatever its own deadline.
        instruments: what its waits are measured in.
    """

    def __init__(
        self, *, clock: Clock, longest_wait: timedelta, instruments: Instruments | None = None
    ) -> None:
        self._clock = clock
        self._instruments = instruments or Instruments()
        self.longest_seconds = longest_wait.total_seconds()
        self.teachers, self.steps = Bell("teacher"), Bell("step")
        self.room, self.objects = Bell("room"), Bell("object")
        self._is_over = False

    def listen_to(self, ledger: Ledger) -> None:
        """Ring when something changes there."""
        ledger.on_teachers_changed(self.teachers.ring)
        ledger.on_steps_changed(self.steps.ring)
        # Room is kept for the lowest step that is open: that may change too.
        ledger.on_steps_changed(self.room.ring)
        ledger.on_room_freed(self.room.ring)

    def ring_all(self) -> None:
        """Have everybody look again."""
        for bell in (self.teachers, self.steps, self.room, self.objects):
            bell.ring()

    def stop(self) -> None:
        """Tell everybody that the server stops."""
        self._is_over = True
        self.ring_all()

    def seconds_for(self, context: ServicerContext[Q, R]) -> float:
        """Return how long a call may wait."""
        remaining = context.time_remaining()
        return min(remaining - min(ANSWER_MARGIN_SECONDS, remaining / 10), self.longest_seconds)

    async def until(
        self,
        look: Callable[[], Awaitable[T | None]],
        *,
        bell: Bell,
        seconds: float,
        too_late: Callable[[float], TeacherLogitsError],
    ) -> T:
        """Return what ``look`` finds, looking again with each ring.

        Raises:
            TeacherLogitsError: ``too_late`` of the seconds waited, once they are over.
            DrainingError: the server stops.
        """
        give_up = self._clock.now() + seconds
        with self._instruments.waiting(bell.what):
            while True:
                rung = bell.next_ring()
                found = await look()
                if found is not None:
                    return found
                if self._is_over:
                    raise DrainingError(
                        "the server is stopping, and what the call waited for did not come: try "
                        "another, or this one again once it is back"
                    )
                left = give_up - self._clock.now()
                # `wait` cancels nothing of its own accord: others wait for the same ring.
                if left <= 0 or not (await asyncio.wait([rung], timeout=left))[0]:
                    raise too_late(seconds)
