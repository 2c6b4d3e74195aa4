"""Publishers' own slabs under the ledger's lock, and who needs host copies of device memory.

A base of ``ledger.Ledger``, over ``proving``. What lies in device memory is copied to the host for
readers that cannot open that, or may not be able to: a living student that reads some of the rows
and is not settled on ``cuda_ipc`` with their writer, and whoever is yet to come where no student is
there at all. A student that comes later starts with a later step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import HostCopyNeededError, NotAllowedError
from teacher_logits.grid import rows_of_rank
from teacher_logits.layout import is_on_device
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import Transport
from teacher_logits_server.ledger.proving import Proving

if TYPE_CHECKING:
    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.payload import Payload
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.sessions.session import Session


class Relaying(Proving):
    """What publishers bring. For its arguments see ``Handshake``."""

    def add_foreign_slab(
        self,
        session_id: str,
        slab_id: str,
        size_bytes: int,
        *,
        device: DeviceMemoryPart | None = None,
    ) -> None:
        """Take a slab into use that a publisher writes; ``size_bytes`` is its room for extents.

        ``device`` is what of it lies in device memory, at the same offsets.

        Raises:
            NotAllowedError: the publisher streams, or the id was used before; or the device is
                not the one on which its probe lies.
            LimitReachedError: it has as many slabs as one may have.
            RequestInvalidError: the id is no name.
        """
        with self._step() as now:
            session = self._publisher(session_id, now)
            keys.check_name(slab_id, what="slab id")
            writer_id = self._writer_id(session)
            if writer_id == SERVER_WRITER or self._lending.has_slab(slab_id):
                raise NotAllowedError(
                    f"session {session_id} cannot bring slab {slab_id!r}: it streams, or the id "
                    "is the server's own",
                    facts={"session_id": session_id, "slab_id": slab_id},
                )
            if device is not None:
                self._check_device(session, writer_id, device)
            self._lending.relays.add(
                slab_id, size_bytes, session_id=session_id, writer_id=writer_id, device=device
            )

    def drop_foreign_slab(self, session_id: str, slab_id: str) -> None:
        """Learn that a publisher writes nothing to a slab any more; twice is fine.

        Raises:
            NotAllowedError: it is another publisher's.
        """
        with self._step() as now:
            self._publisher(session_id, now)
            self._lending.relays.drop(slab_id, session_id=session_id)

    def device_part(self, session_id: str, slab_id: str) -> DeviceMemoryPart | None:
        """Return what of a slab lies in device memory, for a session that is to read it there."""
        with self._step():
            session = self._sessions.find(session_id)
            writer_id = self._lending.relays.writer_of(slab_id)
            settlement = session.settlements.get(writer_id or "") if session is not None else None
            if settlement is None or settlement.transport is not Transport.CUDA_IPC:
                return None
            return self._lending.relays.device_of(slab_id)

    # Within

    def _publisher(self, session_id: str, now: float) -> Session:
        """Return a publisher's settled session, and note a sign of life."""
        session = self._hear(session_id, now)
        session.publisher  # noqa: B018 - refuses a student's
        return session

    def _published(self, session: Session) -> Published:
        published = self._publishers.find(session.teacher_id)
        if published is None:
            raise ValueError(f"teacher {session.teacher_id} is not published")
        return published

    def _writer_id(self, session: Session) -> str:
        """Return who writes a publisher's payloads: itself, or the server for it."""
        (writer_id,) = session.settlements
        return writer_id

    def _check_device(self, session: Session, writer_id: str, device: DeviceMemoryPart) -> None:
        offer = self._offers(session).get(writer_id)
        if Transport.CUDA_IPC not in self._offered or offer is None:
            raise NotAllowedError(
                "device memory is for publishers that were opened with a probe, on a server that "
                "has cuda_ipc among its --transports",
                facts={"writer_id": writer_id},
            )
        has, probed = device.memory.device_uuid, offer.probe.memory.device_uuid
        if has != probed:
            raise NotAllowedError(
                f"the slab lies on device {has}, and the publisher's probe on {probed}: open one "
                "publisher a device",
                facts={"device_uuid": has, "probe_device_uuid": probed},
            )

    def _needs_copy(
        self, session: Session, published: Published, payload: Payload, *, now: float
    ) -> bool:
        """Say whether a publisher's payload needs host copies of what lies on its device."""
        writer_id = self._writer_id(session)
        if writer_id not in published.offers():
            return False
        readers = [s for s in map(self._sessions.find, published.steps.seats.sessions()) if s]
        theirs = range(payload.first_row, payload.first_row + payload.row_count)
        return not readers or any(
            self._lacks_device(reader, writer_id, theirs, now=now) for reader in readers
        )

    def _lacks_device(self, reader: Session, writer_id: str, theirs: range, *, now: float) -> bool:
        """Say whether a living reader of some rows may have to read them from the host."""
        settlement = reader.settlements.get(writer_id)
        if settlement is not None and settlement.transport is Transport.CUDA_IPC:
            return False
        if reader.phase.is_leaving or self._sessions.is_over(reader, now=now):
            return False
        student = reader.student
        mine = rows_of_rank(student.batch_grid, student.data_parallel_rank)
        return theirs.start < mine.stop and mine.start < theirs.stop

    def _check_copied(
        self, session: Session, published: Published, payload: Payload, *, now: float
    ) -> None:
        """Refuse what lies in device memory alone where a reader needs it on the host.

        Raises:
            HostCopyNeededError: it does.
        """
        has_some = any(is_on_device(c.kind) and c.size_bytes for c in payload.columns)
        if not has_some or not self._needs_copy(session, published, payload, now=now):
            return
        raise HostCopyNeededError(
            f"payload {payload.payload_id} lies in device memory alone, and not every student that "
            "reads its rows is settled on cuda_ipc: copy its columns to the host twin, and seal it "
            "with host_copy",
            facts={"payload_id": payload.payload_id, "writer_id": self._writer_id(session)},
        )
