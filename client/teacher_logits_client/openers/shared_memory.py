"""Opener for ``shared_memory``: the writer's slab, mapped here once for the whole session.

    control    shared, read-only     slots with the generations
    extents    private, writable     ``COW``: a page that is written into becomes the reader's
               shared, read-only     ``READ_ONLY``

The bytes move for nobody. Every lease shows what the writer wrote, whoever writes into
another: pages that the reader dirtied are dropped when their lease is vacated, and a lease on
room that another has in the slab's map gets a private map of its own. A slab whose writer
has let it go, or that the server says is gone, is unmapped with the last lease on it.

Any thread may open. A slab is asked for by one of them at a time; the others wait for it, each
no longer than its own deadline, and then try themselves.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import DeadlinePassedError, SlabOpenError
from teacher_logits.slab import CONTROL_BYTES, HEADER_BYTES, check_extent, is_retired, read_header
from teacher_logits.transport import Transport
from teacher_logits_client.config import MapMode
from teacher_logits_client.openers import extent_of, stale, taken_back
from teacher_logits_client.openers.pages import drop_dirtied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms

    GetSlab = Callable[[str, float], int]
    _Place = tuple[str, int]

# Linux numbers, which the standard library of Python 3.10 lacks.
_MAP_NORESERVE, _F_GET_SEALS, _F_SEAL_SHRINK = 0x4000, 1034, 0x2


class Room:
    """Bytes of a map. ``address`` is where they are, None in a map that cannot be written to."""

    def __init__(self, view: memoryview, address: int | None) -> None:
        self.view = view
        self._address = address

    def part(self, offset: int, size: int) -> Room:
        """Return ``size`` bytes of it."""
        address = None if self._address is None else self._address + offset
        return Room(self.view[offset : offset + size], address)

    def drop_dirtied(self) -> int:
        """Drop the reader's own pages of room that nobody views; return their bytes."""
        return 0 if self._address is None else drop_dirtied(self._address, len(self.view))


