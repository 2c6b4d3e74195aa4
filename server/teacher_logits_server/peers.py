"""Who is at the other end of a Unix socket, by the kernel's word alone.

``SO_PEERPIDFD`` (Linux 6.5) names the process that connected without a race, across PID
namespaces too. Older kernels name its pid, which is opened and then looked at once more, as
a pid can pass to another process in between. Where neither proves the peer, it is unproven,
and its payloads are streamed.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass

SO_PEERPIDFD = 77
"""Linux's number; the socket module does not know it."""

_CREDENTIALS = struct.Struct("3i")
_PF_EXITING = 0x4
_FLAGS_FIELD = 6  # of /proc/PID/stat, counted behind the command's closing bracket


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The process that connected. ``pid`` is 0 where it lives outside our PID namespace.

    ``pidfd`` is -1 where the process could not be proven; whoever holds the peer owns it.
    """

    pid: int
    uid: int
    pidfd: int

    @property
    def is_proven(self) -> bool:
        """Whether the kernel tells us of this very process's end."""
        return self.pidfd >= 0

    def is_alive(self) -> bool:
        """Whether the process has not ended; an unproven one counts as alive."""
        return not self.is_proven or not _is_readable(self.pidfd)

    def is_exiting(self) -> bool | None:
        """Whether a process that has not ended is on its way out; None where nobody says.

        A dying process closes its sockets a moment before its end shows on its pidfd.
        """
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
            return bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        """Give the pidfd back."""
        if self.is_proven:
            os.close(self.pidfd)


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected; the caller closes it.

    Raises:
        OSError: the socket has no such thing.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pidfd = _open_pid(pid, uid)
    return Peer(pid=pid, uid=uid, pidfd=pidfd)


def _open_pid(pid: int, uid: int) -> int:
    """Return a pidfd by number, or -1 where it may be another process's."""
    try:
        pidfd = os.pidfd_open(pid)  # refuses 0, a pid outside our namespace
    except OSError:
        return -1
    try:
        # The second look, at the process that we hold now and that keeps its number: a pid
        # may have passed to another one since the peer connected.
        if os.stat(f"/proc/{pid}").st_uid == uid:
            return pidfd
    except OSError:
        pass
    os.close(pidfd)
    return -1


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
