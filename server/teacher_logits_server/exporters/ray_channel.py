"""The channel between a server and its Ray process: packets of JSON, a descriptor beside some.

One packet is one message, a mapping with its kind under ``op``; bytes are written as hex. Both
ends are this project's own, parent and child.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Message: TypeAlias = "dict[str, int | float | str | list[list[int]]]"

_MOST_BYTES = 1 << 16


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, op: str, *, descriptor: int | None = None, **message: object) -> bool:
        """Send a message; return whether the other end is there.

        The descriptor stays the caller's, who may close it at once.
        """
        data = json.dumps({"op": op, **message}).encode()
        descriptors = [] if descriptor is None else [descriptor]
        try:
            with self._sending:
                socket.send_fds(self._socket, [data], descriptors)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Message, int | None] | None:
        """Return the next message, and what came beside it; None once the other end is gone.

        Or has been silent for longer than ``wait`` said.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 1)
        except OSError:
            return None
        if not data:
            for each in descriptors:
                os.close(each)
            return None
        return json.loads(data), descriptors[0] if descriptors else None

    def wait(self, seconds: float | None) -> None:
        """Have ``receive``, and ``send``, wait no longer than so; None is for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Hang up: the other end sees it at once, and so does who receives here."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has hung up
        self._socket.close()


def text(message: Mapping[str, object], name: str) -> str:
    """Return a text of a message; empty where there is none."""
    return str(message.get(name, ""))


def number(message: Mapping[str, object], name: str) -> int:
    """Return a whole number of a message; 0 where there is none."""
    found = message.get(name, 0)
    return int(found) if isinstance(found, int | float) else 0


def runs(message: Mapping[str, object]) -> Sequence[Sequence[int]]:
    """Return the runs of a ``put``: source, offset and size in bytes each."""
    found = message.get("runs", [])
    return found if isinstance(found, list) else []
