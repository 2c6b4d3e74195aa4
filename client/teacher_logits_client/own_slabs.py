"""A publisher's own slabs: it is their one writer, and readers on its node map them.

    reserve   claim over the line -> room in the pool; a new slab is passed over the line, once
    write     slot odd
    announce  place sent ahead, once the rows are described there
    seal      slot even, which is the seal; then it is sent
    freed     mail -> slot odd, and the room is the pool's again

Promises: room is used again only when the server has said that nobody reads it. A full pool
makes ``reserve`` wait for that mail, and not for a clock. Memory is asked for before it is
taken, so that a full machine shows as ``PoolFullError`` and kills nobody. A slab in which
nothing lies makes way for one of another size.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    DeadlinePassedError,
    NotAvailable,
    PoolFullError,
    ServerUnreachableError,
    TeacherLogitsError,
)
from teacher_logits.pool import Growth
from teacher_logits_client.claims import ABANDON_SECONDS, Granted, seconds_until
from teacher_logits_client.line import MAX_RESERVED_ROWS
from teacher_logits_client.publisher_room import Full, Stage, with_holders

if TYPE_CHECKING:
    from teacher_logits.payload import Extent
    from teacher_logits.pool import PoolUsage
    from teacher_logits.slab import WriterSlab
    from teacher_logits.terms import Reservation
    from teacher_logits_client.calls.registry import RegistryCalls
    from teacher_logits_client.claims import Claim, Sealing
    from teacher_logits_client.freed_mail import FreedMail
    from teacher_logits_client.line import Line
    from teacher_logits_client.publisher_room import PublisherRoom
    from teacher_logits_client.slab_maker import SlabMaker

_log = logging.getLogger("teacher_logits_client")

PUT_SLAB_SECONDS = 10.0
"""How long the server may take to accept a slab, or to hear of its end."""


class OwnSlabs:
    """The way of a publisher that shares memory with its readers; see ``claims.Way``.

    Args:
        mail: what the line's mail is put into.
        maker: creates the slabs.
    """

    def __init__(
        self,
        session_id: str,
        *,
        line: Line,
        registry: RegistryCalls,
        mail: FreedMail,
        room: PublisherRoom,
        maker: SlabMaker,
    ) -> None:
        self.line: Line | None = line
        self._line = line
        self._session_id = session_id
        self._registry = registry
        self._mail = mail
        self._maker = maker
        self._room = room
        self._slabs: dict[str, WriterSlab] = {}
        #: Slabs that were ever taken into use.
        self._added = 0
        # Guards the table and the slabs' control pages; nothing waits under it.
        self._lock = threading.Lock()
        # One slab is created at a time. Never wanted by whoever reads the line.
        self._growing = threading.Lock()

    def usage(self) -> PoolUsage:
        """Return where the pool's bytes are."""
        with self._lock:
            self._take_mail()
            return self._room.usage()

    def reserve(self, claim: Claim, *, until: float) -> Granted:
        """Claim rows and wait for room; see ``Way.reserve``."""
        self._room.check_fits(claim.payload.size_bytes)
        reservation = self._claim(claim, until)
        with self._lock:
            self._room.want(claim.step)
        try:
            extent = self._find_room(reservation, claim, until)
        except BaseException:
            self._give_up(reservation.payload_id)
            raise
        finally:
            with self._lock:
                self._room.want_no_more(claim.step)
        room = self._slabs[extent.slab_id].room(extent)[: claim.payload.size_bytes]
        return Granted(reservation=reservation, room=room)

    def announce(self, payload_id: str, valid_count: int | None) -> None:
        """Have readers open ahead what is being written; see ``Way.announce``."""
        with self._lock:
            held = self._room.find(payload_id)
        if held is not None:
            self._line.announce(self._session_id, payload_id, held.extent, valid_count)

    def seal(self, payload_id: str, sealing: Sealing, *, until: float) -> None:
        """Let readers in and say so; see ``Way.seal``."""
        with self._lock:
            self._take_mail()
            extent = self._room.sealing(payload_id)
            if extent is None:
                return  # a try that was not answered was heard, and all have read it since
            slab = self._slabs[extent.slab_id]
            slab.mark(extent.slot, extent.generation)
            slab.touch()
        # The server compares a repeat with all that was sealed before, and not on the line.
        seal = self._registry.seal if sealing.digest else self._line.seal
        try:
            seal(
                self._session_id,
                payload_id,
                extent=extent,
                bad_row_count=sealing.bad_row_count,
                valid_count=sealing.valid_count,
                digest=sealing.digest,
                timeout=seconds_until(until),
            )
        except NotAvailable as error:
            with self._lock:
                if isinstance(error, DeadlinePassedError | ServerUnreachableError):
                    self._room.doubt(payload_id)
                else:
                    self._free(payload_id)
            raise
        except TeacherLogitsError:
            with self._lock:
                self._take_mail()
                if self._room.find(payload_id) is None:
                    return  # it was known by its slot, and all have read it since
                self._free(payload_id)
            raise
        with self._lock:
            self._room.sealed(payload_id)
            self._take_mail()

    def abandon(self, payload_id: str, *, until: float) -> bool:
        """Give a reservation up; room in doubt is so until the answer. See ``Way.abandon``."""
        with self._lock:
            self._take_mail()
            held = self._room.find(payload_id)
            if held is not None and held.stage is Stage.WRITING:
                self._free(payload_id)
        # Its answer wakes whoever waits for room, and so comes after it is free.
        is_sealed = self._line.abandon(self._session_id, payload_id, timeout=seconds_until(until))
        with self._lock:
            if is_sealed:
                self._room.sealed(payload_id)
            elif self._room.find(payload_id) is not None:  # no seal will be taken any more
                self._free(payload_id)
        return is_sealed

    def close(self) -> None:
        """Let go of the line, and of the slabs; see ``Way.close``."""
        self._line.close()
        with self._lock:
            for slab_id, slab in self._slabs.items():
                slab.close(in_use=self._room.is_outstanding(slab_id))
            self._slabs.clear()

    def give_up(self, claim: Claim) -> None:
        """Give up a claim that was not answered; see ``Way.give_up``."""
        until = time.monotonic() + ABANDON_SECONDS
        self.abandon(self._claim(claim, until).payload_id, until=until)

    # Claims

    def _claim(self, claim: Claim, until: float) -> Reservation:
        reserve = (
            self._line.reserve
            if len(claim.row_positions) <= MAX_RESERVED_ROWS
            else self._registry.reserve
        )
        reservation = reserve(
            self._session_id,
            request_id=claim.request_id,
            payload=claim.payload,
            row_positions=claim.row_positions,
            real_rows=claim.real_rows,
            timeout=seconds_until(until),
        )
        with self._lock:
            self._take_mail()
            self._room.note_lowest_open(reservation.lowest_open_step)
        return reservation

    def _give_up(self, payload_id: str) -> None:
        try:
            self.abandon(payload_id, until=time.monotonic() + ABANDON_SECONDS)
        except TeacherLogitsError as error:
            _log.debug("payload %s was not given up: %s", payload_id, error.message)

    # Room

    def _find_room(self, reservation: Reservation, claim: Claim, until: float) -> Extent:
        size = claim.payload.size_bytes
        while True:
            news = self._mail.news
            self._line.drain()
            with self._lock:
                self._take_mail()
                grown = self._added
                answer = self._room.take(reservation.payload_id, step=claim.step, size_bytes=size)
                if not isinstance(answer, Growth | Full):
                    # Readers are kept out before the first byte is written.
                    self._slabs[answer.slab_id].mark(answer.slot, answer.generation - 1)
                    return answer
            if isinstance(answer, Full) and answer.droppable:
                self._drop(answer.droppable)
                continue
            why: PoolFullError | None
            if isinstance(answer, Full):
                why = self._room.full_error(size, step=claim.step, full=answer)
            else:
                why = self._grow(answer.size_bytes, size, since=grown)
            if why is not None and not self._line.wait(partial(self._has_news, news), until):
                raise with_holders(why, self._line.waits_for(self._session_id))

    def _has_news(self, since: object) -> bool:
        return self._mail.news is not since

    def _take_mail(self) -> None:
        while (mail := self._mail.take()) is not None:
            for payload_id in mail.payload_ids:
                self._mark_free(self._room.free(payload_id))
            self._room.note_lowest_open(mail.lowest_open_step)

    def _free(self, payload_id: str) -> None:
        """Free room that the server has not taken."""
        self._mark_free(self._room.free(payload_id))
        # Its step may have been the lowest open one.
        self._room.note_lowest_open(None)
        self._mail.tell()

    def _mark_free(self, extent: Extent | None) -> None:
        slab = self._slabs.get(extent.slab_id) if extent is not None else None
        if slab is not None and extent is not None:
            slab.mark(extent.slot, extent.generation + 1)

    # Slabs

    def _grow(self, usual_bytes: int, least_bytes: int, *, since: int) -> PoolFullError | None:
        """Create a slab and pass it to the server.

        ``since`` is how many there had ever been when its room was missed. Returns why there is no
        memory for it now, while something is held that may be freed.

        Raises:
            PoolFullError: there is no memory for it, and waiting would not help.
        """
        with self._growing:
            if self._added != since:
                return None  # another slab came meanwhile: there may be room
            try:
                slab = self._maker.make(usual_bytes, least_bytes)
            except PoolFullError as full:
                if not self.usage().extent_count:
                    raise
                return full
            try:
                self._line.put_slab(
                    slab.slab_id, slab.total_bytes, slab.fd, timeout=PUT_SLAB_SECONDS
                )
            except BaseException:
                slab.close()
                raise
            with self._lock:
                self._room.add_slab(slab.slab_id, slab.size_bytes)
                self._slabs[slab.slab_id] = slab
                self._added += 1
        return None

    def _drop(self, slab_ids: tuple[str, ...]) -> None:
        for slab_id in slab_ids:
            with self._lock:
                if slab_id not in self._slabs or not self._room.is_idle(slab_id):
                    continue  # somebody has taken room there meanwhile
                self._room.drop_slab(slab_id)
                slab = self._slabs.pop(slab_id)
            slab.close()
            self._line.drop_slab(slab_id, timeout=PUT_SLAB_SECONDS)
