"""Maps of host slabs: the pages of a writer's slab as its reader has them.

    control    shared, read-only     slots with the generations
    extents    private, writable     ``COW``: a page that is written into becomes the reader's
               shared, read-only     ``READ_ONLY``, ``PINNED``

Pinned pages are those of a shared map, and of no private one: to pin a private page breaks it
off, and it shows what is stale from then on. A slab is pinned once, and for as long as anything
views it. The twin of a device slab is never pinned, since that would fill its holes.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from teacher_logits.device_memory import DeviceError
from teacher_logits.errors import SlabOpenError
from teacher_logits.slab import CONTROL_BYTES, HEADER_BYTES, fence, is_sparse, read_header
from teacher_logits_client.config import MapMode
from teacher_logits_client.forks import Home
from teacher_logits_client.openers.pages import drop_dirtied

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits.payload import Extent
    from teacher_logits_client.line import PassedSlab

    Watch = Callable[[int], Callable[[], None]]

_log = logging.getLogger("teacher_logits_client")

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
    """A slab as its reader has it. Unmapped when the last tensor over it is gone.

    ``is_twin``: it is the host part of a device slab, whose other part is ``device``, as far as
    that was passed.
    """

    def __init__(self, slab_id: str, passed: PassedSlab, mode: MapMode) -> None:
        """Map a slab, and take over its descriptor, which is closed after an error too.

        Raises:
            SlabOpenError: it cannot be mapped, is no slab, or its writer could shrink it,
                which would kill its readers.
        """
        self.descriptor = fd = passed.descriptor
        close = weakref.finalize(self, os.close, fd)  # once, whatever is interrupted
        close.atexit = False
        self.slab_id = slab_id
        self.device = passed.device
        self.is_writable = mode is MapMode.COW
        self._unwatch: Callable[[], None] | None = None
        self._watching = threading.Lock()
        try:
            self._open()
        except BaseException:
            close()
            raise

    def _open(self) -> None:
        fd, slab_id = self.descriptor, self.slab_id
        try:
            total = os.fstat(fd).st_size
            if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
                raise SlabOpenError(f"slab {slab_id} is not sealed against shrinking")
            self.control = mmap.mmap(fd, CONTROL_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise _unmappable(slab_id, error) from error
        self.size_bytes = read_header(self.control, slab_id=slab_id, total_bytes=total)
        self.is_twin = is_sparse(self.control)
        self._slots = memoryview(self.control)[HEADER_BYTES:].cast("Q")
        self._pages = self._map(0, total)
        self._room = self._room_of(self._pages).part(CONTROL_BYTES, self.size_bytes)

    def pin(self, pinner: DeviceMemory) -> ReaderSlab:
        """Have its pages pinned until it is unmapped, and return it.

        Raises:
            DeviceError: the driver does not pin them.
        """
        self._pages.pin(pinner)
        return self

    def watch(self, watch: Watch) -> None:
        """Have whoever waits woken when the writer has sealed something; once is enough.

        Raises:
            SlabOpenError: its file cannot be watched.
        """
        with self._watching:
            self._unwatch = self._unwatch or watch(self.descriptor)

    def let_go(self) -> None:
        """Watch it no more: it is forgotten, and unmapped with the last tensor over it."""
        with self._watching:
            unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()

    def holds(self, extent: Extent) -> bool:
        """Say whether an extent may be read, in its generation."""
        held = self._slots[extent.slot] == extent.generation
        fence()
        return held

    def generation(self, slot: int) -> int:
        """Read a slot, after whatever of its extent was read, and before whatever will be."""
        fence()
        generation = self._slots[slot]
        fence()
        return generation

    def room(self, extent: Extent) -> Room:
        """Return the extent in the slab's map."""
        return self._room.part(extent.offset_bytes, extent.size_bytes)

    def own_room(self, extent: Extent) -> Room:
        """Return the extent in a new map of its own, unmapped with the last view of it.

        Raises:
            SlabOpenError: it cannot be mapped.
        """
        return self._room_of(self._map(CONTROL_BYTES + extent.offset_bytes, extent.size_bytes))

    def _map(self, offset: int, size: int) -> _Map:
        try:
            if not self.is_writable:
                flags, prot = mmap.MAP_SHARED, mmap.PROT_READ
            else:
                flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
                prot = mmap.PROT_READ | mmap.PROT_WRITE
            return _Map(self.descriptor, size, flags=flags, prot=prot, offset=offset)
        except (OSError, ValueError) as error:
            raise _unmappable(self.slab_id, error) from error

    def _room_of(self, memory: _Map) -> Room:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if self.is_writable else None
        return Room(memoryview(memory), address)


class _Map(mmap.mmap):
    """A map; what was pinned of it is until it goes: ``__del__`` comes before it is unmapped."""

    _pinner: DeviceMemory | None = None

    def pin(self, pinner: DeviceMemory) -> None:
        """Pin all of it."""
        self._home = Home()
        self._address = _address_of(self)
        pinner.pin(self._address, len(self))
        self._pinner = pinner

    def __del__(self) -> None:
        # A fork's copy is not pinned, and the end of the process unpins what is left.
        if self._pinner is None or not self._home.is_here:
            return
        try:
            self._pinner.unpin(self._address)
        except DeviceError as error:
            _log.warning("a slab's pages were not unpinned: %s", error.message)


def _address_of(memory: mmap.mmap) -> int:
    """Return the address of a map that cannot be written to, which ctypes refuses to say."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()


def _unmappable(slab_id: str, error: Exception) -> SlabOpenError:
    return SlabOpenError(f"slab {slab_id} cannot be mapped: {error}", facts={"slab_id": slab_id})
