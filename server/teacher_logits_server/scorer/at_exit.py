"""At exit: scorers that nobody stopped end behind their pass, before the interpreter does.

At the end of a program that has not stopped its server, a thread inside torch would take the
process with it.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

_LAST_PASS_SECONDS = 30.0


class Stoppable(Protocol):
    """A scorer, to this module."""

    @property
    def healthy(self) -> bool: ...
    def stop(self, *, patience_seconds: float | None = None) -> None: ...


#: With the process that has the thread: a forked child has none.
_started: weakref.WeakKeyDictionary[Stoppable, int] = weakref.WeakKeyDictionary()


def stop_at_exit(scorer: Stoppable) -> None:
    """Have a scorer stopped at the end of this process, if it still lives."""
    _started[scorer] = os.getpid()


@atexit.register
def _stop_all() -> None:
    for scorer, pid in list(_started.items()):
        if pid == os.getpid() and scorer.healthy:
            scorer.stop(patience_seconds=_LAST_PASS_SECONDS)
