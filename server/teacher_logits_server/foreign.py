"""Foreign slabs: descriptors of slabs that publishers write, kept to be handed on and read.

A publisher passes the descriptor of a slab of its own; its readers get copies of it, and what is
streamed is read through it. Nothing of it is ever mapped writable. A slab that comes with device
memory is that memory's host twin, and may be sparse: pages are there where something was written.

Promises: what is kept is memory that nobody can shrink, grow, map for writing anew or take pages
out of, and what is read through a map is there already: to read it neither fails nor takes memory
of this server's. A descriptor stays open while an extent of its slab is in use.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAllowedError, NotAvailable, RequestInvalidError, SlabOpenError
from teacher_logits.slab import CONTROL_BYTES, HEADER_BYTES, is_sparse, read_header
from teacher_logits_server.caps import Cap

if TYPE_CHECKING:
    from collections.abc import Collection

    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.errors import Fact
    from teacher_logits.payload import Extent

MAX_SLAB_BYTES = 1 << 42

# Linux numbers; the fcntl module of Python 3.10 lacks some.
_F_GET_SEALS = 1034
_SEALS = {"shrinking": 0x2, "growing": 0x4, "future writers": 0x10}
_BLOCK_BYTES = 512


class ForeignSlab:
    """One slab of a publisher's. It owns its descriptor."""

    def __init__(self, slab_id: str, fd: int, total_bytes: int) -> None:
        self.slab_id = slab_id
        self.fd = fd
        self.total_bytes = total_bytes
        self.is_sparse = is_sparse(memoryview(os.pread(fd, HEADER_BYTES, 0)))
        self._map: mmap.mmap | None = None

    def room(self, extent: Extent) -> memoryview:
        """Return the extent's bytes, read-only; the slab is mapped when this is first called."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.total_bytes, prot=mmap.PROT_READ)
        start = CONTROL_BYTES + extent.offset_bytes
        return memoryview(self._map)[start : start + extent.size_bytes]

    def close(self) -> None:
        """Give descriptor and mapping back."""
        os.close(self.fd)
        if self._map is not None:
            with suppress(BufferError):  # somebody views it yet; it goes with the last view
                self._map.close()


class ForeignSlabs:
    """The publishers' slabs of one server, by id.

    Args:
        most: of all publishers together; the rest of this process's descriptors is for others.
    """

    def __init__(self, most: int) -> None:
        self._cap = Cap(
            name="all_slabs",
            most=most,
            flag="its limit of open files (ulimit -n)",
            what="slabs of publishers' here",
            way_out="make them fewer and larger",
        )
        self._slabs: dict[str, ForeignSlab] = {}
        # Guards the table, and keeps a descriptor open while it is copied.
        self._lock = threading.Lock()

    def add(self, slab_id: str, descriptor: int) -> None:
        """Keep a copy of a descriptor that ``check_descriptor`` has let through.

        Raises:
            NotAllowedError: there is a slab of that id.
            LimitReachedError: there are as many as the server keeps.
            NotAvailable: this process has no descriptors left.
        """
        self._cap.check(len(self._slabs))
        try:
            fd = os.dup(descriptor)
        except OSError as error:
            raise NotAvailable(
                f"the server cannot keep one descriptor more ({error.strerror}): use fewer and "
                "larger slabs, or raise its limit of open files",
                facts={"errno": error.errno or 0},
            ) from error
        slab = ForeignSlab(slab_id, fd, os.fstat(fd).st_size)
        with self._lock:
            if self._slabs.setdefault(slab_id, slab) is slab:
                return
        slab.close()
        raise NotAllowedError(
            f"slab id {slab_id!r} is in use: give each slab an id of its own",
            facts={"slab_id": slab_id},
        )

    def find(self, slab_id: str) -> ForeignSlab:
        """Return a slab; it stays open while an extent of it is in use.

        Raises:
            KeyError: there is none of that id, or none any more.
        """
        with self._lock:
            return self._slabs[slab_id]

    def room(self, extent: Extent) -> memoryview:
        """Return the bytes of an extent in use, read-only; its slab is mapped for that once.

        Raises:
            KeyError: as for ``find``.
        """
        return self.find(extent.slab_id).room(extent)

    def read(self, extent: Extent, offset_bytes: int, size_bytes: int) -> bytes:
        """Copy a few bytes of an extent, in use or not; fewer where it is not that large.

        Raises:
            KeyError: as for ``find``.
        """
        start = CONTROL_BYTES + extent.offset_bytes + offset_bytes
        with self._lock:
            fd = self._slabs[extent.slab_id].fd
            return os.pread(fd, size_bytes, start) if 0 <= start < MAX_SLAB_BYTES else b""

    def is_sparse(self, slab_id: str) -> bool:
        """Say whether a slab may lack pages; KeyError as for ``find``."""
        return self.find(slab_id).is_sparse

    def hole(self, extent: Extent, start: int, stop: int) -> int:
        """Return the first byte of a run of an extent that is no memory yet; ``stop`` for none.

        Only of a sparse slab: what was allocated and never written may count as none.

        Raises:
            KeyError: as for ``find``.
        """
        base = CONTROL_BYTES + extent.offset_bytes
        with self._lock:
            found = os.lseek(self._slabs[extent.slab_id].fd, base + start, os.SEEK_HOLE)
        return min(found - base, stop)

    def generation(self, extent: Extent) -> int:
        """Read the slot of an extent, in use or not; 0 where its slab is gone."""
        with self._lock:
            slab = self._slabs.get(extent.slab_id)
            if slab is None:
                return 0
            slot = os.pread(slab.fd, 8, HEADER_BYTES + 8 * extent.slot)
        return int.from_bytes(slot, "little")

    def touch(self, extent: Extent) -> None:
        """Have whoever watches an extent's slab look at its slots, as its writer does."""
        with self._lock, suppress(OSError):  # another user's file
            slab = self._slabs.get(extent.slab_id)
            if slab is not None:
                os.utime(slab.fd)

    def copy(self, slab_id: str) -> tuple[int, int]:
        """Return a copy of a slab's descriptor, which the caller closes, and its size in bytes.

        Raises:
            KeyError: as for ``find``.
            OSError: this process has no descriptors left.
        """
        with self._lock:
            slab = self._slabs[slab_id]
            return os.dup(slab.fd), slab.total_bytes

    def drop(self, slab_ids: Collection[str]) -> None:
        """Close slabs that nobody will read any more; one that is not here is fine."""
        with self._lock:
            dropped = [self._slabs.pop(slab_id, None) for slab_id in slab_ids]
        for slab in dropped:
            if slab is not None:
                slab.close()

    def close(self) -> None:
        """Close all of them."""
        self.drop(list(self._slabs))


