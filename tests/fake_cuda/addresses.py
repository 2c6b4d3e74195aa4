"""Address ranges of one process: memfds mapped at them, used anew once they were given back.

A range that was given back reads as 0xDD until something else is mapped there, so that a view
which outlived its mapping reads nonsense rather than right bytes, and kills no test run.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

POISON = 0xDD
_CHUNK = 1 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int64),
)


class AddressBook:
    """Which ranges are had, and which are free to be used anew: the last given back first."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []

    def map(self, fd: int, size_bytes: int) -> int:
        """Map a memfd's first bytes, shared and writable; return the address."""
        length = whole_pages(size_bytes)
        address = self._take(length)
        _map(address, length, mmap.MAP_SHARED | _MAP_FIXED, fd)
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        """Take the mapping away, and leave 0xDD in its place."""
        length = whole_pages(size_bytes)
        for offset in range(0, length, _CHUNK):
            part = min(_CHUNK, length - offset)
            _map(address + offset, part, mmap.MAP_PRIVATE | _MAP_FIXED, _poison_fd())
        self._free.append((address, length))

    def bytes_at(self, address: int, size_bytes: int) -> memoryview:
        """Return bytes of this process, writable."""
        return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")

    def _take(self, length: int) -> int:
        for place in reversed(range(len(self._free))):
            if self._free[place][1] == length:
                return self._free.pop(place)[0]
        return _map(None, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)


def whole_pages(size_bytes: int) -> int:
    """Round up to pages."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@functools.cache
def _poison_fd() -> int:
    fd = os.memfd_create("fake-poison", os.MFD_CLOEXEC)
    os.write(fd, bytes([POISON]) * _CHUNK)
    return fd


def _map(address: int | None, length: int, flags: int, fd: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found: int | None = _libc.mmap(address, length, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {length} bytes: {os.strerror(number)}")
    return found
