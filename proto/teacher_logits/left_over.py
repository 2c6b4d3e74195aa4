"""Memory of closed device slabs: freed when nobody views it or has it open any more.

To free device memory while another process has it open is undefined (CUDA C++ programming guide,
"Interprocess Communication"). No reader needs to be asked whether it has:

    reader   shared lock on the twin -> not retired? -> open handle ... close handle -> unlock
    writer   retire the twin -> is there a lock? -> free, or try again later

A lock is ``flock``'s, on a description of the twin's file that the reader opened for it: the
kernel lets it go when the reader dies, and its forks with it. The writer has retired the twin
before it looks, so nobody comes in between.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.device_memory import DeviceError
from teacher_logits.errors import SlabOpenError

if TYPE_CHECKING:
    import weakref

    from teacher_logits.device_memory import Device, DeviceMemory

_log = logging.getLogger("teacher_logits")


class Held:
    """What views of device memory keep alive: while one is there, the memory or handle is."""


@dataclass(frozen=True, kw_only=True)
class LeftOver:
    """Own memory of a closed slab, and what still stands in the way of freeing it."""

    memory: DeviceMemory
    address: int
    device: Device
    lock: int
    views: weakref.ref[Held]
    pid: int


_left_over: list[LeftOver] = []
_sweeping = threading.Lock()


def leave_over(left: LeftOver) -> None:
    """Take over the memory of a slab that was closed; it is freed when that is safe."""
    _left_over.append(left)
    free_left_over()


def free_left_over() -> int:
    """Free the memory of closed slabs that nobody views or has open any more; say how many wait.

    Called whenever a slab is made or closed; who is short of device memory may call it, too.
    """
    if not _sweeping.acquire(blocking=False):
        return len(_left_over)  # another thread is at it
    try:
        for left in list(_left_over):
            if left.pid != os.getpid():  # a fork's copy; the memory is its parent's
                _left_over.remove(left)
            elif left.views() is None and not is_locked(left.lock):
                _left_over.remove(left)
                os.close(left.lock)
                _free(left)
        return len(_left_over)
    finally:
        _sweeping.release()


def _free(left: LeftOver) -> None:
    try:
        left.memory.synchronise(device=left.device)
        left.memory.free(left.address, device=left.device)
    except DeviceError as error:
        _log.warning("device memory was not given back: %s", error.message)


def open_lock(fd: int) -> int:
    """Return a descriptor of its own for a twin: copies of one would share one lock."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SlabOpenError(
            f"a twin cannot be opened anew by /proc/self/fd ({error.strerror}): mount /proc",
            facts={"errno": error.errno or 0},
        ) from error


def is_locked(fd: int) -> bool:
    """Say whether somebody has a shared lock on a twin."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
