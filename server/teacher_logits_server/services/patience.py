"""Patience: how long a handler waits for its caller, time and again, before it gives up.

Promises: only time spent inside the ``with`` blocks counts, each from its own beginning. One
timer a stream: ``asyncio.wait_for`` around each wait would make a task of each, and more than
double what a chunk costs the loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Patience:
    """Cancels the task that made it when it waits too long in one ``with`` block, until ``end``.

    Args:
        seconds: how long one wait may take.
    """

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None  # handlers run in tasks
        self._task = task
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waits = False
        self._until = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._until, self._look)
        self.is_over = False
        """Whether it was this that cancelled the task."""

    def __enter__(self) -> None:
        self._until = self._loop.time() + self.seconds
        self._waits = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._waits = False

    def end(self) -> None:
        """Cancel nothing any more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._waits and now >= self._until:
            self.is_over = True
            self._task.cancel()
            return
        again = self._until if self._waits else now + self.seconds
        self._timer = self._loop.call_at(again, self._look)
