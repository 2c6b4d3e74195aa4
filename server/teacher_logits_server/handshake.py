"""Sessions under the ledger's lock: the handshake, the signs of life, the end.

The second base of ``ledger.Ledger``, over ``room``. Every id is checked for its epoch first,
so that one of an older server says so. What becomes of room when its session ends depends on
what is known of the readers:

    streamed                          freed; a stream under way keeps its room till it stops
    shares memory, process died and
      its line ended                  freed: nobody who inherited its mappings is left
    shares memory, line ended while
      it lives, or its TTL passed     quarantined, until it is returned after all
    shares memory, session closed     kept, until it is returned or one of the above
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import NoCommonTransportError, SessionRefusedError
from teacher_logits.terms import SessionTerms
from teacher_logits.transport import Transport
from teacher_logits_server.admission import admit, find_teacher
from teacher_logits_server.room import Room
from teacher_logits_server.sessions import Line, Phase, Session, Sessions
from teacher_logits_server.settlement import line_lost, settle_transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.terms import Check
    from teacher_logits.transport import Refusal
    from teacher_logits_server.lending import Slots
    from teacher_logits_server.sessions import Limits


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """A session just admitted, and the nonce that only its client and the server know."""

    terms: SessionTerms
    nonce: bytes


class Handshake(Room):
    """Sessions, shared by threads.

    Args:
        epoch: this life of the server.
        limits: settings; a ``ServerConfig`` will do.
        teacher: what the server's engine says of itself.
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
        teacher: TeacherProfile,
        clock: Clock,
        slots: Slots,
        offered: frozenset[Transport],
        local_secret: bytes = b"",
        extra_checks: tuple[Check, ...] = (),
    ) -> None:
        super().__init__(limits=limits, clock=clock, slots=slots)
        self.epoch = epoch
        self.teacher = teacher
        self._limits = limits
        self._offered = offered if local_secret else offered - {Transport.LOCAL}
        self._local_secret = local_secret
        self._extra_checks = extra_checks
        self._sessions = Sessions(
            ttl=limits.session_ttl, opening_ttl=limits.opening_ttl, limit=limits.max_sessions
        )

    def open_session(
        self, *, request_id: str, protocol_version: int, profile: StudentProfile
    ) -> OpenedSession:
        """Admit a student rank; a call repeated with its request id gets the same session.

        Raises:
            SessionRefusedError: with every broken rule.
            UnknownTeacherError: with the teachers there are.
            RequestInvalidError: an id that is no name, or was used with another profile.
            DrainingError: the server takes no new sessions.
            NotAvailable: it has as many as it takes.
        """
        keys.check_name(request_id, what="request id")
        keys.check_name(profile.student_id, what="student id")
        teacher = find_teacher(profile.teacher_id, [self.teacher])
        admission = admit(profile, teacher, protocol_version=protocol_version)
        if admission.violations:
            raise SessionRefusedError(admission.violations)
        with self._step() as now:
            session = self._sessions.opened(request_id, profile, now=now)
            if session is None:
                self._check_draining()
                self._sessions.check_room()
                session = Session(
                    session_id=keys.new_id("s", self.epoch),
                    request_id=request_id,
                    nonce=secrets.token_bytes(32),
                    student=profile,
                    checks=(*admission.checks, *self._extra_checks),
                    vocabulary_size=admission.vocabulary_size,
                    opened_at=now,
                    heard_at=now,
                )
                self._sessions.add(session)
            return OpenedSession(terms=self._terms(session), nonce=session.nonce)

    def check_hello(self, session_id: str, nonce: bytes) -> None:
        """Let a broker line speak for a session; its nonce is good for one line.

        Raises:
            NotAllowedError: the nonce is wrong or was shown, or the session is settled.
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            keys.check_epoch(session_id, self.epoch, what="session")
            self._sessions.show_nonce(session_id, nonce, now=now)

    def line_opened(self, session_id: str, *, pid: int, challenge: bytes) -> None:
        """Note a session's line, and what the process at its end was given to read.

        Raises:
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            session = self._sessions.living(session_id, now=now)
            session.line = Line(pid=pid, challenge=challenge)

    def line_unproven(self, session_id: str, refusal: Refusal) -> None:
        """Note why a session's line proves nothing; an ended session does not mind."""
        with self._step():
            session = self._sessions.find(session_id)
            if session is not None:
                session.line_refusal = refusal

    def prove_locality(
        self,
        session_id: str,
        *,
        proofs: Mapping[Transport, bytes],
        failures: Sequence[Refusal],
    ) -> SessionTerms:
        """Settle a session's transport, once; a call repeated gets what was settled.

        Raises:
            SessionRefusedError: locality was insisted on and is not proven (the session has
                ended with that).
            NoCommonTransportError: nothing the student wants is left (likewise).
            SessionExpiredError: the session has ended.
        """
        with self._step() as now:
            session = self._living(session_id, now)
            if session.settlement is None:
                try:
                    settlement = settle_transport(
                        session.student,
                        offered=self._offered,
                        nonce=session.nonce,
                        challenges=self._challenges(session),
                        proofs=proofs,
                        failures=[*filter(None, [session.line_refusal]), *failures],
                    )
                except (SessionRefusedError, NoCommonTransportError):
                    self._end(session, doubtful=False)
                    raise
                self._sessions.settle(session, settlement, now=now)
            return self._terms(session)

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
            if self._sessions.close(session):
                self._end(session, doubtful=False)
            else:
                self._drop_if_done(session)

    def line_ended(self, session_id: str, *, process_alive: bool) -> None:
        """Learn that the last holder of a session's line let go of it.

        Where readers share memory, the session ends: with their process dead as well its room
        is free, and while that lives it is in quarantine.
        """
        with self._step():
            session = self._sessions.find(session_id)
            if session is None or session.line is None:
                return
            session.line = None
            if session.settlement is None:
                session.line_refusal = line_lost()
            elif session.shares_memory:
                self._end(session, doubtful=process_alive)

    def sweep(self) -> list[str]:
        """End the sessions whose time has passed; return their ids."""
        with self._step() as now:
            lapsed = self._sessions.lapse(now=now)
            for session in lapsed:
                self._end(session, doubtful=session.shares_memory)
            return [session.session_id for session in lapsed]

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one scoring request."""
        return self._limits.max_request_tokens

    def profile(self, session_id: str) -> StudentProfile:
        """Return what a living session's student said of itself."""
        with self._step() as now:
            return self._living(session_id, now).student

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

    def _challenges(self, session: Session) -> dict[Transport, bytes]:
        """Return what the client could have read, by the transport that this would prove."""
        challenges = {}
        if self._local_secret:
            challenges[Transport.LOCAL] = self._local_secret
        if session.line is not None:
            challenges[Transport.SHARED_MEMORY] = session.line.challenge
        return challenges

    def _end(self, session: Session, *, doubtful: bool) -> None:
        """End a session and each of its leases; doubtful readers keep their room."""
        session.phase = Phase.ENDED
        for lease in self._lending.leases.of_session(session.session_id):
            if doubtful:
                self._lending.quarantine(lease)
            else:
                self._lending.take_back(lease)
        self._drop_if_done(session)

    def _drop_if_done(self, session: Session) -> None:
        """Forget a session that nothing can happen to any more."""
        if self._lending.leases.of_session(session.session_id):
            return
        if session.phase is Phase.CLOSED and session.line is None:
            session.phase = Phase.ENDED
        if session.phase is Phase.ENDED:
            self._sessions.drop(session)

    def _terms(self, session: Session) -> SessionTerms:
        limits = self._limits
        return SessionTerms(
            session_id=session.session_id,
            epoch=self.epoch,
            ttl=limits.session_ttl,
            renew_interval=limits.renew_interval,
            default_wait=limits.default_wait,
            teacher=self.teacher,
            checks=session.checks,
            vocabulary_size=session.vocabulary_size,
            max_request_tokens=limits.max_request_tokens,
            settlements=() if session.settlement is None else (session.settlement,),
        )
