"""The room of a publisher's own slabs, carried out: what is free is marked, and waited for.

``publisher_room`` decides; the line's mail says what nobody reads any more; ``slab_shelf`` makes
slabs. Whatever changes the room is under one lock, which nobody waits under.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import DeadlinePassedError, PoolFullError, TeacherLogitsError
from teacher_logits.payload import Extent
from teacher_logits.pool import Growth
from teacher_logits_client.slabs.publisher_room import Full, with_holders
from teacher_logits_client.slabs.slab_shelf import SlabShelf

if TYPE_CHECKING:
    from teacher_logits_client.line import Line
    from teacher_logits_client.slabs.claims import Claim
    from teacher_logits_client.slabs.freed_mail import FreedMail
    from teacher_logits_client.slabs.publisher_room import PublisherRoom
    from teacher_logits_client.slabs.slab_shelf import MakesSlabs


class OwnRoom:
    """The room of one publisher. ``lock`` guards ``table``, the slabs and their control pages."""

    def __init__(
        self,
        session_id: str,
        *,
        line: Line,
        mail: FreedMail,
        table: PublisherRoom,
        maker: MakesSlabs,
    ) -> None:
        self.lock = threading.Lock()
        self.table = table
        self.shelf = SlabShelf(line=line, maker=maker, room=table, lock=self.lock)
        self._session_id = session_id
        self._line = line
        self._mail = mail
        maker.on_freed(self._memory_freed)

    def find(self, payload_id: str, claim: Claim, *, until: float) -> Extent:
        """Return room for a claim, and bar readers from it; higher steps leave it room meanwhile.

        Raises:
            PoolFullError: none came free in time, with what it waits for.
        """
        with self.lock:
            self.table.want(claim.step)
        try:
            return self._wait_for_room(payload_id, claim, until)
        finally:
            with self.lock:
                self.table.want_no_more(claim.step)
                self._mail.tell()

    def _wait_for_room(self, payload_id: str, claim: Claim, until: float) -> Extent:
        size = claim.payload.size_bytes
        while True:
            news = self._mail.news
            self._line.drain()
            with self.lock:
                self.take_mail()
                grown = self.shelf.added
                answer = self.table.take(
                    payload_id, step=claim.step, size_bytes=size, place=claim.place
                )
                if isinstance(answer, Extent):
                    # Readers are kept out before the first byte is written.
                    self.shelf.mark(answer, answer.generation - 1)
                    return answer
            if isinstance(answer, Full) and answer.droppable:
                self.shelf.drop(answer.droppable)
                continue
            why: PoolFullError | None
            if isinstance(answer, Growth):
                why = self._grow(answer.size_bytes, size, since=grown, until=until)
                if why is not None:
                    with self.lock:
                        self.table.note_growth(has_memory=False)
            else:
                why = self.table.full_error(size, step=claim.step, full=answer, place=claim.place)
            if why is not None and not self._line.wait(partial(self._has_news, news), until):
                raise with_holders(why, self._line.waits_for(self._session_id))

    def _grow(
        self, usual_bytes: int, least_bytes: int, *, since: int, until: float
    ) -> PoolFullError | None:
        try:
            return self.shelf.grow(usual_bytes, least_bytes, since=since, until=until)
        except DeadlinePassedError as late:  # the claim was answered, and is given up by now
            raise PoolFullError(late.message, facts=late.facts) from late

    def wait_free(
        self, slab_id: str | None = None, *, until: float, but_copied: bool = False
    ) -> None:
        """Wait until nobody reads what lies in a slab, or in any of them.

        With ``but_copied`` what the host has a copy of is not waited for, all slabs together.

        Raises:
            DeadlinePassedError: somebody does, with whom it waits for.
        """
        what = "what was published" if slab_id is None else f"what lies in slab {slab_id}"
        while True:
            news = self._mail.news
            self._line.drain()
            with self.lock:
                self.take_mail()
                if slab_id is not None:
                    is_free = self.table.is_idle(slab_id)
                else:
                    is_free = self.table.is_free(but_copied=but_copied)
                if is_free:
                    return
            if not self._line.wait(partial(self._has_news, news), until):
                who = self._line.waits_for(self._session_id) or "nobody is named"
                raise DeadlinePassedError(
                    f"{what} is still read ({who}): wait longer, or have students return their "
                    "leases",
                    facts={"slab_id": slab_id or ""},
                )

    def drain(self) -> None:
        """Free what the line has said by now that nobody reads."""
        with suppress(TeacherLogitsError):  # a forked child, which owns none of it
            self._line.drain()
        with self.lock:
            self.take_mail()

    def take_mail(self) -> None:
        """Free what the server says that nobody reads. Under the lock."""
        while (mail := self._mail.oldest) is not None:
            for payload_id in mail.payload_ids:
                self._mark_free(self.table.free(payload_id))
            self.table.note_lowest_open(mail.lowest_open_step)
            self._mail.drop_oldest()

    def free(self, payload_id: str) -> None:
        """Free room that the server has not taken. Under the lock."""
        self._mark_free(self.table.free(payload_id))
        # Its step may have been the lowest open one.
        self.table.note_lowest_open(None)
        self._mail.tell()

    def _mark_free(self, extent: Extent | None) -> None:
        if extent is not None:
            self.shelf.mark(extent, extent.generation + 1)

    def _memory_freed(self) -> None:
        """Have whoever waits for room look again; never under the lock."""
        with self.lock:
            self.table.note_growth(has_memory=True)
            self._mail.tell()
        self._line.wake()

    def _has_news(self, since: object) -> bool:
        return self._mail.news is not since
