"""Publishers under the ledger's lock: reservations, and room for what streams.

A base of ``ledger.Ledger``, over ``relaying``. The order is reserve, write, seal (``sealing``):

    shares memory   passes its slabs' descriptors, and says at the seal where the payload lies
    streams         takes room in the server's slabs, and brings the bytes before the seal

Promises: rows are written once; room that somebody writes to is not given to another, whatever
becomes of the reservation.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import (
    DrainingError,
    NotAllowedError,
)
from teacher_logits.pool import Growth
from teacher_logits.shard_parts import shard_of
from teacher_logits.terms import SERVER_WRITER, Reservation
from teacher_logits_server.ledger.relaying import Relaying
from teacher_logits_server.lending.rooms import PayloadRoom, Writing, check_room_kept
from teacher_logits_server.publishers.drafts import Draft
from teacher_logits_server.publishers.promises import check_promised
from teacher_logits_server.steps.claims import Claim
from teacher_logits_server.steps.parts import Stage
from teacher_logits_server.views import SHOWN_RANKS, SHOWN_STEPS, waiting_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Extent, Payload
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.sessions.session import Session


class Publishing(Relaying):
    """What publishers do. For its arguments see ``Handshake``."""

    def reserve_payload(
        self,
        session_id: str,
        request_id: str,
        payload: Payload,
        row_positions: tuple[int, ...],
        real_rows: int,
    ) -> Reservation:
        """Claim the rows of one shard of a step; a retry gets the same reservation.

        Args:
            payload: what will be written, with its key and without an id.
            row_positions: positions of each row.
            real_rows: rows of the whole step that are no padding; 0 for all.

        Raises:
            PayloadInvalidError: it is not what the publisher's profile says, or could never fit.
            PayloadConflictError: rows or shard are taken, or the count of real rows differs.
            PayloadRetiredError: the step is retired.
            PoolFullError: too much of the publisher's own slabs is in quarantine.
            LimitReachedError: it has reserved too much ahead, or too many steps are not retired.
            DrainingError: the server takes no new work.
            RequestInvalidError: the request id is no name, or was used for other rows.
        """
        with self._step() as now:
            session = self._publisher(session_id, now)
            keys.check_name(request_id, what="request id")
            if self._draining:
                raise DrainingError("the server is shutting down and takes no new payloads")
            check_promised(session.publisher, payload, row_positions, real_rows=real_rows)
            published = self._published(session)
            claim = self._claim(session, request_id, payload, real_rows, published)
            self._lending.check_relays(session_id)
            streams = self._writer_id(session) == SERVER_WRITER
            if streams:
                self._lending.check_fits(payload.size_bytes)
            self._check_ahead(published, claim)
            held, is_repeat = published.steps.reserve(claim)
            if held is claim:
                self._drafts.add(
                    Draft(
                        session_id=session_id,
                        payload=_stamped(payload, claim.payload_id, session.publisher),
                        row_positions=row_positions,
                        streams=streams,
                    )
                )
            self._carry_out(published)
            lowest = published.steps.lowest_without(claim.shard)
            self._mail.note_lowest(session_id, lowest)
            return Reservation(
                payload_id=held.payload_id,
                is_repeat=is_repeat,
                lowest_open_step=lowest,
                host_copy=self._needs_copy(session, published, payload, now=now),
            )

    def reserved(self, session_id: str, payload_id: str) -> Draft | None:
        """Return a copy of a reservation of this session, or None where there is none."""
        with self._step():
            draft = self._drafts.find(payload_id)
            if draft is None or draft.session_id != session_id:
                return None
            return replace(draft)

    def held_by(self, session_id: str) -> str:
        """Say whom the room of a publisher's steps waits for, for messages; empty where nobody.

        The lowest ``SHOWN_STEPS`` steps are named, each with the first of its ranks.
        """
        with self._step():
            session = self._sessions.find(session_id)
            published = self._publishers.find(session.teacher_id) if session is not None else None
            if published is None:
                return ""
            steps = published.steps
            complete = [step for step in steps if step.stage is Stage.COMPLETE]
            waits = [(step, list(waiting_names(step, steps))) for step in complete]
            texts = [
                f"step {step.number} waits for {', '.join(names[:SHOWN_RANKS])}"
                + (f" and {len(names) - SHOWN_RANKS} more" if len(names) > SHOWN_RANKS else "")
                for step, names in waits
                if names
            ]
            more = [f"{len(texts) - SHOWN_STEPS} steps more"] if len(texts) > SHOWN_STEPS else []
            if texts:
                return "; ".join([*texts[:SHOWN_STEPS], *more])
            is_unread = complete or (steps.seats.is_empty and not steps.is_empty)
            return "no student is there to read" if is_unread else ""

    def payload_room(self, session_id: str, payload_id: str) -> PayloadRoom:
        """Return where ``slabs.ServerSlabs.room_for`` takes a streamed payload's room.

        Raises:
            ReservationLapsedError, NotAllowedError: there is no such reservation of this
                session, or it shares memory and writes into slabs of its own.
        """
        with self._step() as now:
            self._publisher(session_id, now)
            draft = self._streamed(session_id, payload_id)
            return PayloadRoom(
                size_bytes=draft.payload.size_bytes,
                take=lambda: self._take_room(session_id, payload_id),
                ledger=self,
            )

    @contextmanager
    def writing(self, session_id: str, payload_id: str) -> Iterator[Writing]:
        """Write a streamed payload's bytes; its room is not reused before the block is left.

        Raises:
            ReservationLapsedError, NotAllowedError: as for ``payload_room``; or it has no room
                yet, or is being written already.
        """
        with self._step() as now:
            self._publisher(session_id, now)
            draft = self._streamed(session_id, payload_id)
            extent = draft.extent
            if extent is None or draft.is_being_written:
                raise NotAllowedError(
                    f"payload {payload_id} is being written already, or has no room yet",
                    facts={"payload_id": payload_id},
                )
            draft.is_being_written = True
        try:
            yield Writing(draft, extent)
        finally:
            with self._step():
                draft.is_being_written = False
                if self._drafts.is_over(draft):
                    self._lending.give_back(extent)

    # Within

    def _check_ahead(self, published: Published, claim: Claim) -> None:
        """Refuse a reservation of a publisher that is too far ahead; a retry is fine."""
        if published.steps.has_claim(claim.session_id, claim.request_id):
            return
        self._caps.reservations.check(self._drafts.count_of(claim.session_id))
        if published.steps.find(claim.step) is None:
            published.steps.check_open(claim.step)
            self._caps.steps.check(sum(1 for _ in published.steps))

    def _claim(
        self,
        session: Session,
        request_id: str,
        payload: Payload,
        real_rows: int,
        published: Published,
    ) -> Claim:
        rows = range(payload.first_row, payload.first_row + payload.row_count)
        return Claim(
            payload_id=keys.new_id("p", self.epoch),
            session_id=session.session_id,
            request_id=request_id,
            step=payload.key.step if payload.key is not None else 0,
            shard=shard_of(session.publisher),
            rows=rows,
            real_rows=real_rows or published.global_batch_size,
            grid=published.parts,
        )

    def _streamed(self, session_id: str, payload_id: str) -> Draft:
        draft = self._drafts.get(session_id, payload_id)
        if not draft.streams:
            raise NotAllowedError(
                f"payload {payload_id} lies in a slab of its publisher's own: nothing is streamed",
                facts={"payload_id": payload_id},
            )
        return draft

    def _take_room(self, session_id: str, payload_id: str) -> Extent | Growth:
        """Take a streamed payload's room in the server's slabs, once."""
        with self._step() as now:
            session = self._publisher(session_id, now)
            draft = self._streamed(session_id, payload_id)
            if draft.extent is not None:
                return draft.extent
            step = draft.payload.key.step if draft.payload.key is not None else 0
            size_bytes = draft.payload.size_bytes
            check_room_kept(
                self._published(session),
                self._drafts,
                self._lending.usage(),
                step=step,
                size_bytes=size_bytes,
            )
            with self._noting_room():
                answer = self._lending.reserve(size_bytes)
            if not isinstance(answer, Growth):
                draft.extent = answer
            return answer


def _stamped(payload: Payload, payload_id: str, profile: TeacherProfile) -> Payload:
    """Return what a publisher wants to write, under its id and its teacher's name."""
    return replace(
        payload,
        payload_id=payload_id,
        teacher_id=profile.teacher_id,
        teacher_revision=profile.revision,
    )
