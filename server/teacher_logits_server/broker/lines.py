"""Lines: packets of a broker socket, the descriptors beside them, and who answers them.

One packet is at most ``MAX_PACKET_BYTES`` and brings at most one descriptor, and that only on
a line that was told to take some. Whatever else comes is closed before anybody sees it.
"""

from __future__ import annotations

import array
import enum
import fcntl
import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_server.broker.peers import Peer

MAX_PACKET_BYTES = 64 * 1024
_F_GET_SEALS = 1034  # Linux's number; the fcntl module of Python 3.10 lacks it
# Room for two: one too many is seen, and the kernel closes what has no room.
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(2 * array.array("i").itemsize)


class Flaw(enum.Enum):
    """What keeps a packet from being answered as it is."""

    OVERSIZED = "oversized"
    DESCRIPTORS = "descriptors"


class Packet(NamedTuple):
    """A packet, empty at the end of a line. Whoever has it closes its descriptor."""

    data: bytes
    descriptor: int | None = None
    flaw: Flaw | None = None


@dataclass(kw_only=True)
class Line:
    """One connection. ``session_id`` is empty until the desk has accepted its hello.

    ``takes_descriptors`` is the desk's to set: packets may then bring one. So is ``is_over``: with
    its mail the last is sent, and its peer sees an end; that whoever holds the other end lets go of
    it is seen all the same. ``is_cut`` once the broker has hung up: then somebody may hold it.
    """

    peer: Peer
    session_id: str = ""
    takes_descriptors: bool = False
    is_over: bool = False
    is_cut: bool = False

    @property
    def facts(self) -> dict[str, int | str]:
        """What logs say of it."""
        return {"session_id": self.session_id, "pid": self.peer.pid, "uid": self.peer.uid}


class Answer(NamedTuple):
    """A packet to send. The broker closes ``descriptor`` once it is sent, or is not."""

    packet: bytes
    descriptor: int | None = None
    hang_up: bool = False


class Desk(Protocol):
    """What answers packets. Called on the broker's thread, and quick."""

    def answer(self, line: Line, packet: bytes, descriptor: int | None = None) -> Answer:
        """Answer one packet; never raises for what a peer sent.

        ``descriptor`` came beside it and is the broker's to close: keep a copy.
        """

    def refuse(self, line: Line, packet: bytes, flaw: Flaw) -> Answer:
        """Answer a packet that cannot be taken as it is; an oversized one is cut."""

    def mail(self, line: Line) -> Sequence[bytes]:
        """Return the packets that are due to be sent ahead over a session's line."""

    def line_ended(self, line: Line, *, process_alive: bool) -> bool:
        """Learn that the line of a session has ended; return whether room is in doubt with it."""

    def process_died(self, line: Line) -> None:
        """Learn that the process behind a line is gone, and that a child of its holds the line."""

    def process_ended(self, line: Line) -> None:
        """Learn that the process behind a line that ended is gone too."""


def receive(connection: socket.socket, *, takes_descriptors: bool) -> Packet:
    """Take the next packet.

    Raises:
        OSError: there is none, or the connection has failed.
    """
    room = _DESCRIPTORS_BYTES if takes_descriptors else 0
    data, beside, flags, _ = connection.recvmsg(MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    if not beside and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        return Packet(data)
    descriptors = _descriptors(beside)
    oversized = bool(flags & socket.MSG_TRUNC)
    # An empty one may look like the line's end, behind which nobody asks what it brought.
    if not data or oversized or len(descriptors) > 1 or flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            close_foreign(descriptor)
        return Packet(data, None, Flaw.OVERSIZED if oversized else Flaw.DESCRIPTORS)
    return Packet(data, descriptors[0] if descriptors else None)


def close_foreign(descriptor: int) -> None:
    """Close what a peer passed. To close anything but a memfd may wait, on a peer even: that is
    left to a thread of its own."""
    if is_memfd(descriptor):
        os.close(descriptor)
    else:
        threading.Thread(target=os.close, args=(descriptor,), daemon=True).start()


def is_memfd(descriptor: int) -> bool:
    """Whether a descriptor is memory that can be sealed; never waits."""
    try:
        fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        return False
    return True


def _descriptors(beside: list[tuple[int, int, bytes]]) -> list[int]:
    descriptors = array.array("i")
    for level, kind, rights in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
    return descriptors.tolist()
