"""The gate: the listening socket of the broker, and who comes through it.

Promises: no connection makes the selector spin, not even when descriptors run out.
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress

from teacher_logits_server.broker.lines import Line
from teacher_logits_server.broker.outbox import OpenLine, Outbox
from teacher_logits_server.broker.peers import peer_of
from teacher_logits_server.metrics.refusals import Refusals, TurnedAway

_BACKLOG = 128

_log = logging.getLogger(__name__)


class Gate:
    """Listens at a path, which the caller has claimed."""

    def __init__(self, path: str, refusals: Refusals | None = None) -> None:
        """Listen.

        Raises:
            OSError: the socket cannot be made.
        """
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            self._listener.bind(path)
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._spare = socket.socket(socket.AF_UNIX)
        self._refusals = refusals or Refusals()

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._listener.fileno()

    def accept(self, *, is_full: bool) -> OpenLine | None:
        """Take the next connection, which never blocks; None where it was turned away."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                self._shed()
            return None
        if is_full:
            self._refuse(connection, TurnedAway.TOO_MANY_LINES, "too many lines")
            return None
        try:
            connection.setblocking(False)
            line = Line(peer=peer_of(connection))
            return OpenLine(line=line, socket=connection, outbox=Outbox(connection))
        except OSError as error:
            self._refuse(connection, TurnedAway.PEER_UNKNOWN, str(error))
            return None

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()
        self._spare.close()

    def _refuse(self, connection: socket.socket | None, why: TurnedAway, error: str) -> None:
        self._refusals.turned_away(why)
        facts = {"reason": why.value, "error": error}
        _log.warning("connection refused", extra={"facts": facts, "throttle": why.value})
        if connection is not None:
            connection.close()

    def _shed(self) -> None:
        """Turn one connection away when descriptors run out, or the selector would spin."""
        self._spare.close()
        with suppress(OSError):  # another thread may have taken the descriptor
            self._listener.accept()[0].close()
        with suppress(OSError):
            self._spare = socket.socket(socket.AF_UNIX)
        self._refuse(None, TurnedAway.NO_DESCRIPTORS, "no descriptors left")
