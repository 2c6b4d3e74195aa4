"""The broker: a Unix SEQPACKET socket, on a thread and a selector of its own.

It knows who connects (``peers``), moves packets (``lines``, ``outbox``) and what is sent ahead,
and learns how each line ends. What packets mean is the desk's business.

Promises: no peer stops it. It never waits for one, so that whoever does not read replies is
dropped once the kernel's buffer is full; whoever says nothing, or too much, is dropped too. Mail
waits for its reader, and drops nobody. The end of a line is told once, with what the kernel says
of its process:

    hang-up, process ended      nobody who inherited the line is left: its room is free
    hang-up, process alive      somebody may still read: quarantine; its end is told as well
    we hang up ourselves        the same, as no hang-up of theirs was seen
    process ended, no hang-up   a forked child holds the line, and may read: that is told too
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import TYPE_CHECKING

from teacher_logits_server.broker.gate import Gate
from teacher_logits_server.broker.leaving import Leaving
from teacher_logits_server.broker.lines import Answer, Desk, Line, close_foreign, receive
from teacher_logits_server.broker.postbox import Postbox
from teacher_logits_server.broker.strangers import Strangers
from teacher_logits_server.metrics.refusals import Refusals, TurnedAway

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from teacher_logits.clock import Clock
    from teacher_logits_server.broker.outbox import OpenLine

_READABLE = select.EPOLLIN | select.EPOLLRDHUP

_log = logging.getLogger(__name__)


class Broker:
    """Serves lines at ``path``, which the caller has claimed.

    Args:
        hello_within: a connection that has not said hello by then is dropped.
        max_lines: most connections at a time; the next is closed at once.
        refusals: counts connections that are turned away or dropped.
    """

    def __init__(
        self,
        *,
        path: str,
        desk: Desk,
        clock: Clock,
        hello_within: timedelta,
        max_lines: int,
        refusals: Refusals | None = None,
    ) -> None:
        self.path = path
        self._desk = desk
        self._clock = clock
        self._max_lines = max_lines
        self._refusals = refusals or Refusals()
        self._open: dict[int, OpenLine] = {}
        self._by_session: dict[str, OpenLine] = {}
        self._postbox = Postbox()
        self._strangers = Strangers(hello_within.total_seconds())
        self._thread = threading.Thread(target=self._run, name="teacher-logits-broker", daemon=True)

    def start(self) -> None:
        """Listen, and serve on a thread of its own.

        Raises:
            OSError: the socket cannot be made.
        """
        self._gate = Gate(self.path, self._refusals)
        self._postbox.open()
        self._poll = select.epoll()
        self._leaving = Leaving(self._poll)
        self._living = Leaving(self._poll)  # that have said hello and not ended
        self._doubted = Leaving(self._poll)  # that let go of a line, with room in quarantine
        self._poll.register(self._gate, select.EPOLLIN)
        self._poll.register(self._postbox, select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """Close every line and join the thread, unseen by the desk; with none, or again, fine."""
        if not self._postbox.shut():
            return
        self._thread.join()
        for each in self._open.values():
            each.close()
            each.line.peer.close()
        self._leaving.close()
        self._doubted.close()
        self._open.clear()
        self._gate.close()
        self._poll.close()
        self._postbox.close()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def line_count(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def tell(self, session_ids: Iterable[str]) -> None:
        """Have the mail of these sessions sent ahead; from any thread, and never waits.

        The broker's own thread sends it as soon as the packet at hand is understood, before
        that one's reply.
        """
        writers, readers = list[str](), list[str]()
        for session_id in session_ids:
            is_writer = (each := self._by_session.get(session_id)) and each.line.takes_descriptors
            (writers if is_writer else readers).append(session_id)
        self._postbox.put(writers, readers)
        if threading.current_thread() is not self._thread:
            self._postbox.wake()

    def _run(self) -> None:
        while True:
            for fd, events in self._poll.poll(self._timeout()):
                if fd in self._open:
                    self._serve_guarded(self._open[fd], events)
                elif fd == self._postbox.fileno():
                    if not self._postbox.hear():
                        return
                elif fd == self._gate.fileno():
                    self._accept()
                elif fd in self._living:
                    self._desk.process_died(self._living.take(fd))
                elif fd in self._leaving:
                    self._end(self._leaving.take(fd), process_alive=False)
                elif fd in self._doubted:
                    self._desk.process_ended(line := self._doubted.take(fd))
                    line.peer.close()
                self._deliver()
            self._give_up()
            self._deliver()

    def _accept(self) -> None:
        came = self._gate.accept(is_full=len(self._open) >= self._max_lines)
        if came is None:
            return
        fd, uid = came.socket.fileno(), came.line.peer.uid
        self._open[fd] = came
        self._poll.register(fd, _READABLE)
        oldest = self._strangers.come(fd, uid=uid, now=self._clock.now())
        if oldest is not None:
            error = ConnectionError("its user has too many without a hello")
            self._drop(self._open[oldest], error, TurnedAway.TOO_MANY_STRANGERS)

    def _serve_guarded(self, each: OpenLine, events: int) -> None:
        try:
            self._serve(each, events)
        except Exception:
            _log.exception("line failed", extra={"facts": each.line.facts, "throttle": ""})
            if self._open.get(each.socket.fileno()) is each:
                self._hang_up(each)

    def _serve(self, each: OpenLine, events: int) -> None:
        if events & select.EPOLLOUT and not self._flush(each):
            return
        takes = each.line.takes_descriptors
        try:
            data, descriptor, flaw = receive(each.socket, takes_descriptors=takes)
        except BlockingIOError:
            return
        except ConnectionResetError:  # hung up with replies unread
            self._hung_up(each)
            return
        if not data and events & select.EPOLLHUP:
            self._hung_up(each)
        elif not data and events & select.EPOLLRDHUP:  # shut down, not closed
            self._hang_up(each)
        elif flaw is not None:
            self._send(each, self._desk.refuse(each.line, data, flaw))
        else:  # an empty packet is a packet too
            self._answer(each, data, descriptor)

    def _answer(self, each: OpenLine, packet: bytes, descriptor: int | None) -> None:
        line = each.line
        was_stranger = not line.session_id
        try:
            answer = self._desk.answer(line, packet, descriptor)
        finally:
            if descriptor is not None:
                close_foreign(descriptor)
        if was_stranger and line.session_id:
            self._strangers.forget(each.socket.fileno())
            self._by_session[line.session_id] = each
            self._living.add_for_good(line)
        self._deliver()
        if self._open.get(each.socket.fileno()) is each:
            self._send(each, answer)
        elif answer.descriptor is not None:  # mail found the line broken
            os.close(answer.descriptor)

    def _send(self, each: OpenLine, answer: Answer) -> None:
        try:
            each.outbox.put_reply(answer)
        except OSError as error:  # too much is unread, for one
            self._drop(each, error)
            return
        if answer.hang_up:
            self._hang_up(each)
        elif not each.outbox.is_empty:
            self._poll.modify(each.socket.fileno(), _READABLE | select.EPOLLOUT)

    def _deliver(self) -> None:
        """Send the mail that is due; it waits where its reader has not read what came before."""
        while session_id := self._postbox.take():
            if (each := self._by_session.get(session_id)) is not None and each.outbox.is_empty:
                self._send_mail(each)

    def _send_mail(self, each: OpenLine) -> bool:
        """Send what is due to one line; return whether the line is still there."""
        try:
            each.send_mail(self._desk.mail(each.line))
        except Exception as error:
            if not isinstance(error, OSError):
                _log.exception("mail failed", extra={"facts": each.line.facts})
            self._drop(each, error)
            return False
        if not each.outbox.is_empty:
            self._poll.modify(each.socket.fileno(), _READABLE | select.EPOLLOUT)
        return True

    def _flush(self, each: OpenLine) -> bool:
        """Send what waits for room, and the mail behind it; return whether the line is there."""
        try:
            each.outbox.flush()
        except OSError as error:
            self._drop(each, error)
            return False
        if not each.outbox.is_empty:
            return True
        self._poll.modify(each.socket.fileno(), _READABLE)
        return not each.line.session_id or self._send_mail(each)

    def _drop(self, each: OpenLine, error: Exception, why: TurnedAway | None = None) -> None:
        self._refusals.turned_away(why or TurnedAway.REPLIES_UNREAD)
        facts = {**each.line.facts, "error": str(error)}
        _log.warning("line dropped", extra={"facts": facts, "throttle": ""})
        self._hang_up(each)

    def _hung_up(self, each: OpenLine) -> None:
        """The last holder of the line's other end closed it."""
        line = self._close(each)
        exiting = line.peer.is_exiting()
        if not line.peer.is_alive():
            self._end(line, process_alive=False)
        elif exiting is False or not line.session_id or not line.peer.is_proven:
            self._end(line, process_alive=True, is_watched=True)
        else:  # its end will show on the pidfd in a moment
            self._leaving.add(line, is_exiting=exiting, now=self._clock.now())

    def _hang_up(self, each: OpenLine) -> None:
        each.line.is_cut = True
        self._end(self._close(each), process_alive=True)

    def _close(self, each: OpenLine) -> Line:
        fd = each.socket.fileno()
        del self._open[fd]
        self._by_session.pop(each.line.session_id, None)
        self._living.discard(each.line.peer.pidfd)
        self._strangers.forget(fd)
        self._poll.unregister(fd)
        each.close()
        return each.line

    def _end(self, line: Line, *, process_alive: bool, is_watched: bool = False) -> None:
        """Tell of a line's end. ``is_watched``: they hung up, so that only the process is left."""
        told = line.session_id and self._desk.line_ended(line, process_alive=process_alive)
        if told and is_watched and line.peer.is_proven and len(self._doubted) < self._max_lines:
            self._doubted.add_for_good(line)
        else:
            line.peer.close()

    def _timeout(self) -> float | None:
        """Seconds until something must be given up; None where nothing waits."""
        times = [t for t in (self._strangers.next_time, self._leaving.next_time) if t is not None]
        return max(0.0, min(times) - self._clock.now()) if times else None

    def _give_up(self) -> None:
        now = self._clock.now()
        for line in self._leaving.take_late(now):
            self._end(line, process_alive=True, is_watched=True)
        for fd in self._strangers.late(now):
            self._refusals.turned_away(TurnedAway.NO_HELLO)
            self._hang_up(self._open[fd])
