"""Exits: at the end of the program our threads end before the interpreter does.

The interpreter kills a daemon thread where it next asks for the interpreter's lock. In Python
and in gRPC that goes unseen; inside torch it aborts the process ("terminate called without an
active exception"), and a thread that gives leases back calls torch. So whatever has a thread
has it watched here. Before the interpreter goes down, on whichever way the program ends, each
is asked to stop behind what it has to do; what waits for a server is torn loose after a second,
and another one later the program ends all the same. A forked child has no such threads, and
does nothing.
"""

from __future__ import annotations

import atexit
import time
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

_PATIENCE_SECONDS = 1.0


class Stoppable(Protocol):
    """What has a thread of its own."""

    @property
    def is_here(self) -> bool:
        """Whether the thread is of this process."""

    def stop_at_exit(self) -> None:
        """Have the thread end once it has done what is waiting for it; returns at once."""

    def tear_loose(self) -> None:
        """Have it do nothing more but end, and break off the call it may be in."""

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, for at most ``timeout`` seconds."""


_watched: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def watch(stoppable: Stoppable) -> None:
    """Stop a thread at the end of the program, if what it belongs to is still there."""
    _watched.add(stoppable)


def stop_all() -> None:
    """Stop every thread that is watched; done at exit."""
    ours = [each for each in list(_watched) if each.is_here]
    try:
        for each in ours:
            each.stop_at_exit()
        _join(ours)
    finally:  # whoever interrupts the wait means it
        for each in ours:
            each.tear_loose()
    _join(ours)


def _join(stoppables: Collection[Stoppable]) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    for each in stoppables:
        each.join(max(0.0, until - time.monotonic()))


# Handlers run last in, first out: what a program registers after its import of us, such as
# the close of a client, runs before this.
atexit.register(stop_all)
