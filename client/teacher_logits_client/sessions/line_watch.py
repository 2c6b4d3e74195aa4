"""Line watch: what the server says of itself is heard, although nobody here waits for anything.

A line is read by whoever waits for a reply on it, which costs no change of threads. An idle session
so hears nothing, and that is fine but for one thing: slabs that are gone. What stays mapped is
memory of the machine that nobody else can have, and a handle that stays open keeps its owner from
freeing device memory. So a session that has opened slabs has its line watched, by a thread that
takes what comes while nobody else does: what comes ahead of steps too, and writers of device
memory, which are so proven before they are read.

Promises: it wakes for nothing but the line, and a busy line wakes it seldom. It ends with the line,
and tells of that.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAvailable, TeacherLogitsError
from teacher_logits_client.sessions.step_thread import StepThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits_client.line import Line

_CALM_SECONDS = 0.05
"""How long it looks away after each packet: whoever is at work on the line reads it himself."""


class LineWatch:
    """Watches one session's line, from ``start`` to ``stop``.

    Args:
        when_ended: a method, called once the line has ended; its object is not kept alive by that.
    """

    def __init__(self, line: Line, *, when_ended: Callable[[], None]) -> None:
        self._line = line
        self._when_ended = weakref.WeakMethod(when_ended)
        self._lock = threading.Lock()
        self._bell = -1
        self._stopped = threading.Event()
        self._thread: StepThread | None = None

    def start(self) -> None:
        """Begin, unless it has; from any thread.

        Raises:
            NotAvailable: this process may have no descriptor more, or no thread.
        """
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                if self._bell < 0:
                    self._bell = _bell()
                    weakref.finalize(self, os.close, self._bell).atexit = False
                self._thread = StepThread(self._run, stop=self.stop)

    def stop(self) -> None:
        """End; before the line is closed. Waits for nothing, and twice is fine."""
        with self._lock:
            self._stopped.set()
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._line.await_packet(self._bell)
            try:
                self._line.drain()
            except TeacherLogitsError:
                return
            if self._line.has_ended:
                when_ended = self._when_ended()
                if when_ended is not None:
                    when_ended()
                return
            self._stopped.wait(_CALM_SECONDS)


def _bell() -> int:
    try:
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    except OSError as error:
        raise NotAvailable(
            f"no descriptor can be had to watch a session's line ({error.strerror}): raise the "
            "limit of open files (ulimit -n), or close what is not needed",
            facts={"errno": error.errno or 0},
        ) from error
