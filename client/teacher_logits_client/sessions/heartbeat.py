"""The heartbeat: an OS thread that renews a session which the kernel does not vouch for.

On a thread and not on an event loop, which lies about its process when it is busy. Each
renewal has a deadline of its own, and failed ones are tried again until the TTL has passed;
what became of them stands in ``SessionLife``.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from teacher_logits.errors import ServerUnreachableError, TeacherLogitsError
from teacher_logits_client import exits, threads
from teacher_logits_client.forks import Home

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.clock import Clock
    from teacher_logits_client.sessions.life import SessionLife


class Heartbeat:
    """Renews one session until it is stopped, or has ended.

    Args:
        life: the session; consulted and told under ``lock``.
        renew: sends one renewal, given the seconds that it may take.
        clock: the clock of ``life``.
        wait: waits for some seconds, and returns True as soon as ``stop`` was called.
    """

    def __init__(
        self,
        life: SessionLife,
        *,
        renew: Callable[[float], object],
        lock: threading.Lock,
        clock: Clock,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._life = life
        self._renew = renew
        self._lock = lock
        self._clock = clock
        self._home = Home()
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self._thread = threading.Thread(
            target=self.run, name=f"teacher-logits-heartbeat-{life.session_id}", daemon=True
        )

    def start(self) -> None:
        """Begin, on a thread of its own."""
        threads.start_made(self._thread)
        exits.watch(self)

    def stop(self) -> None:
        """Renew no more. Does not wait for a renewal that is under way."""
        self._stopped.set()

    # The end of the program (see ``exits.Stoppable``)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that it beats in, and no fork of it."""
        return self._home.is_here

    def stop_at_exit(self) -> None:
        """Renew no more; the session ends with its TTL."""
        self.stop()

    def tear_loose(self) -> None:
        """Do nothing more: whoever has the connection hangs up."""

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    # On the thread

    def run(self) -> None:
        """Renew until the end; the thread's own work."""
        while True:
            with self._lock:
                seconds = self._life.wait_before_renewal(self._clock.now())
            if seconds is None or self._wait(seconds):
                return
            self._renew_once()

    def _renew_once(self) -> None:
        sent = self._clock.now()
        with self._lock:
            timeout = self._life.renewal_timeout(sent)
        try:
            self._renew(timeout)
        except TeacherLogitsError as error:
            self._failed(error)
        except CancelledError as error:
            # This client was closed while the renewal was under way: there may be no next try.
            self._failed(ServerUnreachableError(str(error)))
        else:
            with self._lock:
                self._life.renewed(sent=sent)

    def _failed(self, problem: TeacherLogitsError) -> None:
        with self._lock:
            self._life.renewal_failed(problem, now=self._clock.now())
