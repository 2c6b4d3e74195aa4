"""Memory of closed device slabs: freed when nobody views it or has it open any more.

To free device memory while another process has it open is undefined (CUDA C++ programming guide,
"Interprocess Communication"). No reader needs to be asked whether it has:

    reader   shared lock on the twin -> not retired? -> open handle ... close handle -> unlock
    writer   retire the twin -> its own last view is gone -> wait for the locks' end -> free

A lock is ``flock``'s, on a description of the twin's file that the reader opened for it: the
kernel lets it go when the reader dies, and its forks with it. The writer has retired the twin
before it looks, so nobody comes in between.

Promises: whoever closes a slab waits for nobody. What cannot be freed at once has a thread that the
kernel wakes, and that frees it and says so the moment the last one has let go.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import weakref
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from teacher_logits.device_memory import DeviceError
from teacher_logits.errors import SlabOpenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.device_memory import Device, DeviceMemory

_log = logging.getLogger("teacher_logits")


class Held:
    """What views of device memory keep alive: while one is there, the memory or handle is."""


class Views:
    """The views of some memory, as far as one needs to know when the last is gone."""

    def __init__(self, held: Held) -> None:
        # A queue: the last view may go anywhere, in the midst of a collection too.
        self._gone: SimpleQueue[weakref.ref[Held]] = SimpleQueue()
        self._held = weakref.ref(held, self._gone.put)

    @property
    def are_gone(self) -> bool:
        """Whether there is none any more."""
        return self._held() is None

    def wait(self) -> None:
        """Wait until there is none."""
        if not self.are_gone:
            self._gone.get()


@dataclass(frozen=True, kw_only=True, eq=False)
class LeftOver:
    """Own memory of a closed slab, and what still stands in the way of freeing it.

    ``when_freed`` is called behind that, on whichever thread frees it.
    """

    memory: DeviceMemory
    address: int
    device: Device
    lock: int
    views: Views
    when_freed: Callable[[], None]
    pid: int


_left_over: list[LeftOver] = []


def leave_over(left: LeftOver) -> None:
    """Take over the memory of a slab that was closed, and free it as soon as that is safe."""
    if left.views.are_gone and not is_locked(left.lock):
        _free(left)
        return
    _left_over.append(left)
    thread = threading.Thread(
        target=_await_end, args=(left,), name="teacher-logits-left-over", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:  # such as at the end of the program, which frees it as well
        _log.debug("device memory stays to the end of this process: %s", error)


def left_over_count() -> int:
    """Return of how many closed slabs of this process the memory is not freed yet."""
    here = os.getpid()  # a fork has a copy of the list; the memory is its parent's
    return sum(left.pid == here for left in list(_left_over))


def _await_end(left: LeftOver) -> None:
    left.views.wait()
    try:
        fcntl.flock(left.lock, fcntl.LOCK_EX)
        # Let go by name: a fork may have the lock as well, and a reader that comes too late waits.
        fcntl.flock(left.lock, fcntl.LOCK_UN)
    except OSError as error:
        _log.warning("device memory stays to the end of this process: %s", error)
        return
    _left_over.remove(left)
    _free(left)


def _free(left: LeftOver) -> None:
    os.close(left.lock)
    try:
        left.memory.synchronise(device=left.device)
        left.memory.free(left.address, device=left.device)
    except DeviceError as error:
        _log.warning("device memory was not given back: %s", error.message)
        return
    left.when_freed()


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
