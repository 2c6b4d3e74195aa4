"""Opener for ``shared_memory``: the writer's slab, mapped here once for the whole session.

    control    shared, read-only     slots with the generations
    extents    private, writable     ``COW``: a page that is written into becomes the reader's
               shared, read-only     ``READ_ONLY``

The bytes move for nobody. Pages that the reader dirtied are dropped when the last lease on
their extent is vacated, so that the next payload there shows as it was written. A slab whose
writer has let it go is unmapped with the last lease on it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from teacher_logits.errors import SlabOpenError
from teacher_logits.slab import CONTROL_BYTES, HEADER_BYTES, check_extent, is_retired, read_header
from teacher_logits.transport import Transport
from teacher_logits_client.config import MapMode
from teacher_logits_client.openers import extent_of, stale
from teacher_logits_client.openers.pages import drop_dirtied

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms

    GetSlab = Callable[[str, float], int]

# Linux numbers, which the standard library of Python 3.10 lacks.
_MAP_NORESERVE = 0x4000
_F_GET_SEALS, _F_SEAL_SHRINK = 1034, 0x2


class ReaderSlab:
    """A slab as its reader has it. Unmapped when the last tensor over it is gone."""

    def __init__(self, slab_id: str, fd: int, mode: MapMode) -> None:
        """Map a slab; the descriptor stays the caller's, and is not needed afterwards.

        Raises:
            SlabOpenError: it cannot be mapped, is no slab, or its writer could shrink it,
                which would kill its readers.
        """
        self.slab_id = slab_id
        try:
            total = os.fstat(fd).st_size
            if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
                raise SlabOpenError(f"slab {slab_id} is not sealed against shrinking")
            self.control = mmap.mmap(fd, CONTROL_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._map = _map(fd, total, mode)
        except (OSError, ValueError) as error:
            raise SlabOpenError(
                f"slab {slab_id} cannot be mapped: {error}", facts={"slab_id": slab_id}
            ) from error
        self.size_bytes = read_header(self.control, slab_id=slab_id, total_bytes=total)
        self._slots = memoryview(self.control)[HEADER_BYTES:].cast("Q")
        self._room = memoryview(self._map)[CONTROL_BYTES:]
        self._address = (
            ctypes.addressof(ctypes.c_char.from_buffer(self._map, CONTROL_BYTES))
            if mode is MapMode.COW
            else None
        )

    def generation(self, slot: int) -> int:
        """Read a slot."""
        return self._slots[slot]

    def room(self, extent: Extent) -> memoryview:
        """Return the extent's bytes."""
        return self._room[extent.offset_bytes : extent.offset_bytes + extent.size_bytes]

    def drop_dirtied(self, extent: Extent) -> int:
        """Drop the reader's own pages of an extent that nobody views; return their bytes."""
        if self._address is None:
            return 0
        return drop_dirtied(self._address + extent.offset_bytes, extent.size_bytes)


class SharedMemoryPayload:
    """A payload in a mapped slab."""

    copied = False

    def __init__(
        self,
        slab: ReaderSlab,
        extent: Extent,
        size_bytes: int,
        done: Callable[[ReaderSlab, Extent], int],
    ) -> None:
        self.buffer = slab.room(extent)[:size_bytes]
        self._slab = slab
        self._extent = extent
        self._done = done

    def is_current(self) -> bool:
        """Say whether the room still holds this payload."""
        return self.generation() == self._extent.generation

    def generation(self) -> int:
        """Return what the payload's slot holds."""
        return self._slab.generation(self._extent.slot)

    def vacate(self) -> int:
        """Drop the pages that were dirtied; return their bytes."""
        return self._done(self._slab, self._extent)


class SharedMemoryOpener:
    """Maps the slabs of one session, each once.

    Args:
        get_slab: returns a slab's descriptor, which the opener closes; called with the
            slab's id and the seconds that it may take.
        mode: ``COW`` or ``READ_ONLY``; for ``COPY`` the caller copies, and maps read-only.
    """

    transport = Transport.SHARED_MEMORY

    def __init__(self, get_slab: GetSlab, *, mode: MapMode = MapMode.COW) -> None:
        self._get_slab = get_slab
        self._mode = mode
        self._slabs: dict[str, ReaderSlab] = {}
        #: Leases open on each extent, by slab and slot: one wipes no edits of another.
        self._readers: Counter[tuple[str, int]] = Counter()
        #: Extents whose dirtied pages are being dropped.
        self._vacating: set[tuple[str, int]] = set()
        self._changed = threading.Condition()

    @property
    def slab_count(self) -> int:
        """Slabs that are mapped."""
        return len(self._slabs)

    def open(self, lease: LeaseTerms, *, until: float) -> SharedMemoryPayload:
        """Return the lease's bytes in the mapped slab. See ``Opener.open``."""
        extent = extent_of(lease, self.transport)
        slab = self._slab(extent.slab_id, until)
        check_extent(extent, size_bytes=slab.size_bytes)
        opened = SharedMemoryPayload(slab, extent, lease.payload.size_bytes, self._done)
        if not opened.is_current():
            raise stale(lease, expected=extent.generation, found=opened.generation())
        place = (extent.slab_id, extent.slot)
        with self._changed:
            # A second lease on a payload whose first is just being vacated.
            self._changed.wait_for(lambda: place not in self._vacating)
            self._readers[place] += 1
        return opened

    def close(self) -> None:
        """Forget all slabs; each is unmapped when no tensor views it any more."""
        with self._changed:
            self._slabs.clear()

    def _slab(self, slab_id: str, until: float) -> ReaderSlab:
        slab = self._slabs.get(slab_id)
        if slab is not None:
            return slab
        fd = self._get_slab(slab_id, until - time.monotonic())
        try:
            slab = ReaderSlab(slab_id, fd, self._mode)
        finally:
            os.close(fd)
        with self._changed:
            self._forget_retired()
            return self._slabs.setdefault(slab_id, slab)

    def _done(self, slab: ReaderSlab, extent: Extent) -> int:
        place = (extent.slab_id, extent.slot)
        with self._changed:
            self._readers[place] -= 1
            if self._readers[place] > 0:
                return 0
            del self._readers[place]
            self._vacating.add(place)
            self._forget_retired()
        try:
            return slab.drop_dirtied(extent)
        finally:
            with self._changed:
                self._vacating.discard(place)
                self._changed.notify_all()

    def _forget_retired(self) -> None:
        in_use = {slab_id for slab_id, _ in self._readers}
        for slab_id, slab in list(self._slabs.items()):
            if slab_id not in in_use and is_retired(slab.control):
                del self._slabs[slab_id]


def _map(fd: int, total: int, mode: MapMode) -> mmap.mmap:
    if mode is MapMode.COW:
        return mmap.mmap(
            fd,
            total,
            flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    return mmap.mmap(fd, total, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
