"""Registered payloads under the ledger's lock: what becomes of room as steps go by.

A base of ``ledger.Ledger``, over ``settling``; nothing here is called from outside. What is to
happen to a payload (``steps``, ``publishers`` say it) happens here:

    its step is retired           no new lease; its room is free with its last hold
    its publisher died            likewise, and its step is lost; where somebody has leased it,
                                  once that comes back and not all have read the step
    a reservation ended           its room, where it had some, is free
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.cuts import cut_rows
from teacher_logits.errors import TeacherLogitsError
from teacher_logits.grid import rows_of_rank
from teacher_logits.terms import LeaseTerms, StepGrant
from teacher_logits_server.admission.suiting import check_payload_suits
from teacher_logits_server.ledger.settling import Settling, reads_objects
from teacher_logits_server.lending.leases import Doubt, Lease
from teacher_logits_server.publishers.drafts import Drafts
from teacher_logits_server.steps.announced import Announced
from teacher_logits_server.steps.grants import Grant, Grants
from teacher_logits_server.steps.mail import Mail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.cuts import Cut
    from teacher_logits.transport import Transport
    from teacher_logits_server.lending import Slots
    from teacher_logits_server.lending.registry import Sealed
    from teacher_logits_server.limits import Limits
    from teacher_logits_server.news import News
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.publishers.engines import EngineTeacher
    from teacher_logits_server.sessions.session import Session
    from teacher_logits_server.steps.parts import Step


class Stepping(Settling):
    """Steps, grants, drafts and mail. For its arguments see ``Handshake``."""

    def __init__(
        self,
        *,
        epoch: str,
        limits: Limits,
        engines: Sequence[EngineTeacher],
        clock: Clock,
        slots: Slots,
        offered: frozenset[Transport],
    ) -> None:
        super().__init__(limits=limits, engines=engines, clock=clock, slots=slots, offered=offered)
        self.epoch = epoch
        self._drafts = Drafts()
        self._grants = Grants()
        self._mail = Mail()
        self._announced = Announced()
        #: Sessions of publishers that are there.
        self._writers: set[str] = set()

    # Leases

    def _take_back(self, lease: Lease, *, returned: bool) -> None:
        """End a lease; ``returned`` where its reader said so itself."""
        teacher = self._lending.sealed(lease).payload.teacher_id
        self._lending.take_back(lease)
        if lease.as_object:
            self._news.objects_let_go.append(lease.lease_id)
        self._note_end(lease, teacher, returned=returned)

    def _doubt(self, lease: Lease, doubt: Doubt) -> None:
        """Keep the room of a lease whose reader is gone and not proven gone.

        Not where nobody will write to it again: such a reader finds what it has always read.
        """
        sealed = self._lending.sealed(lease)
        if not self._lending.is_written_again(sealed):
            self._take_back(lease, returned=False)
            return
        self._lending.quarantine(lease, doubt)
        self._note_end(lease, sealed.payload.teacher_id, returned=False)

    def _note_end(self, lease: Lease, teacher_id: str, *, returned: bool) -> None:
        grant = self._grants.end(lease.lease_id, returned=returned)
        published = self._publishers.find(teacher_id)
        if published is None:
            return
        if grant is not None and grant.seat is not None:
            published.steps.consume(grant.step, grant.seat)
            self._carry_out(published)
        part = published.steps.part_of(lease.payload_id)
        if part is not None and part.is_orphan and not self._lending.is_leased(lease.payload_id):
            self._lose(published, lease.payload_id)
            self._carry_out(published)

    def _cut(self, sealed: Sealed, lease: Lease) -> Cut | None:
        """Return the rows of a payload that a lease streams; None where it has all of it.

        All readers of an object share it, and so each has all of it. One in a publisher's device
        memory goes without the gaps that its columns may have there.
        """
        payload, rows = sealed.payload, lease.rows
        if rows is None:
            rows = range(payload.first_row, payload.first_row + payload.row_count)
        is_whole = len(rows) == payload.row_count and not (sealed.on_device and sealed.owner)
        if is_whole or lease.as_object or not lease.streams:
            return None
        return cut_rows(payload, sealed.row_positions, first_row=rows.start, row_count=len(rows))

    def _lease_terms(self, lease: Lease, sealed: Sealed) -> LeaseTerms:
        cut = self._cut(sealed, lease)
        payload = sealed.payload if cut is None else cut.payload
        return LeaseTerms(
            lease_id=lease.lease_id,
            payload=payload,
            writer_id=sealed.writer_id,
            extent=None if lease.streams else sealed.extent,
            on_device=lease.on_device,
            encoding=self._encoding(lease, payload),
            as_object=lease.as_object,
        )

    # Grants

    def _grant(
        self, session: Session, published: Published, step: Step, *, request_id: str, now: float
    ) -> StepGrant:
        """Lease a session all that a complete step holds of its rows.

        Raises:
            SessionRefusedError: a writer shares no memory with it, and it insists.
            NoCommonTransportError: nothing that it wants is left for a writer.
            PayloadInvalidError: a payload lacks what the session settled.
            HostCopyNeededError, ProducerLostError: see ``_reads_device``.
        """
        parts = [(self._lending.held(p.claim.payload_id), p.claim.rows) for p in step.sealed]
        found = self._suiting(session, parts)
        settlements = self._settle_new(session, [sealed.writer_id for sealed, _ in found])
        try:  # all of them, before the first is leased
            for sealed, _ in found:
                self._reads_device(session, sealed)
        except TeacherLogitsError:
            session.untold |= settlements.keys()
            raise
        leases = [self._lend(session, sealed, rows=rows, now=now) for sealed, rows in found]
        terms = StepGrant(
            step=step.number,
            leases=tuple(leases),
            real_rows=step.real_rows,
            global_count=step.global_count,
            settlements=tuple(settlements.values()),
        )
        seat = published.steps.seats.of(session.session_id)
        published.steps.seats.want_no_more(session.session_id, step.number)
        self._grants.add(
            Grant(
                session_id=session.session_id,
                request_id=request_id,
                seat=seat,
                terms=terms,
                open_leases={lease.lease_id for lease in leases},
            )
        )
        if not leases and seat is not None:  # its rows are all padding
            published.steps.consume(step.number, seat)
            self._carry_out(published)
        return terms

    def _suiting(
        self, session: Session, parts: list[tuple[Sealed, range]]
    ) -> list[tuple[Sealed, range]]:
        """Return the payloads of a step that hold rows of a student's rank, and these rows."""
        student = session.student
        mine = rows_of_rank(student.batch_grid, student.data_parallel_rank)
        found = []
        for sealed, theirs in parts:
            rows = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
            if not rows:
                continue
            check_payload_suits(
                student,
                sealed.payload,
                teacher_id=session.teacher_id,
                vocabulary_size=session.vocabulary_size,
            )
            found.append((sealed, rows))
        return found

    def _lend(
        self,
        session: Session,
        sealed: Sealed,
        *,
        rows: range | None = None,
        request_id: str = "",
        digest: bytes = b"",
        now: float,
    ) -> LeaseTerms:
        told = self._announced.lease_id(session.session_id, sealed.payload.key)
        lease = Lease(
            lease_id=told or self._new_lease_id(),
            session_id=session.session_id,
            request_id=request_id,
            digest=digest,
            payload_id=sealed.payload.payload_id,
            granted_at=now,
            rows=rows,
            streams=not session.shares(sealed.writer_id) or sealed.extent is None,
            as_object=reads_objects(session, sealed.writer_id),
            on_device=self._reads_device(session, sealed),
            codec=self._stream_terms(session).codec,
        )
        self._lending.lend(lease)
        terms = self._lease_terms(lease, sealed)
        if (transport := session.settlements[sealed.writer_id].transport) is not None:
            self._lending.leases.granted.add(transport, terms.payload.size_bytes)
        return terms

    def _new_lease_id(self) -> str:
        return keys.new_id("l", self.epoch)

    # Ends

    def _carry_out(self, published: Published) -> None:
        """Do to the payloads what the steps' table has decided, and tell who waits."""
        changes = published.steps.changes.take()
        for payload_id in changes.retired:
            self._lending.retire(payload_id)
        for payload_id in changes.lapsed:
            self._end_draft(payload_id)
        if changes.is_news:
            self._news.steps_changed = True
        if changes.decided:
            self._news.mail |= {
                session_id
                for session_id in published.steps.seats.sessions()
                if self._mail.wants(session_id, changes.decided)
            }
            self._news.mail |= {
                member.session_id
                for member in published.members.values()
                if member.session_id in self._writers
            }

    def _take_news(self) -> News | None:
        for session_id, payload_id in self._lending.freed.take_foreign():
            if session_id in self._writers:
                self._mail.note_freed(session_id, payload_id)
                self._news.mail.add(session_id)
        for session_id, slab_id in self._lending.take_unmappable():
            if self._mail.note_gone(session_id, slab_id):
                self._news.mail.add(session_id)
        return super()._take_news()

    def _end_draft(self, payload_id: str) -> None:
        if (extent := self._drafts.end(payload_id)) is not None:
            self._lending.give_back(extent)

    def _lose(self, published: Published, payload_id: str) -> None:
        published.steps.lose(payload_id)
        self._lending.retire(payload_id)

    def _end_publisher(self, session: Session, *, in_good_order: bool) -> None:
        """Learn that a publisher is gone: what it wrote stays, or is lost where it died.

        What lies in its device memory alone is lost either way: that goes with its process.
        """
        session_id = session.session_id
        published = self._publishers.find(session.teacher_id)
        if session_id not in self._writers or published is None:
            return
        self._writers.discard(session_id)
        self._drafts.leave(session_id)
        for claim, is_sealed in published.steps.claims_of(session_id):
            if not is_sealed:
                end = published.steps.abandon if in_good_order else published.steps.lose
                end(claim.payload_id)
                self._end_draft(claim.payload_id)
            elif in_good_order and self._lending.held(claim.payload_id).host_copy:
                continue
            elif self._lending.is_leased(claim.payload_id):
                published.steps.orphan(claim.payload_id)
            else:
                self._lose(published, claim.payload_id)
        self._publishers.leave(session.teacher_id, session_id, in_good_order=in_good_order)
        self._lending.relays.leave(session_id)
        self._carry_out(published)
        self._publishers.note_left(session.teacher_id, now=self._clock.now())
        self._news.teachers_changed = True
