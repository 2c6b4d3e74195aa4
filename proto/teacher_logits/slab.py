"""Host slabs: one memfd with one writer, and the control page that guards its extents.

The writer creates and maps the slab, then seals it against every later writer (SHRINK,
GROW and FUTURE_WRITE; SEAL_WRITE would fail while it is mapped). Readers get the
descriptor over the broker line and can map it read-only or copy-on-write.

    byte 0                                                      64              65536
    | magic 8 | version 4 | slots 4 | room 8 | flags 4 | 0 ...  | slot 0 | slot 1 | ... |
    | <----------- header, 64 bytes, little-endian -----------> | uint64 each           |
    | extents, from byte 65536 to the end; Extent.offset_bytes counts from there        |

A slot is even while its extent may be read and odd while it may not (``pool``). Slots are
written by the one writer only, each by one aligned 8-byte store. That store is the seal: readers
to whom an extent was announced wait for it, and the writer touches the slab's file behind it.

Flag 1, sparse: the slab is the host twin of device memory (``device_slab``). Its room is a hole
but for what was written: to read a hole by ``pread`` takes no memory, to touch it in a map does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import threading
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
_HEADER = struct.Struct("<8sIIQI")
_SPARSE = 1
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")

# Linux numbers; the fcntl module of Python 3.10 lacks the last.
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10


class WriterSlab:
    """A slab as its one writer has it: created here, mapped writable, closed to other writers.

    The object owns the descriptor and the mapping; ``close`` gives both back once no
    tensor views the mapping.
    """

    def __init__(self, slab_id: str, size_bytes: int, *, is_sparse: bool = False) -> None:
        """Create a slab with ``size_bytes`` of room for extents.

        Room is taken from the system here and now, so that a full machine shows as an
        ``OSError`` and not as a killed process later. Not for the serving thread: taking
        a GiB lasts a quarter of a second. A sparse slab takes its control page alone; who
        writes into its room asks first (``hole_bytes``, ``host_memory``).
        """
        self.slab_id = slab_id
        self.size_bytes = size_bytes
        self._is_sparse = is_sparse
        total = CONTROL_BYTES + size_bytes
        self.fd = os.memfd_create(
            f"teacher-logits-{slab_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        try:
            os.ftruncate(self.fd, total)
            os.posix_fallocate(self.fd, 0, CONTROL_BYTES if is_sparse else total)
            self._map = mmap.mmap(self.fd, total, flags=mmap.MAP_SHARED)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(self.fd)
            raise
        flags = _SPARSE if is_sparse else 0
        _HEADER.pack_into(self._map, 0, _MAGIC, _VERSION, SLOT_COUNT, size_bytes, flags)
        self._slots = (ctypes.c_uint64 * SLOT_COUNT).from_buffer(self._map, HEADER_BYTES)
        for slot in range(SLOT_COUNT):
            self._slots[slot] = 1
        self._bytes = memoryview(self._map)[CONTROL_BYTES:]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole memfd, the control page included."""
        return CONTROL_BYTES + self.size_bytes

    def mark(self, slot: int, generation: int) -> None:
        """Write a slot: an odd number bars readers, an even one lets them in.

        What was written into the extent before is seen by who sees an even number; who sees
        what is written after an odd one sees that number too.
        """
        fence()
        self._slots[slot] = generation
        fence()

    def touch(self) -> None:
        """Wake whoever watches the slab: it is a file, and is touched. Nothing, once closed."""
        try:
            os.utime(self.fd)
        except OSError:
            if self.fd >= 0:
                raise

    def let_in(self, slot: int, generation: int) -> None:
        """Write an even number as ``mark`` does, and wake whoever watches the slab."""
        fence()
        self._slots[slot] = generation
        fence()
        os.utime(self.fd)

    def generation(self, slot: int) -> int:
        """Read a slot."""
        return int(self._slots[slot])

    def room(self, extent: Extent) -> memoryview:
        """Return the extent's bytes, writable."""
        return self._bytes[extent.offset_bytes : extent.offset_bytes + extent.size_bytes]

    def opened(self, extent: Extent) -> tuple[memoryview, ctypes.c_uint64]:
        """Return the extent's bytes and its slot, for a reader in this process.

        Both are good for as long as they are held, whoever closes the slab meanwhile.

        Raises:
            SlabOpenError: it is closed.
        """
        try:
            slot = ctypes.c_uint64.from_buffer(self._map, HEADER_BYTES + 8 * extent.slot)
            return self.room(extent), slot
        except ValueError:  # what lay over the mapping was released
            raise SlabOpenError(
                f"slab {self.slab_id} was closed by its writer", facts={"slab_id": self.slab_id}
            ) from None

    def hole_bytes(self, offset_bytes: int, size_bytes: int) -> int:
        """Return how many bytes of a run of the room are not yet memory; 0 unless sparse."""
        if not self._is_sparse:
            return 0
        at = CONTROL_BYTES + offset_bytes
        end = at + size_bytes
        holes = 0
        while at < end:
            hole = os.lseek(self.fd, at, os.SEEK_HOLE)
            if hole >= end:
                break
            try:
                at = min(os.lseek(self.fd, hole, os.SEEK_DATA), end)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                at = end  # no data behind the hole
            holes += at - hole
        return holes

    def close(self, *, in_use: bool = False) -> None:
        """Give descriptor and mapping back; a mapping that tensors still view goes with the last.

        Readers that have it mapped see by its magic number that they may let go too, unless
        it is ``in_use``: there are payloads in it that somebody may yet open.
        """
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        os.close(fd)
        if not in_use:
            self._map[: len(_RETIRED)] = _RETIRED
        del self._slots
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a tensor views it; the mapping dies with that tensor


def fence() -> None:
    """Keep this thread's reads of shared memory before it before all after it, and its writes
    before its writes after it.

    x86 does so by itself; ARM does not. Of a lock that nobody else knows, the release orders what
    came before, and the second acquisition, which no CPU lets overtake it, what comes after.
    """
    if _KEEPS_ORDER:
        return
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def read_header(control: memoryview | mmap.mmap, *, slab_id: str, total_bytes: int) -> int:
    """Check a mapped slab's header; return its room for extents in bytes.

    Raises:
        SlabOpenError: it is no slab, or of another version or size.
    """
    magic, version, slots, size_bytes, flags = _HEADER.unpack_from(control, 0)
    if magic != _MAGIC:
        raise SlabOpenError(f"slab {slab_id} does not start with a slab's magic number")
    if version != _VERSION or slots != SLOT_COUNT or flags & ~_SPARSE:
        raise SlabOpenError(
            f"slab {slab_id} has layout version {version} with {slots} slots and flags {flags}; "
            f"this side reads version {_VERSION} with {SLOT_COUNT} and flags {_SPARSE} at most: "
            "use the same release on both sides",
            facts={"version": version, "slots": slots, "flags": flags},
        )
    if CONTROL_BYTES + size_bytes != total_bytes:
        raise SlabOpenError(
            f"slab {slab_id} says it has {size_bytes} bytes of room, and its descriptor "
            f"{total_bytes} bytes in all",
            facts={"size_bytes": size_bytes, "total_bytes": total_bytes},
        )
    return int(size_bytes)


def is_sparse(control: memoryview | mmap.mmap) -> bool:
    """Say whether a slab, whose header was checked, is the host twin of device memory."""
    return bool(_HEADER.unpack_from(control, 0)[4] & _SPARSE)


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
