"""Inbox: what was taken off a socket last, until it has been delivered.

A packet comes once, and a signal's handler may raise between any two steps of ours. So it goes from
the socket into a list in one step of the interpreter's, and stays here until whoever reads has
delivered it. What is left of an interrupted reader is delivered by the next, perhaps for the second
time; whoever is handed it twice takes the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.line import packets
from teacher_logits_client.line.replies import Reply, close_all, read_reply

if TYPE_CHECKING:
    from teacher_logits_client.line.packets import Connection

_HUNG_UP = "it hung up"


class Inbox:
    """Of one connection. Only its reader takes, and may be interrupted."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: At most one, as the socket gave it.
        self._received: list[packets.Received] = []
        self._reply: Reply | None = None

    def __bool__(self) -> bool:
        return bool(self._reply or self._received)

    def take(self) -> Reply:
        """Return what was not delivered yet, else what comes next.

        Raises:
            BlockingIOError: nothing has come.
            OSError: the connection has failed or ended, or what came cannot be read.
        """
        if self._reply is not None:
            self._received.clear()  # as below, where that was interrupted
            return self._reply
        if not self._received:
            packets.receive_into(self._received, self._connection)
        packet = packets.packet_of(self._received[0])
        reply = self._reply = read_reply(packet)
        self._received.clear()  # the reply owns the descriptors
        if reply is None:
            close_all(packet.descriptors)
            raise ConnectionAbortedError("it sent what cannot be read" if packet.data else _HUNG_UP)
        return reply

    def note_delivered(self, reply: Reply) -> None:
        """Note that a reply has an owner; of one that is not here any more too."""
        if self._reply is reply:
            self._reply = None

    def close(self) -> None:
        """Close the descriptors of what was not delivered; by the reader, or after him."""
        if self._reply is not None:
            self._reply.close()
        elif self._received:
            close_all(packets.packet_of(self._received[0]).descriptors)
        self._received.clear()
        self._reply = None
