"""Forked workers of a student, which the test drives by a socket and ends by their pid."""

import os
import select
import signal
import socket

from tests.stopping import await_stopped

PATIENCE_SECONDS = 30.0
"""How long anything may take that must happen; nothing here hangs on how soon it does."""


class Worker:
    """A forked worker of a student, by its socket."""

    def __init__(self, listener: socket.socket) -> None:
        listener.settimeout(PATIENCE_SECONDS)
        self._line, _ = listener.accept()
        self._line.settimeout(PATIENCE_SECONDS)
        self._pipe = self._line.makefile("rw")
        self.pid = int(self._pipe.readline())
        self._pidfd = os.pidfd_open(self.pid)

    def read(self) -> None:
        """Have it read all that it can see, which must be right."""
        self._pipe.write("read\n")
        self._pipe.flush()
        answer = self._pipe.readline()
        assert answer == "right\n", answer

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stop is waited for, and an end."""
        if number is signal.SIGKILL:
            self.kill()
            return
        signal.pidfd_send_signal(self._pidfd, number)
        if number is signal.SIGSTOP:
            await_stopped(self.pid)

    def kill(self) -> None:
        """End it, and wait for its end; twice is fine."""
        if self._pidfd < 0:
            return
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        ready, _, _ = select.select([self._pidfd], [], [], PATIENCE_SECONDS)
        assert ready, f"worker {self.pid} lives on"
        os.close(self._pidfd)
        self._pidfd = -1
        self._pipe.close()
        self._line.close()
