"""The postbox: sessions whose mail is due, put in by any thread and taken by the broker's own.

Promises: putting never waits, and what is put before a look is seen by it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Postbox:
    """Open from ``open`` to ``shut``; a selector waits for its ``fileno``."""

    def __init__(self) -> None:
        self._due: deque[str] = deque()
        self._waking = threading.Lock()
        self._is_open = False

    def open(self) -> None:
        """Take mail from now on."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True

    def shut(self) -> bool:
        """Take no more, and wake the selector for the last time; False where it is not open."""
        with self._waking:
            was_open, self._is_open = self._is_open, False
            if was_open:
                os.eventfd_write(self._wake, 1)
        return was_open

    def close(self) -> None:
        """Give the descriptor back, once nobody waits for it."""
        os.close(self._wake)

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._wake

    def hear(self) -> bool:
        """Take note of a wake, before the look: what wakes us behind it wakes us anew.

        Returns whether it is still open.
        """
        os.eventfd_read(self._wake)
        return self._is_open

    def put(self, writers: Iterable[str], readers: Iterable[str]) -> None:
        """Have the mail of these sent; readers first: they may wait for what was just sealed."""
        if self._is_open:
            self._due.extend(writers)
            self._due.extendleft(readers)

    def wake(self) -> None:
        """Wake the selector, on another thread than this."""
        with self._waking:
            if self._is_open:
                os.eventfd_write(self._wake, 1)

    def take(self) -> str:
        """Return the next session; empty where none is left."""
        return self._due.popleft() if self._due else ""
