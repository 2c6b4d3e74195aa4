"""A publisher's slabs, by id: made as its pool asks for room, passed to the server, and dropped.

Each is passed over the line once, when it is made: its descriptor, and where it has device memory
the handle of that. The server keeps both, hands them on, and opens neither.

Promises: one slab is made at a time, and never by whoever reads the line; a slab whose passing
failed is gone again; memory that is not to be had shows as ``PoolFullError`` and kills nobody.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import DeadlinePassedError, PoolFullError, SessionExpiredError
from teacher_logits_client.slabs.claims import seconds_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent
    from teacher_logits.payload_room import WriterRoom
    from teacher_logits_client.line import Line
    from teacher_logits_client.slabs.publisher_room import PublisherRoom

PUT_SLAB_SECONDS = 10.0
"""How long the server may take to accept a slab, or to hear of its end."""


class PublisherSlab(Protocol):
    """A slab as its publisher has it: of the host (``slab_maker``), or of a device."""

    slab_id: str

    @property
    def size_bytes(self) -> int:
        """Room for extents."""

    @property
    def total_bytes(self) -> int:
        """What the descriptor has, the control page included."""

    @property
    def fd(self) -> int:
        """The descriptor; -1 once it is closed."""

    @property
    def device_part(self) -> DeviceMemoryPart | None:
        """What readers open of it on a device; None where it is of the host."""

    def mark(self, slot: int, generation: int) -> None:
        """Write a slot: an odd number bars readers, an even one lets them in."""

    def let_in(self, slot: int, generation: int) -> None:
        """Write an even number, and wake whoever watches the slab."""

    def touch(self) -> None:
        """Wake whoever watches the slab, if it is not closed."""

    def generation(self, slot: int) -> int:
        """Read a slot."""

    def draft_room(self, extent: Extent, size_bytes: int) -> WriterRoom:
        """Return an extent's room, cut to a payload of ``size_bytes``."""

    def copy_to_host(self, extent: Extent, columns: Sequence[Column]) -> None:
        """Copy what lies on a device to where readers without it look; nothing, on the host.

        Raises:
            PoolFullError: the host has no memory for it.
        """

    def close(self, *, in_use: bool = False) -> None:
        """Give the memory back; ``in_use`` where readers may yet open what lies there."""


