"""The gate: the listening socket of the broker, and who comes through it.

Promises: no connection makes the selector spin, not even when descriptors run out.
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from teacher_logits_server.broker.peers import peer_of

if TYPE_CHECKING:
    from teacher_logits_server.broker.peers import Peer

_BACKLOG = 128

_log = logging.getLogger(__name__)


class Gate:
    """Listens at a path, which the caller has claimed."""

    def __init__(self, path: str) -> None:
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

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._listener.fileno()

    def accept(self, *, is_full: bool) -> tuple[socket.socket, Peer] | None:
        """Take the next connection, which never blocks; None where it was turned away."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                self._shed()
            return None
        try:
            if is_full:
                raise ConnectionRefusedError("too many lines")
            connection.setblocking(False)
            return connection, peer_of(connection)
        except OSError as error:
            _log.warning("connection refused", extra={"facts": {"error": str(error)}})
            connection.close()
            return None

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()
        self._spare.close()

    def _shed(self) -> None:
        """Turn one connection away when descriptors run out, or the selector would spin."""
        self._spare.close()
        with suppress(OSError):  # another thread may have taken the descriptor
            self._listener.accept()[0].close()
        with suppress(OSError):
            self._spare = socket.socket(socket.AF_UNIX)
        _log.warning("connection refused", extra={"facts": {"error": "no descriptors left"}})
