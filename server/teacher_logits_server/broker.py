"""The broker: a Unix SEQPACKET socket, on a thread and a selector of its own.

It knows who connects (``peers``), moves packets and the descriptors that ride beside them,
and learns how each line ends. What packets mean is the desk's business.

Promises: no peer stops it. It never waits for one, so that whoever does not read is dropped
once the kernel's buffer is full; whoever says nothing, or too much, is dropped too. The end
of a line is told once, with what the kernel says of its process:

    hang-up, process ended      nobody who inherited the line is left: its room is free
    hang-up, process alive      somebody may still read: quarantine
    we hang up ourselves        the same, as no hang-up of theirs was seen
    process ended, no hang-up   nothing: a forked child may hold the line, and read
"""

from __future__ import annotations

import array
import errno
import itertools
import logging
import os
import select
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits_server.peers import Peer, peer_of

if TYPE_CHECKING:
    from datetime import timedelta

    from teacher_logits.clock import Clock

MAX_PACKET_BYTES = 4096
_BACKLOG = 128
_EXITING_GRACE_SECONDS = 60.0
_UNKNOWN_GRACE_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Line:
    """One connection. ``session_id`` is empty until the desk has accepted its hello."""

    peer: Peer
    session_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A packet to send. The broker closes ``descriptor`` once it is sent, or is not."""

    packet: bytes
    descriptor: int | None = None
    hang_up: bool = False


class Desk(Protocol):
    """What answers packets. Called on the broker's thread, and quick."""

    def answer(self, line: Line, packet: bytes) -> Answer:
        """Answer one packet; never raises for what a peer sent."""

    def refuse_oversized(self, line: Line, limit_bytes: int) -> Answer:
        """Answer a packet of more than ``limit_bytes``, whose bytes are gone."""

    def line_ended(self, line: Line, *, process_alive: bool) -> None:
        """Learn that the line of a session has ended."""


@dataclass(frozen=True, kw_only=True)
class _Open:
    line: Line
    socket: socket.socket


