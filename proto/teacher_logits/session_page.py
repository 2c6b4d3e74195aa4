"""Session pages: one page of memory from the server to one local reader, which proves and tells.

The server creates it, passes its descriptor over the session's line, and is its one writer
(sealed as a slab is). The reader proves by its first bytes that both share memory, and looks
there at each exit check whether a lease was taken back by force: that word needs no packet, so
that it cannot come too late.

    byte 0                         32           64              128                      4096
    | challenge: 32 random bytes   | 0 ...      | count uint64  | lease 0 | lease 1 | ...   |
    | leases: BLAKE2b-128 of the ids that were taken back, in order; count says how many    |

Promises: what is written is never taken back, so that a reader may look at any time. Once
more leases were taken back than the page has room for, all of its session's count as such.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import secrets
import weakref

from teacher_logits.errors import SlabOpenError

PAGE_BYTES = 4096
CHALLENGE_BYTES = 32
_COUNT_OFFSET, _LEASES_OFFSET, _LEASE_BYTES = 64, 128, 16
CAPACITY = (PAGE_BYTES - _LEASES_OFFSET) // _LEASE_BYTES
"""Leases that a page has room for."""

# Linux numbers; the fcntl module of Python 3.10 lacks the last.
_F_ADD_SEALS = 1033
_SEALS = 0x2 | 0x4 | 0x10  # SHRINK, GROW, FUTURE_WRITE

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapped:
    """A page that is mapped while this lives. Unlike Python's own maps it keeps no descriptor."""

    def __init__(self, fd: int, protection: int) -> None:
        address = _libc.mmap(None, PAGE_BYTES, protection, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        weakref.finalize(self, _libc.munmap, address, PAGE_BYTES).atexit = False
        self.bytes = memoryview((ctypes.c_char * PAGE_BYTES).from_address(address)).cast("B")
        self._count = ctypes.c_uint64.from_address(address + _COUNT_OFFSET)

    @property
    def count(self) -> int:
        """Leases that were taken back; one aligned load, or store."""
        return self._count.value

    @count.setter
    def count(self, count: int) -> None:
        self._count.value = count


class WriterPage:
    """A page as the server has it; unmapped when nobody refers to it any more."""

    def __init__(self) -> None:
        """Create a page with a fresh challenge. Whoever makes one takes its descriptor."""
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._fd = os.memfd_create("teacher-logits-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, PAGE_BYTES)
            self._page = _Mapped(self._fd, mmap.PROT_READ | mmap.PROT_WRITE)
            self._page.bytes[:CHALLENGE_BYTES] = self.challenge
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self._fd)
            raise

    def take_fd(self) -> int:
        """Return the descriptor, once; whoever took it closes it."""
        fd, self._fd = self._fd, -1
        return fd

    def revoke(self, lease_id: str) -> None:
        """Tell the reader that a lease was taken back; its room may be reused after that."""
        count = self._page.count
        if count < CAPACITY:
            at = _LEASES_OFFSET + count * _LEASE_BYTES
            self._page.bytes[at : at + _LEASE_BYTES] = _digest(lease_id)
        self._page.count = count + 1


class ReaderPage:
    """A page as its reader has it, mapped for as long as it is referred to."""

    def __init__(self, fd: int, challenge_bytes: int) -> None:
        """Map a page; the descriptor stays the caller's.

        Raises:
            SlabOpenError: it cannot be mapped, or is no such page.
        """
        try:
            size = os.fstat(fd).st_size
            if size != PAGE_BYTES or not 0 < challenge_bytes <= _COUNT_OFFSET:
                raise SlabOpenError(
                    f"the broker's page has {size} bytes with a challenge of {challenge_bytes}; "
                    f"this side reads {PAGE_BYTES}: use the same release on both sides",
                    facts={"size_bytes": size, "challenge_bytes": challenge_bytes},
                )
            self._page = _Mapped(fd, mmap.PROT_READ)
        except OSError as error:
            raise SlabOpenError(f"the broker's page cannot be mapped: {error}") from error
        self.challenge = bytes(self._page.bytes[:challenge_bytes])

    def is_revoked(self, lease_id: str) -> bool:
        """Say whether a lease of this session was taken back by force."""
        count = self._page.count
        if not count:
            return False
        if count > CAPACITY:
            return True
        end = _LEASES_OFFSET + count * _LEASE_BYTES
        told, digest = bytes(self._page.bytes[_LEASES_OFFSET:end]), _digest(lease_id)
        return any(
            told[at : at + _LEASE_BYTES] == digest for at in range(0, len(told), _LEASE_BYTES)
        )


def _digest(lease_id: str) -> bytes:
    return hashlib.blake2b(lease_id.encode(), digest_size=_LEASE_BYTES).digest()
