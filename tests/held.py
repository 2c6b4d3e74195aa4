"""What this process holds, and what of it is new: for tests of what is left behind.

The tests share one process, and threads of other tests let theirs go at any time. So it is
never numbers that are compared: what was not there before is what counts, and it is given
the time that another thread takes to close it.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_PATIENCE_SECONDS = 30.0

Thing = TypeVar("Thing")


def open_descriptors() -> frozenset[str]:
    """The open descriptors of this process, each with what it is open on."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # the listing's own, or closed meanwhile
            continue
    return frozenset(found)


def running_threads() -> frozenset[threading.Thread]:
    """The threads of this process."""
    return frozenset(threading.enumerate())


def left_behind(
    before: frozenset[Thing], look: Callable[[], frozenset[Thing]], *, at_most: int = 0
) -> set[Thing]:
    """What there is more than before, as soon as it is no more than `at_most`, or in the end."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while len(new := look() - before) > at_most and time.monotonic() < until:
        time.sleep(0)
    return set(new)
