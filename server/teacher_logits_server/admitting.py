"""Admission under the ledger's lock: students and publishers come in, and are settled.

A base of ``ledger.Ledger``, over ``handshake``. The rules stand in ``admission`` and
``promises``; who is there, in ``publishers``. A student is let in once all of its teacher is
there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import NoCommonTransportError, SessionRefusedError
from teacher_logits.grid import rows_of_rank
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import Transport
from teacher_logits_server.admission import admit
from teacher_logits_server.handshake import Handshake
from teacher_logits_server.promises import check_profile
from teacher_logits_server.sessions import Phase, Session
from teacher_logits_server.settlement import judge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.terms import Check, SessionTerms
    from teacher_logits.transport import Refusal, Settlement


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """A session just admitted, and the nonce that only its client and the server know."""

    terms: SessionTerms
    nonce: bytes


class Admitting(Handshake):
    """Who comes in. For its arguments see ``Handshake``."""

    def open_session(
        self, *, request_id: str, protocol_version: int, profile: StudentProfile
    ) -> OpenedSession:
        """Admit a student rank; a call repeated with its request id gets the same session.

        Raises:
            SessionRefusedError: with every broken rule.
            TeacherAbsent, TeacherIncomplete: see ``publishers``; waiting may help.
            UnknownTeacherError: there are several teachers, and it names none.
            RequestInvalidError: an id that is no name, or was used with another profile.
            DrainingError: the server takes no new sessions.
            NotAvailable: it has as many as it takes.
        """
        keys.check_name(request_id, what="request id")
        keys.check_name(profile.student_id, what="student id")
        with self._step() as now:
            session = self._sessions.opened(request_id, profile, now=now)
            if session is None:
                session = self._admit(request_id, profile, protocol_version, now)
            return OpenedSession(terms=self._terms(session), nonce=session.nonce)

    def _admit(
        self, request_id: str, profile: StudentProfile, protocol_version: int, now: float
    ) -> Session:
        teacher = self._publishers.choose(profile.teacher_id)
        published = self._publishers.find(teacher.teacher_id)
        admission = admit(
            profile,
            teacher,
            protocol_version=protocol_version,
            is_published=published is not None,
        )
        if admission.violations:
            raise SessionRefusedError(admission.violations)
        if published is not None:
            published.steps.seats.check(profile)
        extra = self._extra_checks if published is None else ()
        session = self._add_session(
            request_id,
            profile,
            teacher_id=teacher.teacher_id,
            checks=(*admission.checks, *extra),
            vocabulary_size=admission.vocabulary_size,
            now=now,
        )
        if published is not None:
            published.steps.seats.join(session.session_id, profile)
        return session

    def _add_session(
        self,
        request_id: str,
        profile: StudentProfile | TeacherProfile,
        *,
        teacher_id: str,
        checks: tuple[Check, ...] = (),
        vocabulary_size: int,
        now: float,
    ) -> Session:
        """Take a session in that breaks no rule; refuses while draining, and one too many."""
        self._check_draining()
        self._sessions.check_room()
        session = Session(
            session_id=keys.new_id("s", self.epoch),
            request_id=request_id,
            nonce=secrets.token_bytes(32),
            profile=profile,
            teacher_id=teacher_id,
            checks=checks,
            vocabulary_size=vocabulary_size,
            opened_at=now,
            heard_at=now,
        )
        self._sessions.add(session)
        return session

    def open_publisher(
        self, *, request_id: str, protocol_version: int, profile: TeacherProfile
    ) -> OpenedSession:
        """Admit a publisher; a call repeated with its request id gets the same session.

        Raises:
            SessionRefusedError: with every broken rule; it disagrees with the teacher's other
                publishers, or its shard has one already.
            RequestInvalidError: an id that is no name, or was used with another profile.
            DrainingError: the server takes no new sessions.
            NotAvailable: it has as many as it takes.
        """
        keys.check_name(request_id, what="request id")
        keys.check_name(profile.teacher_id, what="teacher id")
        with self._step() as now:
            session = self._sessions.opened(request_id, profile, now=now)
            if session is None:
                violations = check_profile(profile, protocol_version=protocol_version)
                violations += self._publishers.check(profile)
                if violations:
                    raise SessionRefusedError(violations)
                session = self._add_session(
                    request_id,
                    profile,
                    teacher_id=profile.teacher_id,
                    vocabulary_size=profile.vocabulary_size,
                    now=now,
                )
                self._writers.add(session.session_id)
                self._carry_out(self._publishers.enter(session.session_id, profile))
                self._news.teachers_changed = True
            return OpenedSession(terms=self._terms(session), nonce=session.nonce)

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
            if session.phase is Phase.OPENING:
                session.proof = judge(
                    nonce=session.nonce,
                    challenges=self._challenges(session),
                    proofs=proofs,
                    failures=[*filter(None, [session.line_refusal]), *failures],
                )
                try:
                    settlements = self._settle_all(session)
                except (SessionRefusedError, NoCommonTransportError):
                    self._end(session)
                    raise
                self._sessions.settle(session, settlements, now=now)
            return self._terms(session)

    def _settle_all(self, session: Session) -> list[Settlement]:
        """Return how a session reads every writer that it needs; or writes, as a publisher."""
        if session.is_publisher:
            return [self._settle_publisher(session)]
        return [self._settle(session, writer_id) for writer_id in self._needed(session)]

    def _settle_publisher(self, session: Session) -> Settlement:
        """Choose where a publisher writes: into slabs of its own, or by stream into ours."""
        member = self._publishers.member(session.teacher_id, session.session_id)
        if member is None:
            raise ValueError(f"session {session.session_id} is no publisher")
        settlement = self._settle(session, f"publisher-{member.shard}-{secrets.token_hex(4)}")
        if settlement.transport is Transport.STREAM:
            settlement = replace(settlement, writer_id=SERVER_WRITER)
        member.writer_id = settlement.writer_id
        self._news.teachers_changed = True
        return settlement

    def _needed(self, session: Session) -> list[str]:
        """Return the writers of what a student is to read, as far as they are there."""
        published = self._publishers.find(session.teacher_id)
        if published is None:
            return [SERVER_WRITER]
        student, theirs = session.student, published.profile.batch_grid
        if theirs is None:
            return []
        mine = rows_of_rank(student.batch_grid, student.data_parallel_rank)
        writers = []
        for shard, member in sorted(published.members.items()):
            rows = rows_of_rank(theirs, shard, side="teacher")
            if member.writer_id and rows.start < mine.stop and mine.start < rows.stop:
                writers.append(member.writer_id)
        return list(dict.fromkeys(writers))

    def _challenges(self, session: Session) -> dict[Transport, bytes]:
        """Return what the client could have read, by the transport that this would prove."""
        challenges = {}
        if self._local_secret:
            challenges[Transport.LOCAL] = self._local_secret
        if session.line is not None:
            challenges[Transport.SHARED_MEMORY] = session.line.challenge
        return challenges
