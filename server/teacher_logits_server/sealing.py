"""Seals under the ledger's lock: what publishers reserved becomes readable, or is given up.

A base of ``ledger.Ledger``, over ``publishing``.

Promises: what is sealed does not change: the same rows again are fine where the bytes are the
same, and refused otherwise; where the first is an orphan, they take its place for readers yet
to come. A refused seal ends its reservation, and its room is the writer's
again.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    PayloadConflictError,
    PayloadInvalidError,
    TeacherLogitsError,
)
from teacher_logits_server.publishing import Publishing
from teacher_logits_server.registry import Sealed
from teacher_logits_server.rooms import pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Extent
    from teacher_logits_server.drafts import Draft
    from teacher_logits_server.parts import Part
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.rooms import Pinned
    from teacher_logits_server.sessions import Session


class Sealing(Publishing):
    """How reservations end. For its arguments see ``Handshake``."""

    @contextmanager
    def pin_repeated(self, session_id: str, payload_id: str) -> Iterator[Pinned | None]:
        """Read what was sealed before, where a seal is to be compared with it.

        None where this is no repeat, or the digest of the first is known.

        Raises:
            ReservationLapsedError, NotAllowedError: there is no such reservation of this session.
        """
        with self._step() as now:
            session = self._publisher(session_id, now)
            self._drafts.get(session_id, payload_id)
            part = self._published(session).steps.part_of(payload_id)
            first = None
            if part is not None and part.repeat is not None and not part.digest:
                first = self._lending.pin(part.claim.payload_id)
        try:
            yield None if first is None else pinned(first)
        finally:
            if first is not None:
                with self._step():
                    self._lending.unpin(first)

    def check_place(self, session_id: str, payload_id: str, extent: Extent | None) -> None:
        """Refuse a place in which a payload cannot lie, before a byte there is read.

        A refused one ends the reservation; one that has ended is left to ``seal_payload``.

        Raises:
            PayloadInvalidError, NotAllowedError: as for ``seal_payload``.
        """
        with self._step() as now:
            published = self._published(self._publisher(session_id, now))
            draft = self._drafts.find(payload_id)
            if draft is None or draft.session_id != session_id:
                return
            try:
                self._check_place(draft, extent)
            except TeacherLogitsError:
                self._end_reservation(published, payload_id)
                raise

    def announce_payload(
        self, session_id: str, payload_id: str, *, extent: Extent, valid_count: int | None
    ) -> None:
        """Learn where a payload will lie, and its count, which its seal will repeat.

        Of one that was sealed, or has ended, nothing is learnt.

        Raises:
            PayloadInvalidError, NotAllowedError: as for ``seal_payload``.
        """
        with self._step() as now:
            published = self._published(self._publisher(session_id, now))
            draft = self._drafts.find(payload_id)
            if draft is None or draft.session_id != session_id or draft.extent is not None:
                return
            self._check_seal(draft, extent, 0, valid_count)
            draft.extent, draft.valid_count = extent, valid_count
            part = published.steps.part_of(payload_id)
            if part is not None and part.announce(valid_count):
                published.steps.changes.decided.append(part.claim.step)
                self._carry_out(published)

    def seal_payload(
        self,
        session_id: str,
        payload_id: str,
        *,
        extent: Extent | None,
        bad_row_count: int,
        valid_count: int | None,
        digest: str = "",
        repeated_digest: str = "",
    ) -> None:
        """Make a payload readable; a retry of a seal that was taken is fine.

        Args:
            extent: where it lies in the publisher's own slab; None where it was streamed.
            valid_count: positions that count, where a mask was registered.
            digest: its payload digest; a repeat needs one.
            repeated_digest: that of the payload sealed before, see ``pin_repeated``.

        Raises:
            PayloadConflictError: a repeat whose bytes are others.
            PayloadInvalidError: counts or extent that cannot be, or bytes that have not come.
            ReservationLapsedError: the reservation has ended.
            NotAllowedError: it is another session's, or the slab is.
        """
        with self._step() as now:
            session = self._publisher(session_id, now)
            published = self._published(session)
            part = published.steps.part_of(payload_id)
            if part is not None and part.was_taken(session_id, payload_id):
                return
            draft = self._drafts.get(session_id, payload_id)
            try:
                self._check_seal(draft, extent, bad_row_count, valid_count)
                if part is not None and part.repeat is not None:
                    _check_repeat(part, digest, part.digest or repeated_digest)
            except TeacherLogitsError:
                self._end_reservation(published, payload_id)
                raise
            if part is not None and part.repeat is not None:
                if part.is_orphan:
                    self._seal(session, draft, extent, bad_row_count)
                    self._lending.retire(published.steps.succeed(payload_id))
                    return
                published.steps.accept_repeat(payload_id, session_id)
                self._end_draft(payload_id)
                if not draft.streams:
                    self._mail.note_freed(session_id, payload_id)
                    self._news.mail.add(session_id)
                return
            self._seal(session, draft, extent, bad_row_count)
            published.steps.seal(payload_id, valid_count=valid_count, digest=digest)
            self._carry_out(published)

    def abandon_payload(self, session_id: str, payload_id: str) -> bool:
        """Give a reservation up; one that has ended, or was sealed, is fine.

        Returns whether it was sealed and is held, so that its publisher, which may not have heard
        of that, keeps its room until it is told that this is free.

        Raises:
            NotAllowedError: it is another session's.
        """
        with self._step() as now:
            session = self._publisher(session_id, now)
            if self._drafts.find(payload_id) is not None:
                self._drafts.get(session_id, payload_id)
                self._end_reservation(self._published(session), payload_id)
            return self._lending.is_held(payload_id)

    # Within

    def _check_seal(
        self, draft: Draft, extent: Extent | None, bad_row_count: int, valid_count: int | None
    ) -> None:
        payload = draft.payload
        for name, count, most in (
            ("bad_row_count", bad_row_count, payload.row_count),
            ("valid_count", valid_count or 0, payload.position_count),
        ):
            if not 0 <= count <= most:
                raise PayloadInvalidError(
                    f"{name} of payload {payload.payload_id} is {count}; it can be 0 to {most}",
                    facts={name: count, "most": most},
                )
        self._check_place(draft, extent)
        announced = (draft.extent, draft.valid_count)
        if not draft.streams and draft.extent and announced != (extent, valid_count):
            raise PayloadInvalidError(
                f"payload {payload.payload_id} is sealed at {extent} with valid_count "
                f"{valid_count}, and was announced at {draft.extent} with {draft.valid_count}",
                facts={"payload_id": payload.payload_id},
            )

    def _check_place(self, draft: Draft, extent: Extent | None) -> None:
        payload = draft.payload
        if draft.streams:
            draft.check_written()
        if draft.streams == (extent is not None):
            raise PayloadInvalidError(
                f"payload {payload.payload_id} is sealed with the place where it lies in its "
                "publisher's own slab, and without one where it was streamed",
                facts={"payload_id": payload.payload_id},
            )
        if extent is not None:
            self._lending.relays.check_extent(
                extent, payload.size_bytes, session_id=draft.session_id
            )

    def _seal(
        self, session: Session, draft: Draft, extent: Extent | None, bad_row_count: int
    ) -> None:
        self._drafts.end(draft.payload.payload_id)
        lies_in = extent or draft.extent
        if lies_in is None:
            raise ValueError(f"payload {draft.payload.payload_id} lies nowhere")
        payload = draft.payload
        if payload.bad_row_count != bad_row_count:
            payload = replace(payload, bad_row_count=bad_row_count)
        sealed = Sealed(
            payload=payload,
            extent=lies_in,
            row_positions=draft.row_positions,
            writer_id=self._writer_id(session),
            owner="" if draft.streams else session.session_id,
        )
        self._lending.seal(sealed)

    def _end_reservation(self, published: Published, payload_id: str) -> None:
        published.steps.abandon(payload_id)
        self._end_draft(payload_id)
        self._carry_out(published)


def _check_repeat(part: Part, digest: str, first: str) -> None:
    """Refuse other bytes for rows that were sealed."""
    claim = part.claim
    if not digest or not first:
        raise PayloadInvalidError(
            f"the rows of shard {claim.shard} of step {claim.step} were sealed before: seal them "
            "again with their digest only",
            facts={"step": claim.step, "shard": claim.shard},
        )
    if digest != first:
        raise PayloadConflictError(
            f"the rows of shard {claim.shard} of step {claim.step} were sealed before with digest "
            f"{first}, and now have {digest[:64]}: what is sealed does not change",
            facts={"step": claim.step, "shard": claim.shard, "digest": first},
        )
