"""Turns: threads that wait on one connection take turns to read it.

Whoever waits first reads for all, and hands every packet to its owner; where he has what he waited
for, another goes on. So a wait costs no change of threads, and no thread reads but for who waits.

Every wait has a deadline. A forked child may not read: it has no part in this.
"""

from __future__ import annotations

import select
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from teacher_logits.errors import ServerUnreachableError
from teacher_logits_client.forks import Home
from teacher_logits_client.line import packets
from teacher_logits_client.line.inbox import Inbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits_client.line.replies import Reply

_LOOK_AGAIN_SECONDS = 1.0
"""Who waits for a reader that was interrupted before it could say that it stopped reads then."""


class Turns(ABC):
    """A connection to the broker at ``path``, which any thread may wait on."""

    def __init__(self, path: str, *, timeout: float) -> None:
        """Connect.

        Raises:
            OSError: nobody answers at the path, or this platform has no such sockets.
        """
        self._path = path
        self._home = Home()
        self._socket = packets.connect(path, timeout)
        self._inbox = Inbox(self._socket)
        # The lock's own `with`: an interrupt on the way out of a Condition's leaves it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: The thread that reads. One that finds itself here was interrupted as it began.
        self._reader: int | None = None
        #: Threads that wait for whoever reads; too many after an interrupt, and never too few.
        self._waiting = 0
        self._end = ""
        self._closed = False

    @property
    def has_ended(self) -> bool:
        """Whether either side has closed the connection."""
        with self._lock:
            if not self._end and packets.has_hung_up(self._socket):
                self._end = "the broker hung up"
            return bool(self._end)

    def drain(self) -> None:
        """Take whatever lies in the socket; wait for nothing, and leave an end to who waits next.

        Raises:
            ForkedClientError: this is a forked child.
        """
        self._home.check("session")
        reading = False
        try:
            with self._lock:
                if self._another_reads() or self._end:
                    return
                self._reader, reading = threading.get_ident(), True
            while self._take():
                pass
        finally:
            if reading:
                self._reader = None  # at once: an interrupt may come in any call from here on
                self._stop_reading()

    def wait(self, until_true: Callable[[], bool], until: float) -> bool:
        """Read, or wait for whoever reads, until something holds; False after the deadline.

        ``until_true`` is asked under this object's lock after each packet. What came before
        the end of the connection still counts.

        Raises:
            ServerUnreachableError: the connection has ended.
            ForkedClientError: this is a forked child.
        """
        self._home.check("session")
        return self._read_until(until_true, until)

    def wake(self) -> None:
        """Have whoever waits ask again whether what it waits for holds."""
        with self._lock:
            self._changed.notify_all()
            if self._reader is not None and not self._closed:
                self._socket.ring()

    def close(self) -> None:
        """Let go of the connection; twice is fine, and a forked child's own stays open."""
        with self._lock:
            self._end = self._end or "this client closed it"
            self._changed.notify_all()
            self._closed = True
            if self._another_reads():
                self._socket.ring()
            else:
                self._close_all()

    @abstractmethod
    def _deliver(self, reply: Reply) -> None:
        """Hand a packet to its owner; a second time too, where the first was interrupted."""

    def _take(self) -> bool:
        """Take a packet and deliver it, False if there is none; by the one thread that reads."""
        try:
            reply = self._inbox.take()
        except BlockingIOError:
            return False
        except OSError as error:
            self._ended(f"the broker is gone ({error})")
            return False
        self._deliver(reply)
        self._inbox.note_delivered(reply)
        return True

    def _read_until(self, until_true: Callable[[], bool], until: float) -> bool:
        while True:
            reading = False
            try:
                with self._lock:
                    if until_true():
                        return True
                    self._check_open()
                    left = until - time.monotonic()
                    if left <= 0:
                        return False
                    if self._another_reads():
                        self._waiting += 1
                        self._changed.wait(min(left, _LOOK_AGAIN_SECONDS))
                        self._waiting -= 1
                        continue
                    self._reader, reading = threading.get_ident(), True
                if self._inbox or packets.wait(self._socket, select.POLLIN, until):
                    self._take()
            finally:
                if reading:
                    self._reader = None  # as above
                    self._stop_reading()

    def _another_reads(self) -> bool:
        return self._reader not in (None, threading.get_ident())

    def _stop_reading(self) -> None:
        with self._lock:
            if self._waiting:
                self._changed.notify_all()
            if self._closed and not self._another_reads():
                self._close_all()

    def _close_all(self) -> None:
        self._socket.close()
        self._inbox.close()

    def _ended(self, why: str) -> None:
        with self._lock:
            self._end = self._end or why
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._end:
            why = f"the line to the broker at {self._path} has ended: {self._end}"
            raise ServerUnreachableError(why, facts={"path": self._path})
