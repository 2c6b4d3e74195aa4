"""Sessions under the ledger's lock: the handshake, the signs of life, the client's own close.

A base of ``ledger.Ledger``, over ``announcing``. Publishers have sessions as students do. Every
id is checked for its epoch first, so that one of an older server says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import UnknownTeacherError
from teacher_logits.terms import SessionTerms
from teacher_logits.transport import Transport
from teacher_logits_server.ledger.announcing import Announcing
from teacher_logits_server.sessions.session import Phase, Session
from teacher_logits_server.settlement.proofs import Line
from teacher_logits_server.views import describe_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.transport import Refusal, Settlement
    from teacher_logits_server.lending import Slots
    from teacher_logits_server.limits import Limits
    from teacher_logits_server.publishers.engines import EngineTeacher
    from teacher_logits_server.settlement.proofs import Page


class Handshake(Announcing):
    """Sessions, shared by threads.

    Args:
        epoch: this life of the server.
        limits: settings; a ``ServerConfig`` will do.
        engines: the teachers that the server's own engines are.
        clock: the only one.
        slots: the control pages.
        offered: transports that this server has; ``local`` counts only with a secret, and
            ``shared_memory`` needs a broker.
        local_secret: what ``inprocess.Resident`` shows to clients of this process.
    """

    def __init__(
        self,
        *,
        epoch: str,
        limits: Limits,
        clock: Clock,
        slots: Slots,
        offered: frozenset[Transport],
        engines: Sequence[EngineTeacher] = (),
        local_secret: bytes = b"",
    ) -> None:
        super().__init__(
            epoch=epoch,
            limits=limits,
            engines=engines,
            clock=clock,
            slots=slots,
            offered=offered if local_secret else offered - {Transport.LOCAL},
        )
        self._local_secret = local_secret
        self._object_challenge = b""

    def check_hello(self, session_id: str, nonce: bytes) -> None:
        """Let a broker line speak for a session; its nonce is good for one line.

        Raises:
            NotAllowedError: the nonce is wrong or was shown, or the session is settled.
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            keys.check_epoch(session_id, self.epoch, what="session")
            self._sessions.show_nonce(session_id, nonce, now=now)

    def check_caller(self, session_id: str, *, owner: str, secret: str) -> None:
        """Let a call speak for a session; what becomes of one that is gone, the call says.

        Raises:
            NotAllowedError: another caller opened it, or its secret is missing or wrong.
        """
        with self._step():
            session = self._sessions.find(session_id)
            if session is not None:
                session.check_caller(owner=owner, secret=secret)

    def line_opened(
        self,
        session_id: str,
        *,
        pid: int,
        challenge: bytes,
        started: int = 0,
        page: Page | None = None,
        secret: str = "",
    ) -> None:
        """Note a session's line, who is at its end, and what that process was given to read.

        ``secret``, where there is one, is shown by the session's calls from now on.

        Raises:
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            session = self._sessions.living(session_id, now=now)
            session.line = Line(pid=pid, challenge=challenge, started=started, page=page)
            session.last_line = session.line
            session.secret = secret

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
            self._note_life(self._hear(session_id, now))
            return self._draining

    def close_session(self, session_id: str) -> bool:
        """End a session, or, where its readers look into slabs, let it have no new leases.

        One that has ended is fine. Returns whether it was this call that closed it.
        """
        with self._step():
            keys.check_epoch(session_id, self.epoch, what="session")
            session = self._sessions.find(session_id)
            if session is None or session.phase is Phase.ENDED:
                return False
            is_news = not session.phase.is_leaving
            was_shared = self._is_shared()
            self._end_publisher(session, in_good_order=True)
            is_over = self._sessions.close(session)
            self._note_alone(was_shared)
            if is_over:
                self._end(session)
                return is_news
            self._close_reader(session)
            self._drop_if_done(session)
            return is_news

    def unknown(self, known: Mapping[str, frozenset[str]]) -> list[str]:
        """Return the sessions that may work whose owner is not known for their kind."""
        with self._step():
            return [each.session_id for each in self._sessions.unknown(known)]

    def teachers(self) -> tuple[TeacherProfile, ...]:
        """Return the engines' teachers and the published ones."""
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

    def settlements(self, session_id: str) -> tuple[Settlement, ...] | None:
        """Return how a living session reads its writers, or writes; None before it is settled."""
        with self._step() as now:
            session = self._living(session_id, now)
            is_settled = session.phase is not Phase.OPENING
            return tuple(session.settlements.values()) if is_settled else None

    def _living(self, session_id: str, now: float) -> Session:
        keys.check_epoch(session_id, self.epoch, what="session")
        return self._sessions.living(session_id, now=now)

    def _hear(self, session_id: str, now: float) -> Session:
        """Return a settled session, and note that its client gave a sign of life."""
        keys.check_epoch(session_id, self.epoch, what="session")
        return self._sessions.hear(session_id, now=now)

    def _note_life(self, session: Session) -> None:
        """Tell those who wait for a session's seat that its reader lives."""
        if session.is_contested:
            session.is_contested = False
            self._news.teachers_changed = True

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
            stream=self._stream_terms(session),
            protocol_version=session.agreed.version,
            features=session.agreed.features,
        )

    def _teacher_of(self, session: Session) -> TeacherProfile:
        """Return the teacher that a student reads, or what a publisher said of itself."""
        if session.is_publisher:
            return session.publisher
        published = self._publishers.find(session.teacher_id)
        if published is not None:
            return published.profile
        engine = self._engines.find(session.teacher_id)
        if engine is None:
            raise UnknownTeacherError(
                f"teacher {session.teacher_id!r} is published no more, and no engine here is it; "
                f"there are: {self._engines.names}",
                facts={"teacher_id": session.teacher_id, "teachers": self._engines.names},
            )
        return engine.profile
