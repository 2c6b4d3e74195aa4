"""Slab references: what opens a payload that lies in a slab of a worker on the same node.

A reader asks once, on a connection that it keeps open as long as it reads:

    request    | secret 16 | number 8 | generation 8 |      little-endian
    answer     | "L" | with the slab's descriptor, or | "O" |: it was written over since
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits.payload import Extent

SECRET_BYTES = 16
ASK = struct.Struct(f"<{SECRET_BYTES}sQQ")
LENT, WRITTEN_OVER = b"L", b"O"
_CREDENTIALS = struct.Struct("3i")


def may_read(reader: socket.socket, request: bytes, secret: bytes) -> bool:
    """Say whether who sent a request is this process's user, and shows its secret."""
    told = reader.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(told)
    return uid == os.geteuid() and secrets.compare_digest(request[:SECRET_BYTES], secret)


@dataclass(frozen=True, kw_only=True)
class SlabReference:
    """Where a payload lies, and whom to ask for it.

    ``socket_name`` is that of an abstract Unix socket in the owner's network namespace, ``secret``
    proves to the owner that the reference came from it. ``host`` and ``pid`` are for messages.
    """

    extent: Extent
    number: int
    socket_name: str
    secret: bytes = field(repr=False)
    host: str
    pid: int