def check_descriptor(
    descriptor: int, *, slab_id: str, size_bytes: int, device: DeviceMemoryPart | None = None
) -> int:
    """Refuse what is no slab, sealed and whole; return its room for extents in bytes.

    ``size_bytes`` is what its publisher says of it, control page and all; ``device`` what it has
    of device memory, without which it may not be sparse. Never waits: nothing but memory is looked
    into.

    Raises:
        RequestInvalidError: saying what it is instead.
    """
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        raise _refused(slab_id, "is no memfd that can be sealed") from None
    open_to = [name for name, seal in _SEALS.items() if not seals & seal]
    if open_to:
        raise _refused(
            slab_id, f"is not sealed against {' and '.join(open_to)}", {"seals": int(seals)}
        )
    status = os.fstat(descriptor)
    facts: dict[str, Fact] = {"size_bytes": size_bytes, "descriptor_bytes": status.st_size}
    if status.st_size != size_bytes:
        raise _refused(
            slab_id, f"has {status.st_size} bytes, and was said to have {size_bytes}", facts
        )
    if not CONTROL_BYTES < size_bytes <= MAX_SLAB_BYTES:
        raise _refused(
            slab_id,
            f"has {size_bytes} bytes; a slab has more than {CONTROL_BYTES}, and at most "
            f"{MAX_SLAB_BYTES}",
            facts,
        )
    has = status.st_blocks * _BLOCK_BYTES
    _check_allocated(slab_id, has, size_bytes if device is None else CONTROL_BYTES)
    header, room = _read_header(descriptor, slab_id=slab_id, size_bytes=size_bytes)
    if not is_sparse(header):
        _check_allocated(slab_id, has, size_bytes)
    elif device is None:
        raise _refused(slab_id, "is a host twin, and no device memory came with it", facts)
    if device is not None and device.size_bytes > room:
        raise _refused(
            slab_id,
            f"has room for {room} bytes, and its device memory {device.size_bytes}",
            {**facts, "device_bytes": device.size_bytes},
        )
    return room


def _read_header(descriptor: int, *, slab_id: str, size_bytes: int) -> tuple[memoryview, int]:
    """Return a slab's header, checked, and its room for extents in bytes."""
    try:
        header = memoryview(os.pread(descriptor, HEADER_BYTES, 0))
        return header, read_header(header, slab_id=slab_id, total_bytes=size_bytes)
    except SlabOpenError as error:
        raise RequestInvalidError(error.message, facts=error.facts) from None
    except OSError as error:  # opened for writing alone
        raise _refused(slab_id, f"cannot be read ({error.strerror})") from None


def _check_allocated(slab_id: str, has_bytes: int, need_bytes: int) -> None:
    if has_bytes < need_bytes:
        raise _refused(
            slab_id,
            f"has {has_bytes} of its {need_bytes} bytes in memory; allocate all of it "
            "(posix_fallocate) before it is passed",
            {"need_bytes": need_bytes, "allocated_bytes": has_bytes},
        )


def _refused(slab_id: str, what: str, facts: dict[str, Fact] | None = None) -> RequestInvalidError:
    return RequestInvalidError(
        f"the descriptor of slab {slab_id} {what}", facts={"slab_id": slab_id, **(facts or {})}
    )
