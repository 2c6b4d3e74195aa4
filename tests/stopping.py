"""Processes that stand still: a signal is sent at once and obeyed a moment later."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATIENCE_SECONDS = 30.0


def stop(pid: int) -> None:
    """Stop a process, and return when each thread of it stands still."""
    os.kill(pid, signal.SIGSTOP)
    await_stopped(pid)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process stopped for a while; it goes on whatever happens meanwhile."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def await_stopped(pid: int) -> None:
    """Wait until each thread of a process stands still; the kernel has no event for it."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until:
        if all(_stands_still(task) for task in Path(f"/proc/{pid}/task").iterdir()):
            return
        os.sched_yield()
    raise AssertionError(f"process {pid} was not stopped")


def _stands_still(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZ"
    except (FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
        return True
