"""Waiting: calls that wait for what the ledger does not have yet, on the loop and without polling.

    ledger, any thread --ring--> bell --> every call that waits looks once more

Promises: what changes between a look and the wait behind it is not missed; a call that is
cancelled leaves nothing behind; at the server's end whoever waits is told. For each thing so many
calls wait at most, and so many of one session.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from teacher_logits.errors import DrainingError
from teacher_logits_server.caps import Cap
from teacher_logits_server.metrics.instruments import Instruments

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from grpc.aio import ServicerContext

    from teacher_logits.clock import Clock
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.limits import CallLimits

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
        #: How many calls wait for it, by their sessions; those without one are under "".
        self.waiting: Counter[str] = Counter()

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
        limits: how many calls wait for one thing, and how many of one session.
        instruments: what its waits are measured in.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        longest_wait: timedelta,
        limits: CallLimits,
        instruments: Instruments | None = None,
    ) -> None:
        self._clock = clock
        self._instruments = instruments or Instruments()
        self.longest_seconds = longest_wait.total_seconds()
        self.teachers, self.steps = Bell("teacher"), Bell("step")
        self.room, self.objects = Bell("room"), Bell("object")
        self._is_over = False
        self._cap = Cap(
            name="waiting_calls",
            most=limits.max_waiting_calls,
            flag="--max-waiting-calls",
            what="calls that wait here for the same",
            way_out="ask again later",
        )
        self._session_cap = Cap(
            name="session_calls",
            most=limits.max_session_calls,
            flag="--max-session-calls",
            what="calls of this session that wait here for the same",
            way_out="let some end first",
        )

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
        session_id: str = "",
    ) -> T:
        """Return what ``look`` finds, looking again with each ring.

        Args:
            session_id: whose call it is; empty where it opens a session.

        Raises:
            TeacherLogitsError: ``too_late`` of the seconds waited, once they are over.
            DrainingError: the server stops.
            LimitReachedError: it would have to wait, and as many do as may.
        """
        rung = bell.next_ring()
        found = await look()
        if found is not None:
            return found
        if session_id:
            self._session_cap.check(bell.waiting[session_id])
        self._cap.check(bell.waiting.total())
        bell.waiting[session_id] += 1
        try:
            with self._instruments.waiting(bell.what):
                return await self._wait(look, bell, rung, seconds, too_late)
        finally:
            bell.waiting[session_id] -= 1
            if not bell.waiting[session_id]:
                del bell.waiting[session_id]

    async def _wait(
        self,
        look: Callable[[], Awaitable[T | None]],
        bell: Bell,
        rung: asyncio.Future[None],
        seconds: float,
        too_late: Callable[[float], TeacherLogitsError],
    ) -> T:
        """Look again with each ring, the first of them taken before the first look."""
        give_up = self._clock.now() + seconds
        while True:
            if self._is_over:
                raise DrainingError(
                    "the server is stopping, and what the call waited for did not come: try "
                    "another, or this one again once it is back"
                )
            left = give_up - self._clock.now()
            # `wait` cancels nothing of its own accord: others wait for the same ring.
            if left <= 0 or not (await asyncio.wait([rung], timeout=left))[0]:
                raise too_late(seconds)
            rung = bell.next_ring()
            found = await look()
            if found is not None:
                return found
