"""Liveness: what keeps a session alive on this side, and what tells that it has ended.

A session with a broker line lives by the line, whose end the kernel tells; one without is
renewed by a heartbeat. Prints nothing and revives nothing: a session that has ended says so
to every later call.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from teacher_logits.clock import MonotonicClock, span_text
from teacher_logits.errors import (
    EpochChangedError,
    ServerUnreachableError,
    SessionExpiredError,
    TeacherLogitsError,
)
from teacher_logits_client.sessions.heartbeat import Heartbeat
from teacher_logits_client.sessions.life import SessionLife

if TYPE_CHECKING:
    from types import TracebackType

    from teacher_logits.terms import SessionTerms
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.line import Line
    from teacher_logits_client.payloads.returns import Returner

_log = logging.getLogger("teacher_logits_client")


class LineHolder(Protocol):
    """What has a session's line, if there is one: a student's reader, a publisher's way."""

    line: Line | None

    def close(self) -> None:
        """Let go of all that the session holds here, as soon as that can be."""


class Liveness:
    """Keeps one session alive until ``end``."""

    def __init__(
        self,
        terms: SessionTerms,
        *,
        calls: Calls,
        returner: Returner,
        reader: LineHolder,
        timeout: float,
    ) -> None:
        self._calls = calls
        self._returner = returner
        self._reader = reader
        self._session_id = session_id = terms.session_id
        self._epoch = terms.epoch
        self._timeout = timeout
        self._is_finished = False
        self._clock = MonotonicClock()
        self._lock = threading.Lock()
        self._life = SessionLife(
            session_id,
            ttl=None if reader.line is not None else terms.ttl.total_seconds(),
            renew_interval=terms.renew_interval.total_seconds(),
            now=self._clock.now(),
        )
        # It holds the life and not the session, which may so be dropped while it beats.
        self._heartbeat = Heartbeat(
            self._life,
            renew=lambda seconds: calls.renew(session_id, timeout=seconds),
            lock=self._lock,
            clock=self._clock,
        )
        if reader.line is None:
            self._heartbeat.start()
        returner.count("open_sessions")

    def check(self) -> None:
        """Let a session that lives pass.

        Raises:
            ForkedClientError: this is a forked child.
            SessionExpiredError, EpochChangedError: what ended the session.
        """
        self._returner.check_here("session")
        line = self._reader.line
        with self._lock:
            if line is not None and line.has_ended:
                self._life.end(_line_lost(self._session_id))
            if line is None or self._life.has_ended:  # else no clock has a say in it
                self._life.check(self._clock.now())

    def noting(self) -> Liveness:
        """Note an error of the ``with`` block that says that the session has ended."""
        return self

    def __enter__(self) -> None:
        """Begin to note; nested and on many threads is fine, since nothing is kept."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if isinstance(error, SessionExpiredError | EpochChangedError):
            # One that names our own epoch speaks of an older payload, not of this session.
            if error.facts.get("epoch") != self._epoch:
                with self._lock:
                    self._life.end(error)
        elif isinstance(error, ServerUnreachableError):
            self.check()  # where the line has ended, that is the better thing to say

    def end(self) -> None:
        """End the session here, and tell the server soon; safe in a finaliser.

        If it cannot be told, the TTL or the end of the line will tell it.
        """
        # On the thread of the returns: a finaliser may take no lock, and leases that were closed
        # before go first.
        self._returner.later(self._finish)

    def end_and_wait(self, what: str) -> None:
        """End the session of a ``what``, and wait until the server knows, or its time is over."""
        self.end()
        if not self._returner.wait(self._timeout):
            _log.warning(
                "%s %s: its end took longer than %s: the server does not answer, or a device hangs",
                what,
                self._session_id,
                span_text(self._timeout),
            )

    def _finish(self) -> None:
        if self._is_finished:  # twice is fine
            return
        self._is_finished = True
        self._heartbeat.stop()
        with self._lock:
            self._life.close()
        try:
            _end(self._calls, self._reader, self._session_id, self._timeout)
        finally:
            self._returner.count("open_sessions", -1)


def _end(calls: Calls, reader: LineHolder, session_id: str, timeout: float) -> None:
    try:
        calls.close_session(session_id, timeout=timeout)
    except TeacherLogitsError as error:
        _log.debug("session %s: its end was not heard: %s", session_id, error.message)
    reader.close()


def _line_lost(session_id: str) -> SessionExpiredError:
    return SessionExpiredError(
        f"session {session_id} has ended: the server closed its broker line, so it was stopped "
        "or restarted, or knows the token no more that opened it; open a new session",
        facts={"session_id": session_id},
    )
