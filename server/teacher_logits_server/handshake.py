"""Sessions under the ledger's lock: the handshake, the signs of life, the end.

A base of ``ledger.Ledger``, over ``stepping``. Publishers have sessions as students do. Every
id is checked for its epoch first, so that one of an older server says so. What becomes of room
when its session ends depends on what is known of the readers:

    streamed                          freed; a stream under way keeps its room till it stops
    shares memory, process died and
      its line ended                  freed: nobody who inherited its mappings is left
    shares memory, line ended while
      it lives                        quarantined, until it is returned or the process ends
    shares memory, its TTL passed     quarantined, until it is returned after all
    shares memory, session closed     kept, until it is returned or one of the above

A publisher that dies loses what nobody has leased; one that closes its session leaves it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import UnknownTeacherError
from teacher_logits.terms import SessionTerms
from teacher_logits.transport import Transport
from teacher_logits_server.leases import Doubt
from teacher_logits_server.sessions import Phase, Session, Sessions
from teacher_logits_server.settlement import Line, line_lost
from teacher_logits_server.stepping import Stepping
from teacher_logits_server.views import describe_session

if TYPE_CHECKING:
    from teacher_logits.clock import Clock
    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.terms import Check
    from teacher_logits.transport import Refusal
    from teacher_logits_server.lending import Slots
    from teacher_logits_server.limits import Limits
    from teacher_logits_server.settlement import Page


class Handshake(Stepping):
    """Sessions, shared by threads.

    Args:
        epoch: this life of the server.
        limits: settings; a ``ServerConfig`` will do.
        teacher: what the server's engine says of itself; None where it has none.
        clock: the only one.
        slots: the control pages.
        offered: transports that this server has; ``local`` counts only with a secret, and
            ``shared_memory`` needs a broker.
        local_secret: what ``inprocess.Resident`` shows to clients of this process.
        extra_checks: checks of the teacher itself, shown in every session.
    """

    def __init__(
        self,
        *,
        epoch: str,
        limits: Limits,
        teacher: TeacherProfile | None,
        clock: Clock,
        slots: Slots,
        offered: frozenset[Transport],
        local_secret: bytes = b"",
        extra_checks: tuple[Check, ...] = (),
    ) -> None:
        super().__init__(
            epoch=epoch,
            limits=limits,
            engine=teacher,
            clock=clock,
            slots=slots,
            offered=offered if local_secret else offered - {Transport.LOCAL},
        )
        self.engine_teacher = teacher
        self._limits = limits
        self._local_secret = local_secret
        self._extra_checks = extra_checks
        self._sessions = Sessions(
            ttl=limits.session_ttl, opening_ttl=limits.opening_ttl, limit=limits.max_sessions
        )

    def check_hello(self, session_id: str, nonce: bytes) -> None:
        """Let a broker line speak for a session; its nonce is good for one line.

        Raises:
            NotAllowedError: the nonce is wrong or was shown, or the session is settled.
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            keys.check_epoch(session_id, self.epoch, what="session")
            self._sessions.show_nonce(session_id, nonce, now=now)

    def line_opened(
        self,
        session_id: str,
        *,
        pid: int,
        challenge: bytes,
        started: int = 0,
        page: Page | None = None,
    ) -> None:
        """Note a session's line, who is at its end, and what that process was given to read.

        Raises:
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            session = self._sessions.living(session_id, now=now)
            session.line = Line(pid=pid, challenge=challenge, started=started, page=page)
            session.last_line = session.line

    def line_unproven(self, session_id: str, refusal: Refusal) -> None:
        """Note why a session's line proves nothing; an ended session does not mind."""
        with self._step():
            session = self._sessions.find(session_id)
            if session is not None:
                session.line_refusal = refusal

    def renew(self, session_id: str) -> bool:
        """Note a sign of life; return whether the server is draining.

        Raises:
            SessionExpiredError: the session has ended, and stays so.
        """
        with self._step() as now:
            self._hear(session_id, now)
            return self._draining

    def close_session(self, session_id: str) -> None:
        """End a session, or, where its readers look into slabs, let it have no new leases.

        One that has ended is fine.
        """
        with self._step():
            keys.check_epoch(session_id, self.epoch, what="session")
            session = self._sessions.find(session_id)
            if session is None or session.phase is Phase.ENDED:
                return
            self._end_publisher(session, in_good_order=True)
            if self._sessions.close(session):
                self._end(session)
            else:
                self._drop_if_done(session)

    def line_ended(self, session_id: str, *, process_alive: bool) -> bool:
        """Learn that the last holder of a session's line let go of it.

        Where readers share memory, the session ends: with their process dead as well its room
        is free, and while that lives it is in quarantine. Returns whether some is: then the end
        of the process is of interest, see ``process_ended``.
        """
        with self._step():
            session = self._sessions.find(session_id)
            if session is None or session.line is None:
                return False
            session.line = None
            if session.phase is Phase.OPENING:
                session.line_refusal = line_lost()
            elif session.shares_memory:
                self._end(session, doubt=Doubt.LINE_ENDED if process_alive else None)
                return bool(self._lending.leases.of_session(session_id))
            else:
                session.proof = session.proof.without_line()
            return False

    def process_ended(self, session_id: str) -> None:
        """Learn that the process behind a line ended after the line's last holder let go of it.

        That is all the proof there is, and what was in quarantine for want of it is free.
        """
        with self._step():
            session = self._sessions.find(session_id)
            if session is None or session.phase is not Phase.ENDED:
                return
            for lease in self._lending.leases.of_session(session_id):
                if lease.doubt is Doubt.LINE_ENDED:
                    self._take_back(lease, returned=False)
            self._drop_if_done(session)

    def sweep(self) -> list[str]:
        """End the sessions whose time has passed; return their ids."""
        with self._step() as now:
            lapsed = self._sessions.lapse(now=now)
            for session in lapsed:
                self._end(session, doubt=Doubt.TTL_PASSED if session.shares_memory else None)
            return [session.session_id for session in lapsed]

    @property
    def teacher(self) -> TeacherProfile:
        """What the server's engine says of itself.

        Raises:
            UnknownTeacherError: it has none.
        """
        if self.engine_teacher is None:
            raise UnknownTeacherError("this server has no engine: its teachers are published")
        return self.engine_teacher

    def teachers(self) -> tuple[TeacherProfile, ...]:
        """Return the engine's teacher and the published ones."""
        with self._step():
            return self._publishers.profiles()

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one scoring request."""
        return self._limits.max_request_tokens

    def profile(self, session_id: str) -> StudentProfile:
        """Return what a living session's student said of itself."""
        with self._step() as now:
            return self._living(session_id, now).student

    def describe(self, session_id: str) -> dict[str, str | int]:
        """Return who a session is, for logs; empty where it is gone."""
        with self._step():
            session = self._sessions.find(session_id)
            return {} if session is None else describe_session(session)

    def terms(self, session_id: str) -> SessionTerms:
        """Return what a living session was granted."""
        with self._step() as now:
            return self._terms(self._living(session_id, now))

    def _living(self, session_id: str, now: float) -> Session:
        keys.check_epoch(session_id, self.epoch, what="session")
        return self._sessions.living(session_id, now=now)

    def _hear(self, session_id: str, now: float) -> Session:
        """Return a settled session, and note that its client gave a sign of life."""
        keys.check_epoch(session_id, self.epoch, what="session")
        return self._sessions.hear(session_id, now=now)

    def _end(self, session: Session, *, doubt: Doubt | None = None) -> None:
        """End a session and each of its leases; readers in doubt keep their room."""
        session.phase = Phase.ENDED
        self._end_publisher(session, in_good_order=False)
        for lease in self._lending.leases.of_session(session.session_id):
            if doubt is not None and not lease.streams:
                if not lease.quarantined:
                    self._doubt(lease, doubt)
            else:
                self._take_back(lease, returned=False)
        self._drop_if_done(session)

    def _drop_if_done(self, session: Session) -> None:
        """Forget a session that nothing can happen to any more."""
        has_leases = bool(self._lending.leases.of_session(session.session_id))
        if session.phase is Phase.ENDED or (session.phase is Phase.CLOSED and not has_leases):
            self._end_reader(session)
        if has_leases:
            return
        if session.phase is Phase.CLOSED and session.line is None:
            session.phase = Phase.ENDED
        if session.phase is Phase.ENDED:
            self._mail.forget(session.session_id)
            self._sessions.drop(session)

    def _terms(self, session: Session) -> SessionTerms:
        limits = self._limits
        return SessionTerms(
            session_id=session.session_id,
            epoch=self.epoch,
            ttl=limits.session_ttl,
            renew_interval=limits.renew_interval,
            default_wait=limits.default_wait,
            teacher=self._teacher_of(session),
            checks=session.checks,
            vocabulary_size=session.vocabulary_size,
            max_request_tokens=limits.max_request_tokens,
            settlements=tuple(session.settlements.values()),
        )

    def _teacher_of(self, session: Session) -> TeacherProfile:
        """Return the teacher that a student reads, or what a publisher said of itself."""
        if session.is_publisher:
            return session.publisher
        published = self._publishers.find(session.teacher_id)
        return published.profile if published is not None else self.teacher
