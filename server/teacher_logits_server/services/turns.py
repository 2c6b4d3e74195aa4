"""Turns: streams that run at once, a chunk each, the sessions in rotation.

A session has every other turn beside one other session, however many streams each has. Promises: a
stream alone waits for nothing but one round of the loop; one that is cancelled leaves no gap.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class Rotation(Generic[T]):
    """Things that wait, by session; pure. Next is the session whose turn is longest ago."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        self._turns = count()
        #: The number of each session's last turn.
        self._last: dict[str, int] = {}

    def put(self, session_id: str, thing: T) -> None:
        """Let a thing wait behind those of its session."""
        self._waiting.setdefault(session_id, deque()).append(thing)

    def take(self) -> T | None:
        """Return the next one; None where nothing waits."""
        if not self._waiting:
            return None
        session_id = min(self._waiting, key=lambda each: self._last.get(each, -1))
        self._last[session_id] = next(self._turns)
        own = self._waiting[session_id]
        thing = own.popleft()
        if not own:
            del self._waiting[session_id]
        return thing

    def forget(self, session_id: str) -> None:
        """Forget when a session had its last turn."""
        self._last.pop(session_id, None)

    def remove(self, session_id: str, thing: T) -> None:
        """Forget a thing; one not known is fine."""
        own = self._waiting.get(session_id)
        if own is None:
            return
        with suppress(ValueError):
            own.remove(thing)
        if not own:
            del self._waiting[session_id]


class Turns:
    """Who may cut the next chunk, on the loop that it is used on."""

    def __init__(self) -> None:
        self._waiting: Rotation[asyncio.Future[None]] = Rotation()
        self._is_taken = False

    async def take(self, session_id: str) -> None:
        """Wait for a turn of this session, which lasts one round of the loop."""
        if self._is_taken:
            await self._wait(session_id)
        self._is_taken = True
        try:
            await asyncio.sleep(0)
        finally:
            self._pass_on()

    def forget(self, session_id: str) -> None:
        """Learn that a session has no streams any more."""
        self._waiting.forget(session_id)

    async def _wait(self, session_id: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(session_id, turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(session_id, turn)
            if not turn.cancelled():  # it came with the end of the wait: to somebody else, then
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        following = self._waiting.take()
        while following is not None and following.done():
            following = self._waiting.take()
        self._is_taken = following is not None
        if following is not None:
            following.set_result(None)
