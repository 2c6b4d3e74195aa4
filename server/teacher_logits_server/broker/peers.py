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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from teacher_logits.views import SessionView

SO_PEERPIDFD = 77
"""Linux's number; the socket module does not know it."""

_CREDENTIALS = struct.Struct("3i")
_PF_EXITING = 0x4
# Of /proc/PID/stat, counted behind the command's closing bracket.
_STATE_FIELD, _FLAGS_FIELD, _STARTED_FIELD = 0, 6, 19
_STOPPED = (b"T", b"t")
_ENDED = (b"Z", b"X")


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
        fields = _stat(self.pid)
        return None if fields is None else bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)

    def started(self) -> int:
        """Return when a proven process began, in its kernel's ticks; 0 where nobody says.

        Number and beginning together name a process for as long as the machine runs.
        """
        fields = _stat(self.pid)
        return (
            0 if fields is None or not self.is_proven or not self.is_alive() else _started(fields)
        )

    def close(self) -> None:
        """Give the pidfd back."""
        if self.is_proven:
            os.close(self.pidfd)


class Process(Protocol):
    """A process by its number and its beginning, as ``Peer.started`` has it."""

    @property
    def pid(self) -> int: ...
    @property
    def started(self) -> int: ...


def is_stopped(pid: int, started: int) -> bool:
    """Whether a process that began then is stopped, by a signal or a debugger.

    False where it is gone or nobody says: it may be out of sight.
    """
    fields = _stat(pid) if started else None
    return fields is not None and _started(fields) == started and fields[_STATE_FIELD] in _STOPPED


def looked_at(
    sessions: Iterable[SessionView], processes: Mapping[str, Process]
) -> tuple[SessionView, ...]:
    """Return sessions with those marked whose process is stopped; ``processes`` by session id."""
    looked: list[SessionView] = []
    for session in sessions:
        process = processes.get(session.session_id)
        if process is not None and is_stopped(process.pid, process.started):
            session = replace(session, state="unresponsive")
        looked.append(session)
    return tuple(looked)


def is_gone(pid: int, started: int) -> bool:
    """Whether a process that began then has ended, or is on its way out.

    False where nobody ever said when it began: it may be out of sight.
    """
    if not started:
        return False
    fields = _stat(pid)
    if fields is None or _started(fields) != started:
        return True
    return fields[_STATE_FIELD] in _ENDED or bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)


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


def _stat(pid: int) -> list[bytes] | None:
    """Return what the kernel says of a process; None where it says nothing."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > _STARTED_FIELD else None


def _started(fields: list[bytes]) -> int:
    return int(fields[_STARTED_FIELD])


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
