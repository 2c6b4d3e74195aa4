"""Places under the ledger's lock: where a reserved payload lies, by its announcement or its seal.

A base of ``ledger.Ledger``, over ``publishing``.

Promises: a place is looked at before a byte there is read. What was announced is sealed there and
with its count, or not at all. A refused place ends its reservation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import (
    PayloadConflictError,
    PayloadInvalidError,
    TeacherLogitsError,
)
from teacher_logits_server.ledger.publishing import Publishing
from teacher_logits_server.lending.runs import runs_of

if TYPE_CHECKING:
    from teacher_logits.payload import Extent, Payload
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.publishers.drafts import Draft
    from teacher_logits_server.steps.parts import Part


class Placing(Publishing):
    """Where payloads lie. For its arguments see ``Handshake``."""

    def check_place(
        self, session_id: str, payload_id: str, extent: Extent | None, *, host_copy: bool = False
    ) -> None:
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
                self._check_place(draft, extent, host_copy=host_copy)
            except TeacherLogitsError:
                self._end_reservation(published, payload_id)
                raise

    def announce_payload(
        self, session_id: str, payload_id: str, *, extent: Extent, valid_count: int | None
    ) -> None:
        """Learn where a payload will lie, and its count, which its seal will repeat.

        From then on its slot is its seal. Not so where a seal may be refused behind its slot's
        mark: in device memory, until there is a host copy, and where ``keep_steps`` may retire a
        step under its writer. Nothing is learnt of a place there, and its readers are told when
        it is sealed. Nor of a payload that was sealed, or has ended.

        Raises:
            PayloadInvalidError, NotAllowedError: as for ``seal_payload``.
        """
        with self._step() as now:
            published = self._published(self._publisher(session_id, now))
            draft = self._drafts.find(payload_id)
            if draft is None or draft.session_id != session_id or draft.extent is not None:
                return
            if self._is_on_device(extent) or published.steps.keep_steps:
                return
            try:
                _check_counts(draft.payload, bad_row_count=0, valid_count=valid_count)
                self._check_place(draft, extent, host_copy=False)
            except TeacherLogitsError:
                self._end_reservation(published, payload_id)
                raise
            part = published.steps.part_of(payload_id)
            try:
                check_siblings(published, part, valid_count)
            except PayloadConflictError:
                return  # its seal is told
            draft.extent, draft.valid_count = extent, valid_count
            if part is not None and part.announce(valid_count):
                published.steps.changes.decided.append(part.claim.step)
                self._carry_out(published)

    # Within

    def _check_seal(
        self, draft: Draft, extent: Extent | None, bad_row_count: int, valid_count: int | None
    ) -> None:
        """Refuse counts that cannot be, and another place or count than readers were told."""
        _check_counts(draft.payload, bad_row_count=bad_row_count, valid_count=valid_count)
        announced = (draft.extent, draft.valid_count)
        if not draft.streams and draft.extent and announced != (extent, valid_count):
            payload_id = draft.payload.payload_id
            raise PayloadInvalidError(
                f"payload {payload_id} is sealed at {extent} with valid_count {valid_count}, and "
                f"was announced at {draft.extent} with {draft.valid_count}",
                facts={"payload_id": payload_id},
            )

    def _is_on_device(self, extent: Extent | None) -> bool:
        """Say whether a place is in a slab of device memory."""
        return extent is not None and self._lending.relays.device_of(extent.slab_id) is not None

    def _check_place(self, draft: Draft, extent: Extent | None, *, host_copy: bool) -> None:
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
            runs = None
            if self._is_on_device(extent):
                runs = runs_of(extent, payload, host_copy=host_copy)
            self._lending.relays.check_extent(
                extent, payload.size_bytes, session_id=draft.session_id, runs=runs
            )

    def _end_reservation(self, published: Published, payload_id: str) -> None:
        published.steps.abandon(payload_id)
        self._end_draft(payload_id)
        self._carry_out(published)


def check_siblings(published: Published, part: Part | None, valid_count: int | None) -> None:
    """Refuse another count of positions than those have that hold other ids at the same ones.

    Raises:
        PayloadConflictError: naming both counts.
    """
    step = published.steps.find(part.claim.step) if part is not None else None
    if part is not None and step is not None and part.repeat is None:
        step.check_count(part, valid_count)


def _check_counts(payload: Payload, *, bad_row_count: int, valid_count: int | None) -> None:
    for name, count, most in (
        ("bad_row_count", bad_row_count, payload.row_count),
        ("valid_count", valid_count or 0, payload.position_count),
    ):
        if not 0 <= count <= most:
            raise PayloadInvalidError(
                f"{name} of payload {payload.payload_id} is {count}; it can be 0 to {most}",
                facts={name: count, "most": most},
            )
