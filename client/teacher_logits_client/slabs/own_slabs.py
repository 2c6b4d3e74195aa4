"""A publisher's own slabs: it is their one writer, and readers on its node map them.

    reserve   claim over the line -> room in the pool; a new slab is passed over the line, once
    write     slot odd
    announce  place sent ahead, once the rows are described there; not on a device
    seal      copied to the host, where a reader needs that; slot even, which is the seal; then it
              is sent
    freed     mail -> slot odd, and the room is the pool's again

Promises: room is used again only when the server has said that nobody reads it. A full pool
makes ``reserve`` wait for that mail, and not for a clock. Memory is asked for before it is
taken, so that a full machine shows as ``PoolFullError`` and kills nobody. A slab in which
nothing lies makes way for one of another size.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    DeadlinePassedError,
    HostCopyNeededError,
    NotAvailable,
    ServerUnreachableError,
    TeacherLogitsError,
)
from teacher_logits_client.config import HostCopies
from teacher_logits_client.line import MAX_RESERVED_ROWS
from teacher_logits_client.slabs.claims import ABANDON_SECONDS, Granted, seconds_until
from teacher_logits_client.slabs.own_memory import OwnMemory
from teacher_logits_client.slabs.own_room import OwnRoom
from teacher_logits_client.slabs.publisher_room import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.devices.probe import Probe
    from teacher_logits.pool import PoolUsage
    from teacher_logits.terms import Reservation
    from teacher_logits_client.calls.registry import RegistryCalls
    from teacher_logits_client.line import Line
    from teacher_logits_client.slabs.claims import Claim, Sealing
    from teacher_logits_client.slabs.freed_mail import FreedMail
    from teacher_logits_client.slabs.placed_columns import Registered
    from teacher_logits_client.slabs.publisher_room import Held, PublisherRoom
    from teacher_logits_client.slabs.slab_shelf import MakesSlabs

_log = logging.getLogger("teacher_logits_client")


class OwnSlabs:
    """The way of a publisher that shares memory with its readers; see ``claims.Way``.

    Args:
        mail: what the line's mail is put into.
        maker: makes the slabs, of the host or of a device.
        host_copies: when what lies on a device is copied to the host as well.
        probe: what readers of a device open on trial; its process keeps it.
    """

    def __init__(
        self,
        session_id: str,
        *,
        line: Line,
        registry: RegistryCalls,
        mail: FreedMail,
        room: PublisherRoom,
        maker: MakesSlabs,
        host_copies: HostCopies = HostCopies.AS_NEEDED,
        probe: Probe | None = None,
    ) -> None:
        self.line: Line | None = line
        self._line = line
        self._session_id = session_id
        self._registry = registry
        self._copies = host_copies
        self.probe = probe
        self.room = OwnRoom(session_id, line=line, mail=mail, table=room, maker=maker)
        self._table = room
        self.memory = OwnMemory(self.room)

    @property
    def registered(self) -> Mapping[str, Registered]:
        """Memory that its owner registered, by slab."""
        return self.memory.registered

    def usage(self) -> PoolUsage:
        """Return where the pool's bytes are."""
        with self.room.lock:
            self.room.take_mail()
            return self._table.usage()

    def reserve(self, claim: Claim, *, until: float) -> Granted:
        """Claim rows and wait for room; see ``Way.reserve``."""
        if claim.place is None:
            self._table.check_fits(claim.payload.size_bytes)
        reservation = self._claim(claim, until)
        try:
            extent = self.room.find(reservation.payload_id, claim, until=until)
        except BaseException:
            self._give_up(reservation.payload_id)  # its answer wakes a step that left us room
            raise
        if reservation.host_copy or self._copies is HostCopies.ALWAYS:
            with self.room.lock:
                self._table.want_copy(reservation.payload_id)
        slab = self.room.shelf[extent.slab_id]
        return Granted(
            reservation=reservation,
            room=slab.draft_room(extent, claim.payload.size_bytes),
            is_written=claim.place is not None,
            rouse=slab.touch,
        )

    def announce(self, payload_id: str, valid_count: int | None) -> None:
        """Have readers open ahead what is being written; see ``Way.announce``.

        The server takes no announcement of device memory (``Ledger.announce_payload``).
        """
        with self.room.lock:
            held = self._table.find(payload_id)
        if held is not None and self.room.shelf[held.extent.slab_id].device_part is None:
            self._line.announce(self._session_id, payload_id, held.extent, valid_count)

    def seal(self, payload_id: str, sealing: Sealing, *, until: float) -> None:
        """Let readers in and say so; see ``Way.seal``."""
        try:
            with self.room.lock:
                held = self._table.sealing(payload_id)
                if held is not None and not held.wants_copy:
                    self.room.shelf.let_in(held.extent)  # before all else: readers wait for it
                self.room.take_mail()
                if held is None or self._table.find(payload_id) is None:
                    return  # a try that was not answered was heard, and all have read it since
            try:
                self._say(payload_id, sealing, held, until)
            except HostCopyNeededError:  # a reader came that cannot open a device's memory
                if held.wants_copy:
                    raise
                held.wants_copy = True
                self._say(payload_id, sealing, held, until)
        except NotAvailable as error:
            with self.room.lock:
                if isinstance(error, DeadlinePassedError | ServerUnreachableError):
                    self._table.doubt(payload_id)
                else:
                    self.room.free(payload_id)
            raise
        except TeacherLogitsError:
            if self._was_read(payload_id):
                return
            raise
        except BaseException:  # an interrupt: the seal may be on its way
            with self.room.lock:
                self._table.doubt(payload_id)
            raise
        with self.room.lock:
            self._table.sealed(payload_id)
            self.room.take_mail()

    def _was_read(self, payload_id: str) -> bool:
        """Free room whose seal was refused; True where it is free: its slot told of it before."""
        with self.room.lock:
            self.room.take_mail()
            was_read = self._table.find(payload_id) is None
            self.room.free(payload_id)
        return was_read

    def _say(self, payload_id: str, sealing: Sealing, held: Held, until: float) -> None:
        """Tell the server; where some reader wants a copy all are let in here, behind it."""
        if held.wants_copy:
            self.room.shelf[held.extent.slab_id].copy_to_host(held.extent, sealing.columns)
            with self.room.lock:
                if self._table.find(payload_id) is None:
                    return  # likewise, meanwhile
                self.room.shelf.let_in(held.extent)
        # The server compares a repeat with all that was sealed before, and not on the line.
        seal = self._registry.seal if sealing.digest else self._line.seal
        seal(
            self._session_id,
            payload_id,
            extent=held.extent,
            bad_row_count=sealing.bad_row_count,
            valid_count=sealing.valid_count,
            digest=sealing.digest,
            host_copy=held.wants_copy,
            timeout=seconds_until(until),
        )

    def abandon(self, payload_id: str, *, until: float) -> bool:
        """Give a reservation up; room in doubt is so until the answer. See ``Way.abandon``."""
        with self.room.lock:
            self.room.take_mail()
            held = self._table.find(payload_id)
            if held is not None and held.stage is Stage.WRITING:
                self.room.free(payload_id)
        # Its answer wakes whoever waits for room, and so comes after it is free.
        is_sealed = self._line.abandon(self._session_id, payload_id, timeout=seconds_until(until))
        with self.room.lock:
            if is_sealed:
                self._table.sealed(payload_id)
            elif self._table.find(payload_id) is not None:  # no seal will be taken any more
                self.room.free(payload_id)
        return is_sealed

    def close(self) -> None:
        """Let go of the line, and of the slabs; see ``Way.close``."""
        self.room.drain()
        self.memory.closing()
        self._line.close()
        self.memory.closed(self.room.shelf.close())

    def wait_free(self, *, until: float, but_copied: bool = False) -> None:
        """Wait until nobody reads what was sealed; see ``Way.wait_free``."""
        is_on_host = self.probe is None
        if not (but_copied and is_on_host):
            self.room.wait_free(until=until, but_copied=but_copied)

    def give_up(self, claim: Claim) -> None:
        """Give up a claim that was not answered; see ``Way.give_up``."""
        until = time.monotonic() + ABANDON_SECONDS
        self.abandon(self._claim(claim, until).payload_id, until=until)

    # Claims

    def _claim(self, claim: Claim, until: float) -> Reservation:
        fits = len(claim.row_positions) <= MAX_RESERVED_ROWS
        reserve = self._line.reserve if fits else self._registry.reserve
        reservation = reserve(
            self._session_id,
            request_id=claim.request_id,
            payload=claim.payload,
            row_positions=claim.row_positions,
            real_rows=claim.real_rows,
            timeout=seconds_until(until),
        )
        with self.room.lock:
            self.room.take_mail()
            self._table.note_lowest_open(reservation.lowest_open_step)
        return reservation

    def _give_up(self, payload_id: str) -> None:
        try:
            self.abandon(payload_id, until=time.monotonic() + ABANDON_SECONDS)
        except TeacherLogitsError as error:
            _log.debug("payload %s was not given up: %s", payload_id, error.message)
