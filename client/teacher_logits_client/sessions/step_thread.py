"""The thread on which one session's steps are opened ahead of who asks for them.

It ends with the session, or before the interpreter does (see ``exits``): it moves bytes that
tensors are made of, and a thread that is killed amid that may take the process with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client import exits, threads
from teacher_logits_client.forks import Home

if TYPE_CHECKING:
    from collections.abc import Callable


class StepThread:
    """A thread that runs ``work`` once; whoever has it started keeps this.

    Args:
        stop: has ``work`` end behind what it is doing; waits for nothing.

    Raises:
        NotAvailable: no thread can be had.
    """

    def __init__(self, work: Callable[[], None], *, stop: Callable[[], None]) -> None:
        self._home = Home()
        self._stop = stop
        self._thread = threads.start(work, name="steps")
        exits.watch(self)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that started it, and no fork of it."""
        return self._home.is_here

    def stop_at_exit(self) -> None:
        """Have the thread end behind what it is doing."""
        self._stop()

    def tear_loose(self) -> None:
        """Do nothing more: the streams that it may be in are broken off with the client's calls."""

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)
