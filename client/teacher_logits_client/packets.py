"""Packets: a Unix SEQPACKET socket that descriptors ride on, and nothing about what they mean."""

from __future__ import annotations

import array
import select
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_PACKET_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4


class Packet(NamedTuple):
    """A packet, empty at the end of the connection. Whoever has it closes its descriptors."""

    data: bytes
    descriptors: list[int]
    intact: bool


def connect(path: str, timeout: float) -> socket.socket:
    """Return a connection that never blocks.

    Raises:
        OSError: nobody answers at the path, or this platform has no such sockets.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout)
        connection.connect(path)
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a packet; BlockingIOError where the other side's buffer is full.

    ``descriptors`` go beside it: the other side gets its own, and these stay the caller's.
    """
    if not descriptors:
        connection.send(packet, socket.MSG_NOSIGNAL)
        return
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([packet], beside, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> Packet:
    """Take a packet with the descriptors beside it; BlockingIOError where there is none."""
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * descriptors.itemsize)
    data, ancillary, flags, _ = connection.recvmsg(_MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
    cut = bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
    return Packet(data, descriptors.tolist(), not cut)


def wait(connection: socket.socket, event: int, until: float) -> bool:
    """Wait until the socket is ready or has failed; False after the deadline."""
    return bool(_poll(connection, event, max(0.0, until - time.monotonic())))


def has_hung_up(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection; never waits."""
    return bool(_poll(connection, select.POLLIN, 0) & (select.POLLHUP | select.POLLERR))


def _poll(connection: socket.socket, event: int, seconds: float) -> int:
    if connection.fileno() < 0:
        return select.POLLERR  # closed on this side
    poll = select.poll()
    poll.register(connection, event)
    ready = poll.poll(seconds * 1000)
    return ready[0][1] if ready else 0
