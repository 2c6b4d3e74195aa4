"""Outbox: what a line's socket had no room for, in order, replies and mail alike.

Promises: nothing waits for a peer, and nothing grows for one that does not read: a reply that
finds ``MAX_WAITING`` packets waiting is refused, and mail is for an outbox that is empty. Every
descriptor is closed here, sent or not.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits_server.broker.lines import Answer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits_server.broker.lines import Line

MAX_WAITING = 64


@dataclass(frozen=True, kw_only=True)
class OpenLine:
    """A line that has not ended, with its socket and what waits for that."""

    line: Line
    socket: socket.socket
    outbox: Outbox

    def send_mail(self, packets: Iterable[bytes]) -> None:
        """Send mail into an empty outbox, and shut this side where it is the last.

        Raises:
            OSError: the connection has failed.
        """
        self.outbox.put_mail(packets)
        if self.line.is_over:
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give its socket back, and whatever waits for it."""
        self.outbox.close()
        self.socket.close()


class Outbox:
    """The way out of one socket that never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._waiting: deque[Answer] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits for room."""
        return not self._waiting

    def put_reply(self, answer: Answer) -> None:
        """Send a reply, or keep it until there is room.

        Raises:
            OSError: the connection has failed, or too many packets wait.
        """
        if not self._waiting and self._send(answer):
            return
        if len(self._waiting) >= MAX_WAITING:
            _close(answer)
            raise BlockingIOError(f"{len(self._waiting)} packets wait to be read")
        self._waiting.append(answer)

    def put_mail(self, packets: Iterable[bytes]) -> None:
        """Send packets ahead, or keep what the socket has no room for.

        Raises:
            OSError: the connection has failed.
        """
        for packet in packets:
            answer = Answer(packet)
            if self._waiting or not self._send(answer):
                self._waiting.append(answer)

    def flush(self) -> None:
        """Send what waits, as far as there is room.

        Raises:
            OSError: the connection has failed.
        """
        while self._waiting:
            answer = self._waiting.popleft()
            if not self._send(answer):
                self._waiting.appendleft(answer)
                return

    def close(self) -> None:
        """Drop what waits."""
        while self._waiting:
            _close(self._waiting.popleft())

    def _send(self, answer: Answer) -> bool:
        """Send one packet; return False, and keep its descriptor, where there is no room."""
        try:
            if answer.descriptor is None:
                self._socket.send(answer.packet, socket.MSG_NOSIGNAL)
            else:
                descriptors = array.array("i", [answer.descriptor])
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                self._socket.sendmsg([answer.packet], beside, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # hung up: the selector says so next
        except BaseException:
            _close(answer)
            raise
        _close(answer)
        return True


def _close(answer: Answer) -> None:
    if answer.descriptor is not None:
        os.close(answer.descriptor)
