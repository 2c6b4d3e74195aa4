"""Host slabs: one memfd with one writer, and the control page that guards its extents.

The writer creates and maps the slab, then seals it against every later writer (SHRINK,
GROW and FUTURE_WRITE; SEAL_WRITE would fail while it is mapped). Readers get the
descriptor over the broker line and can map it read-only or copy-on-write.

    byte 0                         64                                  65536
    | magic 8 | version 4 | slots 4 | extents' room 8 | 0 ... | slot 0 | slot 1 | ... |
    | <----------- header, 64 bytes, little-endian ---------> | uint64 each           |
    | extents, from byte 65536 to the end; Extent.offset_bytes counts from there      |

A slot is even while its extent may be read and odd while it may not (``pool``). Slots are
written by the one writer only, each by one aligned 8-byte store. That store is the seal: readers
to whom an extent was announced wait for it, and the writer touches the slab's file behind it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING

from teacher_logits.errors import SlabOpenError
from teacher_logits.pool import SLOTS_PER_SLAB

if TYPE_CHECKING:
    from teacher_logits.payload import Extent

HEADER_BYTES = 64
SLOT_COUNT = SLOTS_PER_SLAB
CONTROL_BYTES = HEADER_BYTES + 8 * SLOT_COUNT

_MAGIC = b"TLSLAB\r\n"
_RETIRED = b"TLGONE\r\n"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ")

# Linux numbers; the fcntl module of Python 3.10 lacks the last.
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10


class WriterSlab:
    """A slab as its one writer has it: created here, mapped writable, closed to other writers.

    The object owns the descriptor and the mapping; ``close`` gives both back once no
    tensor views the mapping.
    """

    def __init__(self, slab_id: str, size_bytes: int) -> None:
        """Create a slab with ``size_bytes`` of room for extents.

        Room is taken from the system here and now, so that a full machine shows as an
        ``OSError`` and not as a killed process later. Not for the serving thread: taking
        a GiB lasts a quarter of a second.
        """
        self.slab_id = slab_id
        self.size_bytes = size_bytes
        total = CONTROL_BYTES + size_bytes
        self.fd = os.memfd_create(
            f"teacher-logits-{slab_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        try:
            os.posix_fallocate(self.fd, 0, total)
            self._map = mmap.mmap(self.fd, total, flags=mmap.MAP_SHARED)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(self.fd)
            raise
        _HEADER.pack_into(self._map, 0, _MAGIC, _VERSION, SLOT_COUNT, size_bytes)
        self._slots = (ctypes.c_uint64 * SLOT_COUNT).from_buffer(self._map, HEADER_BYTES)
        for slot in range(SLOT_COUNT):
            self._slots[slot] = 1
        self._bytes = memoryview(self._map)[CONTROL_BYTES:]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole memfd, the control page included."""
        return CONTROL_BYTES + self.size_bytes

    def mark(self, slot: int, generation: int) -> None:
        """Write a slot: an odd number bars readers, an even one lets them in."""
        self._slots[slot] = generation

    def generation(self, slot: int) -> int:
        """Read a slot."""
        return int(self._slots[slot])

    def touch(self) -> None:
        """Have whoever watches the slab look at its slots: a slab is a file, and can be watched."""
        os.utime(self.fd)

    def room(self, extent: Extent) -> memoryview:
        """Return the extent's bytes, writable."""
        return self._bytes[extent.offset_bytes : extent.offset_bytes + extent.size_bytes]

    def close(self, *, in_use: bool = False) -> None:
        """Give descriptor and mapping back; a mapping that tensors still view goes with the last.

        Readers that have it mapped see by its magic number that they may let go too, unless
        it is ``in_use``: there are payloads in it that somebody may yet open.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if not in_use:
            self._map[: len(_RETIRED)] = _RETIRED
        del self._slots
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a tensor views it; the mapping dies with that tensor


def read_header(control: memoryview | mmap.mmap, *, slab_id: str, total_bytes: int) -> int:
    """Check a mapped slab's header; return its room for extents in bytes.

    Raises:
        SlabOpenError: it is no slab, or of another version or size.
    """
    magic, version, slots, size_bytes = _HEADER.unpack_from(control, 0)
    if magic != _MAGIC:
        raise SlabOpenError(f"slab {slab_id} does not start with a slab's magic number")
    if version != _VERSION or slots != SLOT_COUNT:
        raise SlabOpenError(
            f"slab {slab_id} has layout version {version} with {slots} slots; this side reads "
            f"version {_VERSION} with {SLOT_COUNT}: use the same release on both sides",
            facts={"version": version, "slots": slots},
        )
    if CONTROL_BYTES + size_bytes != total_bytes:
        raise SlabOpenError(
            f"slab {slab_id} says it has {size_bytes} bytes of room, and its descriptor "
            f"{total_bytes} bytes in all",
            facts={"size_bytes": size_bytes, "total_bytes": total_bytes},
        )
    return int(size_bytes)


def is_retired(control: memoryview | mmap.mmap) -> bool:
    """Say whether the writer has closed a mapped slab: no payload will ever come there again."""
    return bytes(control[: len(_RETIRED)]) == _RETIRED


def check_extent(extent: Extent, *, size_bytes: int) -> None:
    """Refuse an extent that does not lie in a slab with ``size_bytes`` of room.

    Raises:
        SlabOpenError: offset, size or slot is out of range (sums cannot overflow here).
    """
    if (
        extent.offset_bytes < 0
        or extent.size_bytes < 0
        or extent.offset_bytes + extent.size_bytes > size_bytes
        or not 0 <= extent.slot < SLOT_COUNT
    ):
        raise SlabOpenError(
            f"extent at {extent.offset_bytes} with {extent.size_bytes} bytes and slot "
            f"{extent.slot} is outside slab {extent.slab_id} of {size_bytes} bytes and "
            f"{SLOT_COUNT} slots",
            facts={
                "offset_bytes": extent.offset_bytes,
                "size_bytes": extent.size_bytes,
                "slab_bytes": size_bytes,
                "slot": extent.slot,
            },
        )
