"""Allocations as memfds, the 64 bytes that name one, and what another process makes of them.

    | allocation, whole pages, mapped in each process | one page: magic, serial, size, UUID |

The descriptor stays with the process that allocated; others come to it by /proc/<pid>/fd/<n>,
so nobody does from another PID namespace, and nobody once that process is dead. A reader holds a
shared lock on the memfd while it has it open, so that the kernel itself says who still has.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

from tests.fake_cuda.addresses import POISON, whole_pages
from tests.fake_cuda.numbers import refusal

from teacher_logits.device_memory import HANDLE_BYTES, MemoryKind

_MAGIC = b"FAKE"
_HANDLE = struct.Struct("<4sIIQ16s")
_ABOUT = struct.Struct("<4s16sQ64s")


@dataclass(frozen=True, kw_only=True)
class Handle:
    """What the 64 bytes say: opaque to all but this driver."""

    pid: int
    fd: int
    pid_namespace: int
    serial: bytes

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        packed = _HANDLE.pack(_MAGIC, self.pid, self.fd, self.pid_namespace, self.serial)
        return packed.ljust(HANDLE_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes) -> Handle:
        """Read them; refuse (1) what is no handle."""
        if len(raw) != HANDLE_BYTES or raw[:4] != _MAGIC:
            raise refusal(1, "open", f"{len(raw)} bytes are no handle")
        _, pid, fd, namespace, serial = _HANDLE.unpack_from(raw)
        return cls(pid=pid, fd=fd, pid_namespace=namespace, serial=serial)


@dataclass(kw_only=True)
class Memory:
    """Memory that is mapped here. It owns the descriptor."""

    fd: int
    size_bytes: int
    uuid: str
    kind: MemoryKind = MemoryKind.PLAIN
    address: int = 0


@dataclass(kw_only=True)
class Allocation(Memory):
    """Memory of this process."""

    serial: bytes

    @classmethod
    def make(cls, size_bytes: int, *, uuid: str, kind: MemoryKind) -> Allocation:
        """Take memory. Its first bytes are 0xDD where nobody wrote: a device clears nothing."""
        serial = os.urandom(16)
        fd = os.memfd_create(f"fake-cuda-{serial.hex()[:8]}", os.MFD_CLOEXEC)
        room = whole_pages(size_bytes)
        os.truncate(fd, room + mmap.PAGESIZE)
        os.pwrite(fd, bytes([POISON]) * min(room, 1 << 16), 0)
        os.pwrite(fd, _ABOUT.pack(_MAGIC, serial, size_bytes, uuid.encode()), room)
        return cls(fd=fd, serial=serial, size_bytes=size_bytes, uuid=uuid, kind=kind)

    def is_open_elsewhere(self) -> bool:
        """Say whether a living process has it open."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def spoil(self) -> None:
        """Fill it with 0xDD, whoever still has it, and give the descriptor up."""
        room = whole_pages(self.size_bytes)
        for offset in range(0, room, 1 << 20):
            os.pwrite(self.fd, bytes([POISON]) * min(1 << 20, room - offset), offset)
        os.close(self.fd)


@dataclass(kw_only=True)
class Opened(Memory):
    """Another process's memory, open here ``count`` times."""

    count: int = 1

    def let_go(self) -> None:
        """Give up the lock and the descriptor."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


def open_exported(handle: Handle, *, pid_namespace: int) -> Opened:
    """Come to another process's memory, or refuse as the driver does."""
    if handle.pid_namespace != pid_namespace or not os.path.exists(f"/proc/{handle.pid}"):
        raise refusal(201, "open", f"there is no process {handle.pid} in this PID namespace")
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise refusal(1, "open", f"process {handle.pid} has no such memory: {error}") from None
    try:
        size_bytes, uuid = _about(fd, handle.serial)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return Opened(fd=fd, size_bytes=size_bytes, uuid=uuid)


def _about(fd: int, serial: bytes) -> tuple[int, str]:
    """Return size and UUID; refuse a descriptor that is another allocation's by now."""
    raw = b""
    room = os.fstat(fd).st_size - mmap.PAGESIZE
    if room > 0:
        raw = os.pread(fd, _ABOUT.size, room)
    if len(raw) == _ABOUT.size:
        magic, found, size_bytes, uuid = _ABOUT.unpack(raw)
        if (magic, found) == (_MAGIC, serial):
            return size_bytes, uuid.rstrip(b"\0").decode()
    raise refusal(1, "open", "the allocation was freed")
