"""What publishers ask for, one implementation for two ways in: RPCs (``registry``) and the
same messages on a broker line (``line``).

Promises: no payload is sealed whose rows do not hold together: ``row_offsets``, ``row_windows``
and ``row_status`` are read back from the slab and compared with what was reserved; one that
differs is refused before any student sees it, and its reservation has ended.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.digest import payload_digest
from teacher_logits.errors import PayloadInvalidError, RequestInvalidError, TeacherLogitsError
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.v1 import registry_service_pb2 as messages
from teacher_logits.wire import check_count
from teacher_logits.wire.payloads import (
    extent_from_wire,
    extent_to_wire,
    payload_from_wire,
)
from teacher_logits.wire.steps import reservation_to_wire
from teacher_logits.wire.transport import part_from_wire
from teacher_logits_server.foreign import check_descriptor
from teacher_logits_server.row_checks import check_filled, check_rows, count_bad_rows
from teacher_logits_server.services.lease_messages import LeaseMessages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.digest import Buffer
    from teacher_logits.payload import Extent
    from teacher_logits.v1 import line_pb2
    from teacher_logits.v1 import teacher_logits_service_pb2 as student_messages
    from teacher_logits_server.foreign import ForeignSlabs
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.lending.rooms import Pinned
    from teacher_logits_server.publishers.drafts import Draft
    from teacher_logits_server.slabs import ServerSlabs

MAX_ROWS = 1 << 20

_log = logging.getLogger(__name__)


class PublisherCalls:
    """What a publisher can ask for besides room and writing.

    Args:
        slabs, foreign: where payloads lie: the server's own slabs, and the publishers'.
    """

    def __init__(self, *, ledger: Ledger, slabs: ServerSlabs, foreign: ForeignSlabs) -> None:
        self._ledger = ledger
        self._slabs = slabs
        self._foreign = foreign
        self.lease_messages = LeaseMessages()

    def put_slab(
        self, session_id: str, request: line_pb2.PutSlabRequest, descriptor: int | None
    ) -> None:
        """Take a publisher's slab in; its descriptor stays the caller's, a copy is kept."""
        slab_id = keys.check_name(request.slab_id, what="slab id")
        if descriptor is None:
            raise RequestInvalidError(
                f"put_slab comes with the descriptor of slab {slab_id}, and none came"
            )
        device = None
        if request.HasField("device"):
            device = part_from_wire(request.device, slab_id=slab_id)
        room = check_descriptor(
            descriptor, slab_id=slab_id, size_bytes=request.size_bytes, device=device
        )
        # In this order: the ledger says when a slab that it knows is to be closed.
        self._foreign.add(slab_id, descriptor)
        try:
            self._ledger.add_foreign_slab(session_id, slab_id, room, device=device)
        except BaseException:
            self._foreign.drop([slab_id])
            raise

    def drop_slab(self, session_id: str, request: line_pb2.DropSlabRequest) -> None:
        """Learn that nothing will be written to a slab any more."""
        self._ledger.drop_foreign_slab(session_id, request.slab_id)

    def reserve(self, request: messages.ReservePayloadRequest) -> messages.ReservePayloadResponse:
        """Claim the rows of one shard of a step; room is another matter."""
        self._ledger.renew(request.session_id)  # who asks comes before what is asked for
        check_count(request.row_positions, MAX_ROWS, field="row_positions")
        payload = payload_from_wire(request.payload)
        reservation = self._ledger.reserve_payload(
            request.session_id,
            request.request_id,
            payload,
            tuple(request.row_positions),
            request.real_rows,
        )
        self.lease_messages.make(reservation.payload_id, payload)
        return reservation_to_wire(reservation)

    def announce(self, session_id: str, request: line_pb2.AnnouncePayloadRequest) -> None:
        """Learn where a payload will lie; its rows are looked at now, but for their status.

        What cannot be sealed so ends its reservation now.
        """
        payload_id, extent = request.payload_id, extent_from_wire(request.extent)
        draft = self._ledger.reserved(session_id, payload_id)
        if draft is None:
            return
        self._ledger.check_place(session_id, payload_id, extent)
        self._check_rows(draft, extent, None)
        self._ledger.announce_payload(
            session_id,
            payload_id,
            extent=extent,
            valid_count=request.valid_count if request.HasField("valid_count") else None,
        )

    def hear_seals(self, session_id: str) -> None:
        """Take in what is sealed of a session's teacher, by its slots, and was not heard of yet.

        Readers to whom it was announced may have read it. Who waits for it is woken: its writer
        may have died between the slot's store and the touch that tells of it.
        """
        for draft in self._ledger.announced(session_id):
            extent, payload = draft.extent, draft.payload
            if extent is None or self._foreign.generation(extent) != extent.generation:
                continue
            try:
                bad = count_bad_rows(payload, partial(self._foreign.read, extent))
                request = messages.SealPayloadRequest(
                    session_id=draft.session_id,
                    payload_id=payload.payload_id,
                    extent=extent_to_wire(extent),
                    bad_row_count=bad,
                    valid_count=draft.valid_count,
                )
                self.seal(request, may_digest=False, is_said=False)
                self._foreign.touch(extent)
            except (TeacherLogitsError, KeyError) as error:  # its slab may go meanwhile
                facts = {**_facts(draft), "error": str(error)}
                _log.warning("seal refused", extra={"facts": facts, "throttle": ""})

    def hear_return(self, request: student_messages.ReleasePayloadRequest) -> None:
        """Learn what a return says of a step that was announced, before it is carried out.

        What is sealed by now comes back as a lease; what is not is told of no more.
        """
        if not self._ledger.was_announced(request.session_id, request.lease_id):
            return
        self.hear_seals(request.session_id)
        if request.unread:
            self._ledger.give_up_announced(request.session_id, request.lease_id)

    def seal(
        self, request: messages.SealPayloadRequest, *, may_digest: bool, is_said: bool = True
    ) -> None:
        """Make a payload readable.

        Args:
            may_digest: whether the caller can wait while all bytes of an older payload are read.
            is_said: by its publisher; else it was seen by its slot.
        """
        session_id, payload_id = request.session_id, request.payload_id
        extent = extent_from_wire(request.extent) if request.HasField("extent") else None
        draft = self._ledger.reserved(session_id, payload_id)
        if draft is not None:  # else it was sealed, or has ended: the ledger says so
            # Nothing is read that is not this publisher's own.
            self._ledger.check_place(session_id, payload_id, extent, host_copy=request.host_copy)
            self._check_rows(draft, extent, request)
        if draft is not None and request.digest:
            self._seal_compared(request, extent, may_digest=may_digest)
        else:
            self._seal(request, extent, is_said=is_said)
        if draft is not None and _log.isEnabledFor(logging.DEBUG):  # its readers wait for us
            _log.debug("payload sealed", extra={"facts": _facts(draft)})

    def abandon(self, request: messages.AbandonPayloadRequest) -> messages.AbandonPayloadResponse:
        """Give a reservation up; twice is fine. What was sealed already stays so."""
        self.hear_seals(request.session_id)
        is_sealed = self._ledger.abandon_payload(request.session_id, request.payload_id)
        return messages.AbandonPayloadResponse(is_sealed=is_sealed)

    def _seal(
        self,
        request: messages.SealPayloadRequest,
        extent: Extent | None,
        repeated_digest: str = "",
        *,
        is_said: bool = True,
    ) -> None:
        self._ledger.seal_payload(
            request.session_id,
            request.payload_id,
            extent=extent,
            bad_row_count=request.bad_row_count,
            valid_count=request.valid_count if request.HasField("valid_count") else None,
            digest=request.digest,
            repeated_digest=repeated_digest,
            host_copy=request.host_copy,
            is_said=is_said,
        )

    def _seal_compared(
        self, request: messages.SealPayloadRequest, extent: Extent | None, *, may_digest: bool
    ) -> None:
        """Seal what brings a digest; that of the same rows sealed before is computed for it."""
        with self._ledger.pin_repeated(request.session_id, request.payload_id) as repeated:
            if repeated is not None and not may_digest:
                raise RequestInvalidError(
                    f"payload {request.payload_id} repeats rows that were sealed before, whose "
                    "bytes have to be read: seal it by the RPC SealPayload, and not over a line",
                    facts={"payload_id": request.payload_id},
                )
            digest = "" if repeated is None else self._digest(repeated)
            self._seal(request, extent, digest)

    def _check_rows(
        self, draft: Draft, extent: Extent | None, request: messages.SealPayloadRequest | None
    ) -> None:
        """Refuse rows that are not as they were reserved; statuses once there is a ``request``."""
        where = draft.extent if extent is None else extent

        def read(offset_bytes: int, size_bytes: int) -> bytes:
            if where is None:
                return b""
            if where is extent:
                return self._foreign.read(where, offset_bytes, size_bytes)
            with self._slabs.room(where) as room:
                return bytes(room[offset_bytes : offset_bytes + size_bytes])

        try:
            if request and extent and self._foreign.is_sparse(extent.slab_id):
                hole = partial(self._foreign.hole, extent)
                check_filled(draft.payload, host_copy=request.host_copy, hole=hole)
            check_rows(
                draft.payload,
                draft.row_positions,
                bad_row_count=None if request is None else request.bad_row_count,
                read=read,
            )
        except KeyError:
            return  # there is no such slab: the ledger says so
        except PayloadInvalidError:
            self._ledger.abandon_payload(draft.session_id, draft.payload.payload_id)
            raise

    def _digest(self, pinned: Pinned) -> str:
        """Return the digest of a payload, by its bytes."""
        slabs = self._slabs if pinned.writer_id == SERVER_WRITER else self._foreign
        with slabs.room(pinned.room) as room:
            return payload_digest(_columns(pinned, room))


def _facts(draft: Draft) -> dict[str, str | int]:
    payload = draft.payload
    facts: dict[str, str | int] = {
        "session_id": draft.session_id,
        "payload_id": payload.payload_id,
        "teacher_id": payload.teacher_id,
        "row_count": payload.row_count,
        "size_bytes": payload.size_bytes,
    }
    if payload.key is not None:
        facts |= {"step": payload.key.step, "shard": payload.key.shard}
    return facts


def _columns(
    pinned: Pinned, room: memoryview
) -> Iterator[tuple[str, str, tuple[int, ...], Buffer]]:
    for column in pinned.payload.columns:
        with room[column.offset_bytes : column.end_bytes] as data:
            yield column.kind.value, column.element_type.value, column.shape, data