class MakesSlabs(Protocol):
    """What makes a publisher's slabs. One thread at a time."""

    @property
    def awaits_memory(self) -> bool:
        """Whether memory of slabs that were dropped is yet to come back, from readers."""

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on any thread, when some has."""

    def make(self, usual_bytes: int, least_bytes: int, *, until: float) -> PublisherSlab:
        """Return a new slab of the usual size, or with just enough room.

        Raises:
            PoolFullError: there is no memory for it.
            DeadlinePassedError: a device's driver was not done by ``until``.
        """


class SlabShelf:
    """The slabs of one publisher.

    Args:
        lock: guards the table, the slabs' control pages and the publisher's room; nothing waits
            under it.
    """

    def __init__(
        self, *, line: Line, maker: MakesSlabs, room: PublisherRoom, lock: threading.Lock
    ) -> None:
        self.maker = maker
        #: Slabs that were ever taken into use.
        self.added = 0
        self._line = line
        self._room = room
        self._lock = lock
        self._slabs: dict[str, PublisherSlab] = {}
        self._is_closed = False
        # One slab is made at a time. Never wanted by whoever reads the line.
        self._growing = threading.Lock()

    def __contains__(self, slab_id: str) -> bool:
        return slab_id in self._slabs

    def __getitem__(self, slab_id: str) -> PublisherSlab:
        """Return one in which something lies.

        Raises:
            SessionExpiredError: the publisher was closed meanwhile, by another thread.
        """
        slab = self._slabs.get(slab_id)
        if slab is None:
            raise _closed(slab_id)
        return slab

    def mark(self, extent: Extent, generation: int) -> None:
        """Write an extent's slot; a slab that is gone has nobody to tell. Under the lock."""
        slab = self._slabs.get(extent.slab_id)
        if slab is not None:
            slab.mark(extent.slot, generation)

    def let_in(self, extent: Extent) -> None:
        """Let readers in to an extent, and wake those that wait for it. Under the lock."""
        slab = self._slabs.get(extent.slab_id)
        if slab is not None:
            slab.let_in(extent.slot, extent.generation)

    def grow(
        self, usual_bytes: int, least_bytes: int, *, since: int, until: float
    ) -> PoolFullError | None:
        """Make a slab and pass it to the server.

        ``since`` is how many there had ever been when its room was missed. Returns why there is no
        memory for it now, while something is held that may be freed, or was dropped and is open.

        Raises:
            PoolFullError: there is no memory for it, and waiting would not help.
            DeadlinePassedError: neither it nor another thread's had come by ``until``.
            SessionExpiredError: the publisher was closed meanwhile.
        """
        with _held_by(self._growing, until):
            if self.added != since:
                return None  # another slab came meanwhile: there may be room
            awaits_memory = self.maker.awaits_memory
            try:
                slab = self.maker.make(usual_bytes, least_bytes, until=until)
            except PoolFullError as full:
                with self._lock:
                    holds_some = bool(self._room.usage().extent_count)
                if not (holds_some or awaits_memory):
                    raise
                return full
            self._pass(slab)
            self._take_in(slab, partial(self._room.add_slab, slab.slab_id, slab.size_bytes))
            self.added += 1
        return None

    def register(self, slab: PublisherSlab) -> None:
        """Take in a slab whose extents lie where its owner says; no room of the pool's."""
        self._pass(slab)
        self._take_in(slab, partial(self._room.placed.add, slab.slab_id))

    def drop(self, slab_ids: Sequence[str]) -> None:
        """Drop slabs, but for those in which something lies by now."""
        for slab_id in slab_ids:
            with self._lock:
                if slab_id not in self._slabs or not self._room.is_idle(slab_id):
                    continue  # somebody has taken room there meanwhile
                self._room.drop_slab(slab_id)
                slab = self._slabs.pop(slab_id)
            slab.close()
            self._line.drop_slab(slab_id, timeout=PUT_SLAB_SECONDS)

    def _pass(self, slab: PublisherSlab) -> None:
        try:
            self._line.put_slab(
                slab.slab_id,
                slab.total_bytes,
                slab.fd,
                device=slab.device_part,
                timeout=PUT_SLAB_SECONDS,
            )
        except BaseException:
            slab.close()
            raise

    def _take_in(self, slab: PublisherSlab, enter: Callable[[], None]) -> None:
        """Take a slab in that was passed; what came behind ``close`` would be nobody's to close."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                enter()
                self._slabs[slab.slab_id] = slab
        if is_closed:
            slab.close()
            raise _closed(slab.slab_id)

    def close(self) -> frozenset[str]:
        """Let go of all of them; return those that somebody reads, or may yet.

        Not under the lock, since a device may have to be waited for.
        """
        with self._lock:
            self._is_closed = True
            in_use = {each: self._room.is_outstanding(each) for each in self._slabs}
            slabs = list(self._slabs.values())
            self._slabs.clear()
        for slab in slabs:
            slab.close(in_use=in_use[slab.slab_id])
        return frozenset(slab_id for slab_id, is_used in in_use.items() if is_used)


@contextmanager
def _held_by(growing: threading.Lock, until: float) -> Iterator[None]:
    """Hold a lock that another thread has while it makes a slab."""
    if not growing.acquire(timeout=min(seconds_until(until), threading.TIMEOUT_MAX)):
        raise DeadlinePassedError(
            "a slab that another thread makes had not come when the deadline passed: the system or "
            "a device's driver is slow, or the server does not answer"
        )
    try:
        yield
    finally:
        growing.release()


def _closed(slab_id: str) -> SessionExpiredError:
    return SessionExpiredError(
        "the publisher was closed meanwhile, by another thread, and its slabs with it: open a new "
        "one, and close it when nobody writes any more",
        facts={"slab_id": slab_id},
    )
