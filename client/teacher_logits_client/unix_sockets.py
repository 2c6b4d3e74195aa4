"""Unix sockets: connected within a time."""

from __future__ import annotations

import socket
import struct

_LEAST_SECONDS = 0.001
"""None at all would be no timeout to the kernel."""


def connect_within(connection: socket.socket, path: str, seconds: float) -> None:
    """Connect a Unix socket, which blocks afterwards; one that is busy is waited for.

    With a timeout of Python's it would not block, and then one whose queue is full, as when many
    ranks start at once, refuses at once (EAGAIN).

    Raises:
        OSError: nobody answers at the path.
    """
    seconds = max(seconds, _LEAST_SECONDS)
    span = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
    connection.connect(path)
