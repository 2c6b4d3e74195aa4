"""Settlements under the ledger's lock: over which transport a session reads each writer.

A base of ``ledger.Ledger``, over ``room``; nothing here is called from outside. A writer that
comes after a session's proofs is settled by them when its first payload is granted. Its device
memory is not among them: students hear of its probe as it comes, and with its settlement, and may
prove that too. Who can read it in no other way is granted nothing until it has said so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.encodings import encoding_of
from teacher_logits.errors import (
    HostCopyNeededError,
    NoCommonTransportError,
    ProducerLostError,
    SessionRefusedError,
)
from teacher_logits.grid import rows_of_rank
from teacher_logits.terms import SERVER_WRITER, StreamTerms
from teacher_logits.transport import Locality, Transport
from teacher_logits_server.admission.stream_codecs import choose_codec
from teacher_logits_server.ledger.room import Room
from teacher_logits_server.lending.registry import Sealed
from teacher_logits_server.lending.shares import Shares
from teacher_logits_server.publishers import Publishers
from teacher_logits_server.publishers.engines import EngineTeachers
from teacher_logits_server.settlement import OF_A_PUBLISHER, Wishes, settle_writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.encodings import Encoding
    from teacher_logits.errors import Fact
    from teacher_logits.payload import Extent, Payload
    from teacher_logits.transport import Settlement
    from teacher_logits_server.lending import Slots
    from teacher_logits_server.lending.leases import Lease
    from teacher_logits_server.limits import Limits
    from teacher_logits_server.publishers.engines import EngineTeacher
    from teacher_logits_server.sessions.session import Session
    from teacher_logits_server.settlement.device_offers import DeviceOffer


class Settling(Room):
    """Writers and how they are read. For its arguments see ``Handshake``."""

    def __init__(
        self,
        *,
        limits: Limits,
        engines: Sequence[EngineTeacher],
        clock: Clock,
        slots: Slots,
        offered: frozenset[Transport],
    ) -> None:
        super().__init__(limits=limits, clock=clock, slots=slots)
        self._offered = offered
        self._engines = EngineTeachers(engines)
        self._publishers = Publishers(engines=self._engines, keep_steps=limits.keep_steps)
        self._lending.shares = Shares(
            {
                each.profile.teacher_id: each.pool_size_bytes
                for each in engines
                if each.pool_size_bytes is not None
            }
        )

    def _offers(self, session: Session) -> dict[str, DeviceOffer]:
        """Return the device memory that the writers of a session's teacher offer, by writer."""
        published = self._publishers.find(session.teacher_id)
        if published is not None:
            return published.offers()
        own = self._lending.own_device
        return {} if own is None else {SERVER_WRITER: own.offer}

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
            rows = rows_of_rank(theirs, published.parts.rank_of(shard), side="teacher")
            if member.writer_id and rows.start < mine.stop and mine.start < rows.stop:
                writers.append(member.writer_id)
        return list(dict.fromkeys(writers))

    def _settle_new(self, session: Session, writers: list[str]) -> dict[str, Settlement]:
        """Settle the writers that a session does not know; return what it is to be told."""
        settlements = {}
        for writer_id in dict.fromkeys(writers):
            if writer_id in session.untold:
                settlements[writer_id] = session.settlements[writer_id]
            elif writer_id not in session.settlements:
                settlements[writer_id] = self._settle(session, writer_id)
        session.settlements |= settlements
        session.untold -= settlements.keys()
        return settlements

    def _settle(self, session: Session, writer_id: str) -> Settlement:
        """Return how a session reads, or writes, a writer's payloads; see ``settle_writer``."""
        wishes, device = OF_A_PUBLISHER, None
        if not session.is_publisher:
            student = session.student
            wishes = Wishes(
                transports=student.transports, locality=student.locality, hints=student.hints
            )
            device = self._offers(session).get(writer_id)
        return settle_writer(
            wishes, session.proof, writer_id=writer_id, offered=self._offered, device=device
        )

    def _stream_terms(self, session: Session) -> StreamTerms:
        """Return what a session's streams are encoded in; a publisher reads none."""
        published = self._publishers.find(session.teacher_id)
        teacher = published or self._engines.find(session.teacher_id)
        if session.is_publisher or teacher is None:
            return StreamTerms()
        return choose_codec(session.student, teacher.profile, is_published=published is not None)

    def _encoding(self, lease: Lease, payload: Payload) -> Encoding | None:
        """Return how a lease's payload is streamed; None for its own bytes, or no stream."""
        is_encoded = lease.streams and not lease.as_object
        return encoding_of(payload, lease.codec) if is_encoded else None

    def _may_try(self, session: Session, writer_id: str) -> bool:
        """Say whether a student may yet prove that it can open a writer's device memory."""
        return (
            not session.is_publisher
            and Transport.CUDA_IPC in self._offered & {*session.student.transports}
            and session.line is not None
            and session.proof.may_try(writer_id)
            and writer_id in self._offers(session)
        )

    def _awaits_proof(self, session: Session) -> bool:
        """Say whether a student can read a writer that came later by its device memory alone, and
        has not said yet whether it can open that."""
        for writer_id in self._needed(session):
            if writer_id in session.settlements or not self._may_try(session, writer_id):
                continue
            try:
                self._settle(session, writer_id)
            except (SessionRefusedError, NoCommonTransportError):
                return True
        return False

    def _reads_device(self, session: Session, sealed: Sealed) -> bool:
        """Say whether a session is to read a payload's columns over positions on the device.

        Raises:
            HostCopyNeededError: they lie there alone, and this reader cannot open that.
            ProducerLostError: they lay there alone, and their writer is gone.
        """
        if not sealed.on_device:
            return False
        if self._is_there(sealed) and _opens_device(session, sealed.writer_id):
            return True
        if sealed.host_copy:
            return False
        raise self._no_copy(session, sealed)

    def _opens_own_device(self, session: Session) -> bool:
        """Say whether what the engine scores for a session lies in device memory."""
        return self._lending.own_device is not None and _opens_device(session, SERVER_WRITER)

    def _sealed(self, payload: Payload, extent: Extent | None, *, host_copy: bool) -> Sealed:
        """Return what the server's own engine has computed, and where it lies."""
        on_device = extent is not None and self._lending.has_device_slab(extent.slab_id)
        return Sealed(
            payload=payload,
            extent=extent,
            on_device=on_device,
            host_copy=host_copy or not on_device,
            stays=extent is None,
        )

    def _is_there(self, sealed: Sealed) -> bool:
        """Say whether the writer of device memory, which goes with it, is there."""
        return not sealed.owner or not self._lending.relays.is_dropped(sealed.room.slab_id)

    def _no_copy(self, session: Session, sealed: Sealed) -> HostCopyNeededError | ProducerLostError:
        """Return the error for what lies in device memory alone, for who cannot read it there."""
        key, writer_id = sealed.payload.key, sealed.writer_id
        what = f"shard {key.shard} of step {key.step}" if key else sealed.payload.payload_id
        facts: dict[str, Fact] = {"writer_id": writer_id}
        if key is not None:
            facts |= {"step": key.step, "shard": key.shard}
        if not self._is_there(sealed):
            return ProducerLostError(
                f"{what} lay in the device memory of writer {writer_id}, which is gone, and "
                "no host copy was made, since no reader needed one",
                facts=facts,
            )
        settlement = session.settlements[writer_id]
        way = "nothing" if settlement.transport is None else settlement.transport.value
        said = [each for each in settlement.refusals if each.transport is Transport.CUDA_IPC]
        why = f" (cuda_ipc {said[0].reason.value}: {said[0].message})" if said else ""
        way_out = (
            "ask for a later step, or have the teacher open its publisher with host_copies='always'"
            if sealed.owner
            else "score the rows in a session that does not read device memory"
        )
        return HostCopyNeededError(
            f"{what} lies in device memory of writer {writer_id} alone: it was sealed while "
            f"every reader could open that, and this one reads by {way}{why}; {way_out}",
            facts={**facts, "transport": way},
        )


def reads_objects(session: Session, writer_id: str) -> bool:
    """Say whether a session has a writer's payloads from an object store."""
    settlement = session.settlements.get(writer_id)
    return settlement is not None and settlement.transport is Transport.RAY_OBJECT


def check_can_come(session: Session, sealed: Sealed) -> None:
    """Refuse a payload that stays elsewhere to who reads neither objects nor streams.

    Raises:
        NoCommonTransportError: naming what the session wants.
    """
    if sealed.extent is not None or reads_objects(session, sealed.writer_id):
        return
    student = session.student
    if Transport.STREAM in student.transports and student.locality is Locality.PREFER:
        return
    wanted = ", ".join(each.value for each in student.transports)
    raise NoCommonTransportError(
        f"payload {sealed.payload.payload_id} lies in the object stores of the nodes that computed "
        f"it, and the session wants {wanted} with locality {student.locality.value!r}: open one "
        "that is settled on 'ray_object', or allow 'stream'",
        facts={"payload_id": sealed.payload.payload_id, "locality": student.locality.value},
    )


def _opens_device(session: Session, writer_id: str) -> bool:
    settlement = session.settlements.get(writer_id)
    return settlement is not None and settlement.transport is Transport.CUDA_IPC
