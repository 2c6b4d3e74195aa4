"""Steps under the ledger's lock: students ask for them, and get them when they are complete.

A base of ``ledger.Ledger``, over ``sealing``. A session with a broker line says once which
steps it wants, and they are sent ahead; another asks for each. Whoever waits is told outside
the lock that something has changed (``on_mail``, ``on_steps_changed``), and asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import NotAllowedError, TeacherLogitsError
from teacher_logits.shard_parts import shard_of
from teacher_logits.terms import SERVER_WRITER, StepFailure, StepGrant, WritersCame
from teacher_logits.transport import Transport
from teacher_logits_server.ledger.sealing import Sealing
from teacher_logits_server.ledger.settling import reads_objects
from teacher_logits_server.requests import reused
from teacher_logits_server.sessions.session import Phase

if TYPE_CHECKING:
    from teacher_logits.payload import Extent
    from teacher_logits.terms import Mail
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.sessions.session import Session


class Reading(Sealing):
    """What students do with steps. For its arguments see ``Handshake``."""

    def want_steps(self, session_id: str, first_step: int, count: int) -> None:
        """Want ``count`` steps as they become ready, from the one that is asked for now.

        Replaces what was wanted before. What is ready already is mail at once.

        Raises:
            RequestInvalidError: none or too many, or a step that cannot be.
            NotAllowedError: the session's teacher is the engine, which has no steps.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            published = self._read_by(session)
            self._check_leases(session_id)
            self._mail.want(
                session_id,
                first_step,
                count,
                is_out=lambda step: (
                    self._grants.is_out(session_id, step) or self._announced.has(session_id, step)
                ),
            )
            published.steps.seats.note_wanted(session_id, self._mail.due(session_id))
            if self._grants.is_out(session_id, first_step):
                published.steps.seats.note_asked(first_step)
            if self._mail.due(session_id):
                self._news.mail.add(session_id)

    def take_step(self, session_id: str, request_id: str, step: int) -> StepGrant | None:
        """Lease a step's rows of this rank; None while it is not complete.

        A call repeated gets the same grant while a lease of it is out.

        Raises:
            PayloadRetiredError: the step is retired; the message has the lowest there is.
            ProducerLostError: a publisher died with some of it.
            SessionRefusedError: a writer that came later shares no memory with the reader,
                which insists.
            PayloadInvalidError: the payloads lack what this session settled.
            HostCopyNeededError: it lies in device memory alone, which the reader does not open.
            RequestInvalidError: the request id is no name, was given up, or used for another
                step or call; or the step cannot be.
            NotAllowedError: the session's teacher is the engine, which has no steps.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            session.requests.check_wanted(keys.check_name(request_id, what="request id"))
            grant = self._grants.of_request(session_id, request_id)
            has_leased = self._lending.leases.of_request(session_id, request_id) is not None
            if has_leased or (grant is not None and grant.step != step):
                raise reused(request_id)
            if grant is not None:
                return grant.terms
            published = self._read_by(session)
            keys.check_step(step)
            self._mail.check_barred(session_id, step)
            self._check_leases(session_id)
            found = published.steps.had(step)
            if found is None or self._awaits_proof(session):
                published.steps.seats.want_also(session_id, step)
                return None
            terms = self._grant(session, published, found, request_id=request_id, now=now)
            published.steps.seats.note_asked(step)
            return terms

    def lacking(self, session_id: str, step: int) -> str:
        """Say what a step lacks, for messages; empty where the session is gone."""
        with self._step():
            session = self._sessions.find(session_id)
            published = self._publishers.find(session.teacher_id) if session is not None else None
            if published is None:
                return ""
            found = published.steps.find(step)
            lowest = published.steps.lowest_open_step
            text = (
                f"nothing of it is reserved; the lowest step that is open is {lowest}"
                if found is None
                else found.lacking_text(published.shard_count, published.parts)
            )
            if self._writers.isdisjoint(m.session_id for m in published.members.values()):
                text += "; no publisher of the teacher is left"
            return text + ("; the server is shutting down" if self._draining else "")

    def take_mail(self, session_id: str) -> list[Mail]:
        """Return what is to be sent ahead to a session, each once; nothing where it has ended.

        Steps are leased in this moment, so that none is leased to a reader that reads nothing.
        """
        with self._step() as now:
            session = self._sessions.find(session_id)
            over = session is None or self._sessions.is_over(session, now=now)
            if session is None or over or session.phase not in (Phase.LOCAL, Phase.REMOTE):
                return []
            published = self._publishers.find(session.teacher_id)
            due: list[Mail | None] = [self._mail.take_gone(session_id), self._came(session)]
            due += self._mail.take_withdrawn(session_id)
            if published is not None and session.is_publisher:
                lowest = published.steps.lowest_without(shard_of(session.publisher))
                due.append(self._mail.take_freed(session_id, lowest))
            elif published is not None:
                numbers = self._mail.due(session_id)
                due += [self._send(session, published, number, now) for number in numbers]
            return [each for each in due if each is not None]

    def may_open(self, session_id: str, slab_id: str) -> None:
        """Refuse a slab that is not in use, or to a session not proven to share memory.

        Who may open a publisher's slab, or one of the engine's device, is told when it is gone.

        Raises:
            SessionExpiredError: the session has ended.
            NotAllowedError: it streams, or is not settled, or there is no such slab.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            session.student  # noqa: B018 - refuses a publisher's
            shares_memory = session.shares_memory
            if session.shares(SERVER_WRITER) and self._lending.has_slab(slab_id):
                own = self._lending.own_device
                if own is not None and own.pool.has_slab(slab_id):
                    own.note_passed(slab_id, session_id)
                    self._mail.open(session_id)
                return
            writer_id = self._lending.relays.writer_of(slab_id)
            if writer_id is not None and session.shares(writer_id):
                self._lending.relays.note_passed(slab_id, session_id)
                self._mail.open(session_id)
                return
        shown = slab_id[:128]
        why = (
            f"there is no slab {shown!r}; leases name those there are"
            if shares_memory
            else f"session {session_id} has settled on streaming, and slabs are for those who "
            "share memory with the server"
        )
        raise NotAllowedError(why, facts={"session_id": session_id, "slab_id": shown})

    def scores_on_device(self, session_id: str) -> bool:
        """Say whether what is scored for a session is to lie in the engine's device memory."""
        with self._step() as now:
            return self._opens_own_device(self._living(session_id, now))

    def reads_objects(self, session_id: str) -> bool:
        """Say whether what is scored for a session may stay in the stores of a Ray cluster."""
        with self._step() as now:
            session = self._living(session_id, now)
            return Transport.RAY_OBJECT in self._offered and reads_objects(session, SERVER_WRITER)

    def bring(self, payload_id: str, extent: Extent) -> None:
        """Learn that a payload which stays elsewhere was copied into a slab, once.

        Whoever says so has it pinned, so that it is held.
        """
        with self._step():
            self._lending.bring(payload_id, extent)

    def passes_own_device(self, session_id: str, slab_id: str) -> bool:
        """Say whether a session is to have the device part of one of the server's own slabs."""
        with self._step():
            session = self._sessions.find(session_id)
            is_own = self._lending.has_device_slab(slab_id)
            return session is not None and is_own and self._opens_own_device(session)

    def _send(
        self, session: Session, published: Published, number: int, now: float
    ) -> StepGrant | StepFailure | None:
        """Return what can be sent of a wanted step; None where there is nothing yet."""
        session_id = session.session_id
        is_asked = self._mail.is_asked(session_id, number)
        try:
            self._mail.check_barred(session_id, number)
            step = published.steps.had(number)
            if self._awaits_proof(session):
                return None
            if step is None:
                return self._send_ahead(session, published, number)
            terms = self._grant(session, published, step, request_id="", now=now)
        except TeacherLogitsError as error:
            if not is_asked:
                return None
            self._mail.note_sent(session_id, number)
            return StepFailure(step=number, error=error)
        self._mail.note_sent(session_id, number)
        if is_asked:
            published.steps.seats.note_asked(number)
        return terms

    def _came(self, session: Session) -> WritersCame | None:
        """Return the device memory that a student may try of writers that have come."""
        offers = self._offers(session)
        came = self._mail.take_came(session.session_id)
        probes = [offers[each].probe for each in dict.fromkeys(came) if each in offers]
        return WritersCame(probes=tuple(probes)) if probes else None

    def _send_ahead(self, session: Session, published: Published, number: int) -> StepGrant | None:
        """Return what can be told of a wanted step that is not complete."""
        step = published.steps.find(number)
        if step is None or not step.is_announced:
            return None
        if self._mail.has_declined(session.session_id, number):
            return None
        terms = self._announce(session, published, step)
        if terms is not None:
            self._mail.note_sent(session.session_id, number)
        return terms

    def _read_by(self, session: Session) -> Published:
        """Return the published teacher whose steps a student's session reads."""
        session.student  # noqa: B018 - refuses a publisher's
        published = self._publishers.find(session.teacher_id)
        if published is None:
            raise NotAllowedError(
                f"teacher {session.teacher_id!r} is the server's engine, which scores what it is "
                "asked and has no steps: call score",
                facts={"teacher_id": session.teacher_id},
            )
        return published
