"""Threads of this side: each is a daemon, and one that cannot be had is an error with its limit.

What is raised for it is ``NotAvailable``, like any want of room; whoever can do without says so.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable


def start(work: Callable[[], None], *, name: str) -> threading.Thread:
    """Return a thread that runs ``work`` once, started.

    Raises:
        NotAvailable: this process may have no more of them.
    """
    thread = threading.Thread(target=work, name=f"teacher-logits-{name}", daemon=True)
    start_made(thread)
    return thread


def start_made(thread: threading.Thread) -> None:
    """Start a thread; otherwise as ``start``."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NotAvailable(
            f"no thread can be had for {thread.name} ({error}): raise the limit of processes and "
            "threads (ulimit -u, or a container's pids limit), or run fewer",
            facts={"thread": thread.name},
        ) from error
