"""Keys: what is typed at a terminal, as it is typed and unseen.

The terminal is as it was once ``typing`` is left, however that comes.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def typing() -> Iterator[int | None]:
    """Yield the descriptor that keys come from; None where standard input is no terminal."""
    try:
        fd = sys.stdin.fileno()
    except (OSError, ValueError, AttributeError):  # there is none, or a stand-in of a test's
        yield None
        return
    if not os.isatty(fd):
        yield None
        return
    import termios
    import tty

    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSANOW)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def typed(fd: int) -> str:
    """Return what was typed, at least a key; empty where the terminal is gone."""
    try:
        return os.read(fd, 64).decode("ascii", "replace")
    except OSError:
        return ""
