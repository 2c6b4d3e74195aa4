"""Wide sockets: more bytes at a time through Unix sockets that gRPC has accepted.

An accepted Unix socket holds ``net.core.wmem_default`` bytes, 208 KiB, whatever its listener
holds. A stream then wakes both ends 60 times for 12.6 MB, over two threads of gRPC each, and
that is what it waits for most: with twice the room it was 1.13 to 1.23 times as quick
(docs/performance.md). TCP sockets grow by themselves.

gRPC has no option for it and shows no descriptor, so they are found among this process's own,
by the path that they were accepted at. Promises: nothing but that limit is changed, no
socket's is lowered, and where it cannot be done (no Linux, or more than 512 descriptors) nothing
is said: streams are slower. A look takes 2 us a descriptor, so there are four a second at most.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_DESCRIPTORS = "/proc/self/fd"
#: The kernel doubles what it is asked for, and grants ``net.core.wmem_max`` at most: 416 KiB.
_ASKED_BYTES = 512 * 1024
_ENOUGH_BYTES = 416 * 1024
_LOOK_SECONDS = 0.25
#: Above this nothing is looked at: 500 take a millisecond, in which the loop hears nobody.
_MAX_DESCRIPTORS = 512


class WideSockets:
    """Widens what is accepted at some Unix sockets' paths.

    Nobody says over which connection a stream goes, so all are looked through as streams begin:
    one that is new is wide after a quarter of a second at the latest.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self._paths = frozenset(paths)
        self._next_look = float("-inf")
        #: Sockets that were there at the last look: inodes by descriptor.
        self._known: dict[int, int] = {}

    def look(self, now: float) -> None:
        """Widen what was accepted since the last look, unless that has just been."""
        if not self._paths or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        known, self._known = self._known, dict(_sockets())
        for descriptor, inode in self._known.items():
            if known.get(descriptor) != inode:
                with suppress(OSError):  # closed meanwhile
                    _widen(descriptor, self._paths)


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of every socket of this process; none where there are too many."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return
    if len(names) > _MAX_DESCRIPTORS:
        return
    for descriptor in map(int, names):
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                yield descriptor, status.st_ino


def _widen(descriptor: int, paths: Collection[str]) -> None:
    # A copy, so that the descriptor's number can become nothing else here meanwhile.
    copy = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with found:
        if found.family != socket.AF_UNIX or found.getsockname() not in paths:
            return
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < _ENOUGH_BYTES:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ASKED_BYTES)
