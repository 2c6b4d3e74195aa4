"""Announcements under the ledger's lock: steps that are told of before they are sealed.

A base of ``ledger.Ledger``, over ``ending``. A student that shares memory with every writer of a
step is told of it as soon as its payloads have their places, and has it open when it is sealed:

    announced, then sealed      leased under the ids that were told; nothing is sent
    announced, then not to be   withdrawn by mail: a reservation ended, a shard was lost

Promises: a step is announced whole, with every slot that awaited it. Who may have read it is
leased it, however late the seal is heard: until then a session that closed stays for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import TeacherLogitsError
from teacher_logits.terms import LeaseTerms, StepGrant
from teacher_logits_server.ledger.ending import Ending
from teacher_logits_server.lending.registry import Sealed
from teacher_logits_server.steps.parts import Stage

if TYPE_CHECKING:
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.publishers.drafts import Draft
    from teacher_logits_server.sessions.session import Session
    from teacher_logits_server.steps.parts import Part, Step


class Announcing(Ending):
    """What is told of a step before it is sealed. For its arguments see ``Handshake``."""

    def announced(self, session_id: str) -> list[Draft]:
        """Return the reservations with a place, of the teacher of a session."""
        with self._step():
            session = self._sessions.find(session_id)
            return [] if session is None else self._drafts.announced(session.teacher_id)

    def was_announced(self, session_id: str, lease_id: str) -> bool:
        """Say whether a session was told of a lease, and not granted it yet."""
        with self._step():
            return self._announced.step_of(session_id, lease_id) is not None

    def give_up_announced(self, session_id: str, lease_id: str) -> None:
        """Learn that a session has no use for what it was told of the step of a lease.

        It is granted the step as any other, once that is complete, and not told of it before.
        Nothing comes of it where that was withdrawn already, and its session has not heard so
        yet: what is announced of the step from then on lies elsewhere, and is told.
        """
        with self._step():
            step = self._announced.step_of(session_id, lease_id)
            if step is not None:
                self._announced.end(session_id, step)
                self._mail.decline(session_id, step)

    # Within

    def _announce(self, session: Session, published: Published, step: Step) -> StepGrant | None:
        """Return what a session is told of an announced step; None where it shall wait for it.

        It is told where it can look at every slot, and all that it reads lies on the host.

        Raises:
            TeacherLogitsError: as for a grant.
        """
        parts = [(self._to_be(part), part) for part in step.there]
        found = self._suiting(session, [(sealed, part.claim.rows) for sealed, part in parts])
        if not found or any(sealed.on_device for sealed, _ in parts):
            return None
        writers = [sealed.writer_id for sealed, _ in parts]
        settlements = self._settle_new(session, writers)
        if not all(map(session.shares, writers)):
            session.untold |= settlements.keys()
            return None
        terms = StepGrant(
            step=step.number,
            leases=tuple(
                LeaseTerms(
                    lease_id=self._new_lease_id(),
                    payload=sealed.payload,
                    writer_id=sealed.writer_id,
                    extent=sealed.room,
                )
                for sealed, _ in found
            ),
            real_rows=step.real_rows,
            global_count=step.global_count,
            settlements=tuple(settlements.values()),
            awaited=tuple(sealed.room for sealed, _ in parts),
        )
        self._announced.add(session.session_id, terms)
        return terms

    def _to_be(self, part: Part) -> Sealed:
        """Return a part's payload as it is, or will be, sealed."""
        payload_id = part.claim.payload_id
        if part.is_sealed:
            return self._lending.held(payload_id)
        draft = self._drafts.find(payload_id)
        if draft is None or draft.extent is None:
            raise ValueError(f"payload {payload_id} is not announced")
        writer = self._sessions.find(draft.session_id)
        if writer is None:
            raise ValueError(f"the writer of payload {payload_id} is gone")
        (writer_id,) = writer.settlements
        return Sealed(
            payload=draft.payload,
            extent=draft.extent,
            row_positions=draft.row_positions,
            writer_id=writer_id,
            owner=draft.session_id,
        )

    def _carry_out(self, published: Published) -> None:
        """Carry out what was decided, and follow what was announced."""
        may_concern_readers = published.steps.changes.is_any
        super()._carry_out(published)
        if not (may_concern_readers and self._announced):
            return
        for session_id in self._announced.sessions():
            session = self._sessions.find(session_id)
            if session is not None and session.teacher_id == published.profile.teacher_id:
                for number in sorted(self._announced.steps_of(session_id)):
                    self._follow(session, published, number)

    def _follow(self, session: Session, published: Published, number: int) -> None:
        """Grant what was announced and is complete; take back what will not come as it was."""
        session_id = session.session_id
        step = published.steps.find(number)
        if step is not None and step.is_announced:
            return
        try:
            if step is not None and step.stage is Stage.COMPLETE:
                self._grant(session, published, step, request_id="", now=self._clock.now())
                self._announced.end(session_id, number)
                if self._mail.is_asked(session_id, number):
                    published.steps.seats.note_asked(number)
                return
        except TeacherLogitsError:
            pass  # who asks for it again is told
        self._announced.end(session_id, number)
        if self._mail.withdraw(session_id, number):
            self._news.mail.add(session_id)
        self._drop_if_done(session)