class ReaderSlab:
    """A slab as its reader has it. Unmapped when the last tensor over it is gone."""

    def __init__(self, slab_id: str, fd: int, mode: MapMode) -> None:
        """Map a slab, and take over its descriptor; that stays the caller's after an error.

        Raises:
            SlabOpenError: it cannot be mapped, is no slab, or its writer could shrink it,
                which would kill its readers.
        """
        self.slab_id = slab_id
        self._fd = fd
        self.is_writable = mode is MapMode.COW
        try:
            total = os.fstat(fd).st_size
            if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
                raise SlabOpenError(f"slab {slab_id} is not sealed against shrinking")
            self.control = mmap.mmap(fd, CONTROL_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise _unmappable(slab_id, error) from error
        whole = self._map(0, total)
        self.size_bytes = read_header(self.control, slab_id=slab_id, total_bytes=total)
        self._slots = memoryview(self.control)[HEADER_BYTES:].cast("Q")
        self._room = whole.part(CONTROL_BYTES, self.size_bytes)
        weakref.finalize(self, os.close, fd).atexit = False

    def generation(self, slot: int) -> int:
        """Read a slot."""
        return self._slots[slot]

    def room(self, extent: Extent) -> Room:
        """Return the extent in the slab's map."""
        return self._room.part(extent.offset_bytes, extent.size_bytes)

    def own_room(self, extent: Extent) -> Room:
        """Return the extent in a new map of its own, unmapped with the last view of it.

        Raises:
            SlabOpenError: it cannot be mapped.
        """
        return self._map(CONTROL_BYTES + extent.offset_bytes, extent.size_bytes)

    def _map(self, offset: int, size: int) -> Room:
        try:
            if not self.is_writable:
                flags, prot = mmap.MAP_SHARED, mmap.PROT_READ
            else:
                flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
                prot = mmap.PROT_READ | mmap.PROT_WRITE
            memory = mmap.mmap(self._fd, size, flags=flags, prot=prot, offset=offset)
        except (OSError, ValueError) as error:
            raise _unmappable(self.slab_id, error) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if self.is_writable else None
        return Room(memoryview(memory), address)


def _unmappable(slab_id: str, error: Exception) -> SlabOpenError:
    return SlabOpenError(f"slab {slab_id} cannot be mapped: {error}", facts={"slab_id": slab_id})


class SharedMemoryPayload:
    """A payload in a mapped slab."""

    copied = False

    def __init__(
        self,
        slab: ReaderSlab,
        lease: LeaseTerms,
        extent: Extent,
        *,
        room: Room,
        vacate: Callable[[], int],
        is_revoked: Callable[[], bool],
    ) -> None:
        self.buffer = room.view[: lease.payload.size_bytes]
        self._slab = slab
        self._extent = extent
        self._vacate = vacate
        self._is_revoked = is_revoked

    def is_current(self) -> bool:
        """Say whether the room still holds this payload, and will while the lease is open."""
        current = self._slab.generation(self._extent.slot) == self._extent.generation
        return current and not self._is_revoked()

    def vacate(self) -> int:
        """Drop the pages that were dirtied; return their bytes."""
        return self._vacate()


class SharedMemoryOpener:
    """Maps the slabs of one session, each once.

    Args:
        get_slab: returns a slab's descriptor, which the opener closes; called with the
            slab's id and the seconds that it may take.
        mode: ``COW`` or ``READ_ONLY``; for ``COPY`` the caller copies, and maps read-only.
        is_revoked: whether a lease was taken back by force, whatever its room holds.
    """

    transport = Transport.SHARED_MEMORY

    def __init__(
        self,
        get_slab: GetSlab,
        *,
        mode: MapMode = MapMode.COW,
        is_revoked: Callable[[str], bool] = lambda lease_id: False,
    ) -> None:
        self._get_slab = get_slab
        self._is_revoked = is_revoked
        self._mode = mode
        self._slabs: dict[str, ReaderSlab] = {}
        #: Slabs that some thread is asking for.
        self._asked: set[str] = set()
        #: Slabs of which the server has said that nothing will lie there again.
        self._gone: set[str] = set()
        #: Leases on each slab that are not vacated.
        self._leases: Counter[str] = Counter()
        #: Extents, by slab and slot, that a lease has in their slab's map until it is vacated.
        self._taken: set[_Place] = set()
        # Held by the lock's own `with`, in which no signal handler of Python's runs: a
        # KeyboardInterrupt on the way out of a Condition's leaves it locked for ever.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def slab_count(self) -> int:
        """Slabs that are mapped."""
        return len(self._slabs)

    def has(self, slab_id: str) -> bool:
        """Say whether a slab is mapped."""
        return slab_id in self._slabs

    def open(self, lease: LeaseTerms, *, until: float) -> SharedMemoryPayload:
        """Return the lease's bytes in the mapped slab. See ``Opener.open``."""
        extent = extent_of(lease, self.transport)
        slab = self._slab(extent.slab_id, until)
        check_extent(extent, size_bytes=slab.size_bytes)
        found = slab.generation(extent.slot)
        if found != extent.generation:
            raise stale(lease, expected=extent.generation, found=found)
        if self._is_revoked(lease.lease_id):
            raise taken_back(lease)
        place = (extent.slab_id, extent.slot)
        with self._lock:
            shares = not slab.is_writable or place not in self._taken
            room = slab.room(extent) if shares else slab.own_room(extent)
            self._leases[extent.slab_id] += 1
            if shares:
                self._taken.add(place)
        return SharedMemoryPayload(
            slab,
            lease,
            extent,
            room=room,
            vacate=partial(self._vacated, room, place, shares=shares),
            is_revoked=partial(self._is_revoked, lease.lease_id),
        )

    def forget(self, slab_ids: Collection[str]) -> None:
        """Let go of slabs that are gone, as soon as no lease is on them."""
        with self._lock:
            self._gone |= {each for each in slab_ids if each in self._slabs or each in self._asked}
            self._forget_retired()

    def close(self) -> None:
        """Forget all slabs; each is unmapped when no tensor views it any more."""
        with self._lock:
            self._slabs.clear()

    def _slab(self, slab_id: str, until: float) -> ReaderSlab:
        mine = False
        try:
            with self._lock:
                while slab_id not in self._slabs and slab_id in self._asked:
                    self._wait_for_slab(slab_id, until)
                if slab_id in self._slabs:
                    return self._slabs[slab_id]
                mine = True
                self._asked.add(slab_id)
            slab = self._ask(slab_id, until)
            with self._lock:
                self._forget_retired()
                self._slabs[slab_id] = slab
            return slab
        finally:
            if mine:
                with self._lock:
                    self._asked.discard(slab_id)
                    self._changed.notify_all()

    def _wait_for_slab(self, slab_id: str, until: float) -> None:
        left = min(until - time.monotonic(), threading.TIMEOUT_MAX)
        if left <= 0:
            raise DeadlinePassedError(
                f"slab {slab_id}, which another thread asks for, had not come when the deadline "
                "passed: the server is stopped, or gone",
                facts={"slab_id": slab_id},
            )
        self._changed.wait(left)

    def _ask(self, slab_id: str, until: float) -> ReaderSlab:
        fd = self._get_slab(slab_id, until - time.monotonic())
        try:
            return ReaderSlab(slab_id, fd, self._mode)
        except BaseException:
            os.close(fd)
            raise

    def _vacated(self, room: Room, place: _Place, *, shares: bool) -> int:
        try:
            dropped = room.drop_dirtied()
        except OSError:
            if shares:
                raise  # and the place stays taken: what is leased there next is mapped anew
            dropped = 0  # this map is nobody else's, and goes
        slab_id, _ = place
        with self._lock:
            if shares:
                self._taken.discard(place)
            self._leases[slab_id] -= 1
            if not self._leases[slab_id]:
                del self._leases[slab_id]
            self._forget_retired()
        return dropped

    def _forget_retired(self) -> None:
        for slab_id, slab in list(self._slabs.items()):
            is_gone = slab_id in self._gone or is_retired(slab.control)
            if is_gone and slab_id not in self._leases:
                del self._slabs[slab_id]
                self._gone.discard(slab_id)
