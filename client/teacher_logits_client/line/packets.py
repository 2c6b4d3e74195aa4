"""Packets: a Unix SEQPACKET socket that descriptors ride on, and nothing about what they mean."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from teacher_logits_client.line.file_watch import FileWatch
from teacher_logits_client.unix_sockets import connect_within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_PACKET_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4
_ROOM_BESIDE = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)

Received: TypeAlias = "tuple[bytes, list[tuple[int, int, bytes]], int, object]"
"""As ``recvmsg`` gives it."""


class Packet(NamedTuple):
    """A packet, empty at the end of the connection. Whoever has it closes its descriptors.

    ``intact``: all of its data came. Of its descriptors those are missing that this process may not
    have open.
    """

    data: bytes
    descriptors: list[int]
    intact: bool


class Connection(socket.socket):
    """A connection that never blocks, with a bell that ends the wait of whoever waits for it."""

    def __init__(
        self,
        family: int = socket.AF_UNIX,
        kind: int = socket.SOCK_SEQPACKET,
        proto: int = 0,
        fileno: int | None = None,
    ) -> None:
        super().__init__(family, kind, proto, fileno)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_bell = weakref.finalize(self, os.close, self.bell)
        self._close_bell.atexit = False
        #: What ends a wait too; None until some file is watched.
        self.files: FileWatch | None = None
        self.ends = select.poll()
        # A server's end is told all the same; one that says nothing more may still hear us.
        self.ends.register(self, getattr(select, "POLLRDHUP", 0))
        self._making = threading.Lock()

    def watch(self, fd: int) -> Callable[[], None]:
        """Have whoever waits look again when a file is touched; return what ends that.

        Raises:
            SlabOpenError: it cannot be watched.
        """
        with self._making:
            files = self.files = self.files or FileWatch()
        number = files.add(fd)
        self.ring()  # who waits now does not wait for the watch yet
        return partial(files.remove, number)

    def ring(self) -> None:
        """Have whoever waits look again; from any thread, before the close."""
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        """Close it and its bell."""
        self._close_bell()
        if self.files is not None:
            self.files.close()
        super().close()

    def __del__(self) -> None:
        if self.fileno() >= 0:  # in silence: whoever dropped what it belongs to hears of that
            super().close()


def connect(path: str, timeout: float) -> Connection:
    """Return a connection that never blocks; ``timeout`` seconds are for being taken.

    Raises:
        OSError: nobody answers at the path, or this platform has no such sockets.
    """
    connection = Connection()
    try:
        connect_within(connection, path, timeout)
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


def receive_into(received: list[Received], connection: socket.socket) -> None:
    """Append a packet with the descriptors beside it; BlockingIOError where there is none.

    It is in the list or in the socket: ``extend`` and ``map`` are the interpreter's own, and no
    signal's handler runs in them.
    """
    arguments = (_MAX_PACKET_BYTES,), (_ROOM_BESIDE,), (socket.MSG_CMSG_CLOEXEC,)
    received.extend(map(connection.recvmsg, *arguments))


def packet_of(received: Received) -> Packet:
    """Return what was received. Its descriptors are the same each time."""
    data, ancillary, flags, _ = received
    descriptors = array.array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
    return Packet(data, descriptors.tolist(), not flags & socket.MSG_TRUNC)


def wait(connection: Connection, event: int, until: float) -> bool:
    """Wait until the socket is ready or has failed; False after the deadline.

    Who waits to read is told False at a ring, too, and when a watched file was touched: once at
    once, and once more by the next wait, which takes that in. Whoever is woken so has what it
    waited for before it tidies up.
    """
    if connection.fileno() < 0:
        return True  # closed on this side
    poll = select.poll()
    poll.register(connection, event)
    files = connection.files if event == select.POLLIN else None
    if files is not None and files.is_told:
        files.drain()
        return False
    if event == select.POLLIN:
        poll.register(connection.bell, select.POLLIN)
    if files is not None:
        poll.register(files.fd, select.POLLIN)
    ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
    woken = False
    for fd, _ in ready:
        if fd == connection.bell:
            with suppress(OSError):  # closed meanwhile
                os.eventfd_read(fd)
        elif files is not None and fd == files.fd:
            files.is_told = True
        else:
            woken = True
    return woken


def wait_beside(connection: Connection, bell: int) -> None:
    """Wait until something lies in the socket, it has ended, or a bell of the caller's rings.

    Takes nothing, so that another thread may wait to read at the same time.
    """
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    if connection.fileno() >= 0:  # else it was closed on this side, and its bell will ring
        poll.register(connection, select.POLLIN)
    poll.poll()


def has_hung_up(connection: Connection) -> bool:
    """Whether the other side has closed the connection, or its half; never waits.

    By one thread at a time.
    """
    return connection.fileno() < 0 or bool(connection.ends.poll(0))
