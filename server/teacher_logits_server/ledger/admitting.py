"""Admission under the ledger's lock: students and publishers come in.

A base of ``ledger.Ledger``, over ``handshake``. The rules stand in ``admission`` and
``promises``; who is there, in ``publishers``. A student is let in once all of its teacher is
there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import SessionRefusedError
from teacher_logits.protocol import Agreed
from teacher_logits.transport import Transport
from teacher_logits_server.admission import admit
from teacher_logits_server.admission.holders import Holder, PlaceTaken, standing
from teacher_logits_server.ledger.handshake import Handshake
from teacher_logits_server.publishers.promises import check_profile
from teacher_logits_server.publishers.sharding import shard_taken
from teacher_logits_server.sessions.session import Session
from teacher_logits_server.steps.seats import rank_taken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.terms import Check, SessionTerms
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.settlement.device_offers import DeviceOffer


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """A session just admitted, and the nonce that only its client and the server know.

    ``is_new``: it was not there before; a call repeated with its request id finds it. ``probes`` is
    device memory of its writers, which the client is to open on trial.
    """

    terms: SessionTerms
    nonce: bytes = field(repr=False)
    is_new: bool = field(compare=False)
    probes: tuple[DeviceProbe, ...] = ()


class Admitting(Handshake):
    """Who comes in. For its arguments see ``Handshake``."""

    def open_session(
        self,
        *,
        request_id: str,
        protocol_version: int,
        profile: StudentProfile,
        features: frozenset[str] = frozenset(),
        owner: str = "",
    ) -> OpenedSession:
        """Admit a student rank; a call repeated with its request id gets the same session.

        ``protocol_version`` and ``features`` are what both sides speak (``protocol``); ``owner`` is
        whose it is, where the server asks for tokens.

        Raises:
            SessionRefusedError: with every broken rule.
            PlaceTaken: its rank is read by others; waiting helps where one of them is dead.
            TeacherAbsent, TeacherIncomplete: see ``publishers``; waiting may help.
            UnknownTeacherError: there are several teachers, and it names none.
            RequestInvalidError: an id that is no name, or was used with another profile.
            NotAllowedError: another caller has used the request id.
            DrainingError: the server takes no new sessions.
            LimitReachedError: it has as many as it takes.
        """
        keys.check_name(request_id, what="request id")
        keys.check_name(profile.student_id, what="student id")
        with self._step() as now:
            session = self._sessions.opened(request_id, profile, now=now, owner=owner)
            is_new = session is None
            if session is None:
                session = self._admit(request_id, profile, protocol_version, now)
                session.owner = owner
                session.agreed = Agreed(version=protocol_version, features=features)
            return OpenedSession(
                terms=self._terms(session),
                nonce=session.nonce,
                is_new=is_new,
                probes=self._probes(session),
            )

    def _probes(self, session: Session) -> tuple[DeviceProbe, ...]:
        """Return the device memory that a student might read, if it wants to."""
        if Transport.CUDA_IPC not in self._offered & {*session.student.transports}:
            return ()
        offers = self._offers(session)
        return tuple(offers[each].probe for each in self._needed(session) if each in offers)

    def _admit(
        self, request_id: str, profile: StudentProfile, protocol_version: int, now: float
    ) -> Session:
        teacher = self._publishers.choose(profile.teacher_id)
        published = self._publishers.find(teacher.teacher_id)
        readers = published.steps.seats.holders(profile) if published is not None else []
        if self._lapse_over(readers, now):  # their teacher may be gone with them
            return self._admit(request_id, profile, protocol_version, now)
        admission = admit(
            profile,
            teacher,
            protocol_version=protocol_version,
            is_published=published is not None,
        )
        if admission.violations:
            raise SessionRefusedError(admission.violations)
        if published is not None:
            self._check_seat(published, profile, now)
        engine = self._engines.find(teacher.teacher_id)
        session = self._add_session(
            request_id,
            profile,
            teacher_id=teacher.teacher_id,
            checks=(*admission.checks, *(engine.checks if engine is not None else ())),
            vocabulary_size=admission.vocabulary_size,
            now=now,
        )
        if published is not None:
            published.steps.seats.join(session.session_id, profile)
        return session

    def _check_seat(self, published: Published, profile: StudentProfile, now: float) -> None:
        """Refuse a reader for whom no seat is left."""
        seats = published.steps.seats
        seats.check(profile)
        readers = seats.holders(profile)
        if len(readers) >= profile.readers_per_rank:
            describe = partial(rank_taken, profile)
            raise PlaceTaken(describe, self._contest(readers, now), asks=profile.hints)

    def _check_publisher(self, profile: TeacherProfile, protocol_version: int, now: float) -> None:
        """Refuse a publisher that breaks a rule, or whose shard another one publishes."""
        violations = check_profile(profile, protocol_version=protocol_version)
        violations += self._publishers.check(profile)
        holders = self._contest(self._publishers.holders(profile), now)
        describe = partial(shard_taken, profile)
        if violations and holders:
            violations.append(describe(standing(holders, asks=profile.hints)))
        if violations:
            raise SessionRefusedError(violations)
        if holders:
            raise PlaceTaken(describe, holders, asks=profile.hints)

    def _contest(self, session_ids: Iterable[str], now: float) -> list[Holder]:
        """Return who has a place that somebody asks for, and whose signs of life are news now."""
        holders = []
        for session in filter(None, map(self._sessions.find, session_ids)):
            session.is_contested = True
            line = session.line
            holders.append(
                Holder(
                    session_id=session.session_id,
                    hints=session.profile.hints,
                    heard_at=session.heard_at,
                    seconds_left=self._sessions.seconds_left(session, now=now),
                    pid=line.pid if line is not None else 0,
                    started=line.started if line is not None else 0,
                )
            )
        return holders

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
        self._sessions.check_room(profile)
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
        self,
        *,
        request_id: str,
        protocol_version: int,
        profile: TeacherProfile,
        features: frozenset[str] = frozenset(),
        offer: DeviceOffer | None = None,
        owner: str = "",
    ) -> OpenedSession:
        """Admit a publisher; a call repeated with its request id gets the same session.

        ``owner`` as for ``open_session``. ``offer`` is device memory by which readers prove that
        they can open its slabs.

        Raises:
            SessionRefusedError: with every broken rule; it disagrees with the teacher's other
                publishers.
            PlaceTaken: its shard has one already; waiting helps where that one is dead.
            RequestInvalidError: an id that is no name, or was used with another profile.
            NotAllowedError: another caller has used the request id.
            DrainingError: the server takes no new sessions.
            LimitReachedError: it has as many as it takes.
        """
        keys.check_name(request_id, what="request id")
        keys.check_name(profile.teacher_id, what="teacher id")
        with self._step() as now:
            session = self._sessions.opened(request_id, profile, now=now, owner=owner)
            is_new = session is None
            if session is None:
                self._lapse_over(self._publishers.holders(profile), now)
                self._check_publisher(profile, protocol_version, now)
                session = self._add_session(
                    request_id,
                    profile,
                    teacher_id=profile.teacher_id,
                    vocabulary_size=profile.vocabulary_size,
                    now=now,
                )
                session.owner = owner
                session.agreed = Agreed(version=protocol_version, features=features)
                self._writers.add(session.session_id)
                entered = self._publishers.enter(session.session_id, profile, offer=offer)
                self._carry_out(entered)
                self._news.teachers_changed = True
            return OpenedSession(terms=self._terms(session), nonce=session.nonce, is_new=is_new)