class Broker:
    """Serves lines at ``path``, which the caller has claimed.

    Args:
        hello_within: a connection that has not said hello by then is dropped.
        max_lines: most connections at a time; the next is closed at once.
    """

    def __init__(
        self, *, path: str, desk: Desk, clock: Clock, hello_within: timedelta, max_lines: int
    ) -> None:
        self._path = path
        self._desk = desk
        self._clock = clock
        self._hello_seconds = hello_within.total_seconds()
        self._max_lines = max_lines
        self._open: dict[int, _Open] = {}
        #: Those of them that have not said hello, oldest first, with the time to give up.
        self._strangers: dict[int, float] = {}
        #: Lines that hung up while their process lives, by pidfd, with the time to give up.
        self._leaving: dict[int, tuple[Line, float]] = {}
        self._thread = threading.Thread(target=self._run, name="teacher-logits-broker", daemon=True)
        self._is_open = False

    def start(self) -> None:
        """Listen, and serve on a thread of its own.

        Raises:
            OSError: the socket cannot be made.
        """
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            self._listener.bind(self._path)
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)
        self._is_open = True
        self._thread.start()

    def stop(self) -> None:
        """Close every line and join the thread; the desk hears nothing of it.

        Doing so twice is fine, and so is stopping one that never started.
        """
        if not self._is_open:
            return
        self._is_open = False
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for each in self._open.values():
            each.socket.close()
            each.line.peer.close()
        for line, _ in self._leaving.values():
            line.peer.close()
        self._open.clear()
        self._strangers.clear()
        self._leaving.clear()
        self._listener.close()
        self._poll.close()
        os.close(self._wake)
        os.close(self._spare)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            for fd, events in self._poll.poll(self._timeout()):
                if fd == self._wake:
                    return
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._leaving:
                    self._leave(fd, process_alive=False)
                elif fd in self._open:
                    self._serve_guarded(self._open[fd], events)
            self._give_up()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                self._shed()
            return
        try:
            if len(self._open) >= self._max_lines:
                raise ConnectionRefusedError("too many lines")
            connection.setblocking(False)
            peer = peer_of(connection)
        except OSError as error:
            _log.warning("connection refused", extra={"facts": {"error": str(error)}})
            connection.close()
            return
        fd = connection.fileno()
        self._open[fd] = _Open(line=Line(peer=peer), socket=connection)
        self._strangers[fd] = self._clock.now() + self._hello_seconds
        self._poll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)

    def _shed(self) -> None:
        """Turn one connection away when descriptors run out, or the selector would spin."""
        os.close(self._spare)
        try:
            self._listener.accept()[0].close()
        except OSError:
            pass
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        _log.warning("connection refused", extra={"facts": {"error": "no descriptors left"}})

    def _serve_guarded(self, each: _Open, events: int) -> None:
        try:
            self._serve(each, events)
        except Exception:
            _log.exception("line failed", extra={"facts": _facts(each.line)})
            if self._open.get(each.socket.fileno()) is each:
                self._hang_up(each)

    def _serve(self, each: _Open, events: int) -> None:
        try:
            packet = each.socket.recv(MAX_PACKET_BYTES + 1)
        except BlockingIOError:
            return
        except ConnectionResetError:  # hung up with replies unread
            packet, events = b"", select.EPOLLHUP
        if not packet and events & select.EPOLLHUP:
            self._hung_up(each)
        elif not packet and events & select.EPOLLRDHUP:  # shut down, not closed
            self._hang_up(each)
        elif len(packet) > MAX_PACKET_BYTES:
            self._send(each, self._desk.refuse_oversized(each.line, MAX_PACKET_BYTES))
        else:  # an empty packet is a packet too
            self._send(each, self._desk.answer(each.line, packet))
            if each.line.session_id:
                self._strangers.pop(each.socket.fileno(), None)

    def _send(self, each: _Open, answer: Answer) -> None:
        rights = []
        if answer.descriptor is not None:
            descriptors = array.array("i", [answer.descriptor])
            rights.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors))
        try:
            each.socket.sendmsg([answer.packet], rights, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            pass  # hung up: the selector says so next
        except OSError as error:  # a full buffer, for one: whoever does not read is dropped
            _log.warning(
                "line dropped", extra={"facts": {**_facts(each.line), "error": str(error)}}
            )
            self._hang_up(each)
            return
        finally:
            if answer.descriptor is not None:
                os.close(answer.descriptor)
        if answer.hang_up:
            self._hang_up(each)

    def _hung_up(self, each: _Open) -> None:
        """The last holder of the line's other end closed it."""
        line = self._close(each)
        exiting = line.peer.is_exiting()
        if not line.peer.is_alive():
            self._end(line, process_alive=False)
        elif exiting is False or not line.session_id or not line.peer.is_proven:
            self._end(line, process_alive=True)
        else:  # its end will show on the pidfd in a moment
            grace = _EXITING_GRACE_SECONDS if exiting else _UNKNOWN_GRACE_SECONDS
            self._leaving[line.peer.pidfd] = (line, self._clock.now() + grace)
            self._poll.register(line.peer.pidfd, select.EPOLLIN)

    def _hang_up(self, each: _Open) -> None:
        self._end(self._close(each), process_alive=True)

    def _close(self, each: _Open) -> Line:
        fd = each.socket.fileno()
        del self._open[fd]
        self._strangers.pop(fd, None)
        self._poll.unregister(fd)
        each.socket.close()
        return each.line

    def _leave(self, pidfd: int, *, process_alive: bool) -> None:
        line, _ = self._leaving.pop(pidfd)
        self._poll.unregister(pidfd)
        self._end(line, process_alive=process_alive)

    def _end(self, line: Line, *, process_alive: bool) -> None:
        line.peer.close()
        if line.session_id:
            self._desk.line_ended(line, process_alive=process_alive)

    def _timeout(self) -> float | None:
        """Seconds until something must be given up; None where nothing waits."""
        times = [give_up for _, give_up in self._leaving.values()]
        times += itertools.islice(self._strangers.values(), 1)
        return max(0.0, min(times) - self._clock.now()) if times else None

    def _give_up(self) -> None:
        if not self._leaving and not self._strangers:
            return
        now = self._clock.now()
        for pidfd, (_, give_up) in list(self._leaving.items()):
            if give_up <= now:
                self._leave(pidfd, process_alive=True)
        for fd, give_up in list(self._strangers.items()):
            if give_up <= now:
                self._hang_up(self._open[fd])


def _facts(line: Line) -> dict[str, int | str]:
    return {"session_id": line.session_id, "pid": line.peer.pid, "uid": line.peer.uid}
