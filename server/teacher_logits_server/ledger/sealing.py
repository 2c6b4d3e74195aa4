"""Seals under the ledger's lock: what publishers reserved becomes readable, or is given up.

A base of ``ledger.Ledger``, over ``placing``.

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
from teacher_logits_server.ledger.placing import Placing, check_siblings
from teacher_logits_server.lending.registry import Sealed
from teacher_logits_server.lending.rooms import pinned
from teacher_logits_server.steps.parts import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Extent
    from teacher_logits_server.lending.rooms import Pinned
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.publishers.drafts import Draft
    from teacher_logits_server.sessions.session import Session
    from teacher_logits_server.steps.parts import Part


class Sealing(Placing):
    """How reservations end. For its arguments see ``Handshake``."""

    @contextmanager
    def pin_repeated(self, session_id: str, payload_id: str) -> Iterator[Pinned | None]:
        """Read what was sealed before, where a seal is to be compared with it.

        None where this is no repeat, or the digest of the first is known.

        Raises:
            ReservationLapsedError, NotAllowedError: there is no such reservation of this session.
            PayloadConflictError: what was sealed before lies in device memory alone; the
                reservation has ended.
        """
        with self._step() as now:
            session = self._publisher(session_id, now)
            self._drafts.get(session_id, payload_id)
            published = self._published(session)
            part = published.steps.part_of(payload_id)
            first = None
            if part is not None and part.repeat is not None and not part.digest:
                if not self._lending.held(part.claim.payload_id).host_copy:
                    self._end_reservation(published, payload_id)
                    raise _not_comparable(part)
                first = self._lending.pin(part.claim.payload_id)
        try:
            yield None if first is None else pinned(first)
        finally:
            if first is not None:
                with self._step():
                    self._lending.unpin(first)

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
        host_copy: bool = False,
        is_said: bool = True,
    ) -> None:
        """Make a payload readable; a retry of a seal that was taken is fine.

        One that lacks a host copy which it needs may be sealed again, with it.

        Args:
            extent: where it lies in the publisher's own slab; None where it was streamed.
            valid_count: positions that count, where a mask was registered.
            digest: its payload digest; a repeat needs one.
            repeated_digest: that of the payload sealed before, see ``pin_repeated``.
            host_copy: the slab has copies of the columns that lie in device memory.
            is_said: by its publisher; else it was seen by its slot, and will be said.

        Raises:
            PayloadConflictError: a repeat whose bytes, or positions that count, are others.
            PayloadInvalidError: counts or extent that cannot be, or bytes that have not come.
            ReservationLapsedError: the reservation has ended.
            NotAllowedError: it is another session's, or the slab is.
            HostCopyNeededError: a reader needs one; the reservation lasts.
        """
        with self._step() as now:
            session = self._publisher(session_id, now)
            published = self._published(session)
            part = published.steps.part_of(payload_id)
            if self._was_taken(session_id, payload_id, part, is_said=is_said):
                return
            draft = self._drafts.get(session_id, payload_id)
            try:
                self._check_seal(draft, extent, bad_row_count, valid_count)
                self._check_place(draft, extent, host_copy=host_copy)
                check_siblings(published, part, valid_count)
                _check_repeat(part, digest, repeated_digest, valid_count)
            except TeacherLogitsError:
                self._end_reservation(published, payload_id)
                raise
            is_repeat = part is not None and part.repeat is not None
            if part is not None and is_repeat and not part.is_orphan:
                self._accept_repeat(published, draft)
                return
            if not host_copy and self._is_on_device(extent):
                self._check_copied(session, published, draft.payload, now=now)
            self._seal(session, draft, extent, bad_row_count, host_copy=host_copy, is_said=is_said)
            if is_repeat:
                self._lending.retire(published.steps.succeed(payload_id))
                return
            published.steps.seal(payload_id, valid_count=valid_count, digest=digest)
            self._follow_seal(published, payload_id)

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

    def _was_taken(
        self, session_id: str, payload_id: str, part: Part | None, *, is_said: bool
    ) -> bool:
        if is_said and self._drafts.take_seen(session_id, payload_id):
            return True
        return part is not None and part.was_taken(session_id, payload_id)

    def _seal(
        self,
        session: Session,
        draft: Draft,
        extent: Extent | None,
        bad_row_count: int,
        *,
        host_copy: bool,
        is_said: bool,
    ) -> None:
        self._drafts.end(draft.payload.payload_id)
        self._drafts.note_sealed(draft.payload.payload_id, session.session_id, is_said=is_said)
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
            on_device=self._is_on_device(extent),
            host_copy=host_copy or not self._is_on_device(extent),
        )
        self._lending.seal(sealed)

    def _follow_seal(self, published: Published, payload_id: str) -> None:
        """Have a step that is complete by a payload wait for nobody who can never read it."""
        self._carry_out(published)
        part = published.steps.part_of(payload_id)
        step = published.steps.find(part.claim.step) if part is not None else None
        if step is None or step.stage is not Stage.COMPLETE:
            return
        if all(self._lending.held(each.claim.payload_id).host_copy for each in step.sealed):
            return
        for session in filter(None, map(self._sessions.find, published.steps.seats.sessions())):
            self._pass_over(session)

    def _accept_repeat(self, published: Published, draft: Draft) -> None:
        """Keep what was sealed before; the room of the repeat is its publisher's again."""
        payload_id = draft.payload.payload_id
        published.steps.accept_repeat(payload_id, draft.session_id)
        self._end_draft(payload_id)
        if not draft.streams:
            self._mail.note_freed(draft.session_id, payload_id)
            self._news.mail.add(draft.session_id)


def _not_comparable(part: Part) -> PayloadConflictError:
    claim = part.claim
    return PayloadConflictError(
        f"the rows of shard {claim.shard} of step {claim.step} were sealed before in device memory "
        "alone, which the server does not open, so that it cannot tell whether these are the same: "
        "they stay as they are",
        facts={"step": claim.step, "shard": claim.shard},
    )


def _check_repeat(
    part: Part | None, digest: str, repeated_digest: str, valid_count: int | None
) -> None:
    """Refuse other bytes, or another mask, for rows that were sealed."""
    if part is None or part.repeat is None:
        return
    claim, first = part.claim, part.digest or repeated_digest
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
    _check_mask(part, valid_count)


def _check_mask(part: Part, valid_count: int | None) -> None:
    """Refuse another mask for rows that were sealed: readers divide by what they were told."""
    claim, first = part.claim, part.valid_count
    if valid_count is None or valid_count == first:
        return
    has = "without a loss_mask" if first is None else f"with {first} positions that count"
    raise PayloadConflictError(
        f"the rows of shard {claim.shard} of step {claim.step} were sealed before {has}, and now "
        f"have {valid_count}: what is sealed does not change; give the same loss_mask, or none",
        facts={
            "step": claim.step,
            "shard": claim.shard,
            "valid_count": valid_count,
            "sealed_valid_count": -1 if first is None else first,
        },
    )
