"""Memory of closed device slabs: let go when nobody views it or has it open any more.

To free device memory while another process has it open is undefined (CUDA C++ programming guide,
"Interprocess Communication"). No reader needs to be asked whether it has:

    reader   shared lock on the twin -> not retired? -> open handle ... close handle -> unlock
    writer   retire the twin -> its own last view is gone -> wait for the locks' end -> free

A lock is ``flock``'s, on a description of the twin's file that the reader opened for it: the
kernel lets it go when the reader dies, and its forks with it. The writer has retired the twin
before it looks, so nobody comes in between.

Promises: whoever closes a slab waits for nobody. What cannot be freed at once has a thread that the
kernel wakes, and that frees it and says so the moment the last one has let go. The end of the
program waits a moment for that.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import threading
import time
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
class Own:
    """Memory that the writer allocated itself.

    ``when_freed`` is called behind its end, on whichever thread frees it.
    """

    memory: DeviceMemory
    address: int
    device: Device
    when_freed: Callable[[], None]

    def free(self) -> None:
        """Give it back to the driver."""
        try:
            self.memory.synchronise(device=self.device)
            self.memory.free(self.address, device=self.device)
        except DeviceError as error:
            _log.warning("device memory was not given back: %s", error.message)
            return
        self.when_freed()


class Lent:
    """Memory of another owner, such as a tensor: it is kept alive as long as this is."""

    def __init__(self, owner: object) -> None:
        self._owner: object = owner

    def free(self) -> None:
        """Leave it to its owner."""
        self._owner = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LeftOver:
    """What a closed slab lay in, and what still stands in the way of letting it go."""

    what: Own | Lent
    lock: int
    views: Views
    pid: int


EXIT_SECONDS = 1.0
"""How long the end of a program is held up by readers of what it has closed."""

_THREAD_NAME = "teacher-logits-left-over"
_left_over: list[LeftOver] = []
_in_use: list[Own | Lent] = []


def keep(what: Own | Lent) -> None:
    """Keep what somebody may yet open, to the end of this process."""
    _in_use.append(what)


def leave_over(left: LeftOver) -> None:
    """Take over the memory of a slab that was closed, and free it as soon as that is safe."""
    if left.views.are_gone and not is_locked(left.lock):
        _free(left)
        return
    _left_over.append(left)
    thread = threading.Thread(target=_await_end, args=(left,), name=_THREAD_NAME, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # such as at the end of the program, which frees it as well
        _log.debug("device memory stays to the end of this process: %s", error)


def await_readers() -> None:
    """Wait a moment for those that have memory of closed slabs open; done at exit.

    The end of a process frees its memory under them. Idle ones let go as soon as a slab is closed.
    """
    until = time.monotonic() + EXIT_SECONDS
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join(max(0.0, until - time.monotonic()))


atexit.register(await_readers)


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
    left.what.free()


def open_lock(fd: int) -> int:
    """Return a descriptor of its own for a twin: copies of one would share one lock."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        is_full = error.errno in (errno.EMFILE, errno.ENFILE)
        way_out = "raise the limit of open files (ulimit -n)" if is_full else "mount /proc"
        raise SlabOpenError(
            f"a twin cannot be opened anew by /proc/self/fd ({error.strerror}): {way_out}",
            facts={"errno": error.errno or 0},
        ) from error


def let_go(lock: int) -> None:
    """End a lock and close its descriptor.

    By name: a fork, such as a loader of data, has the descriptor as well, and would keep the lock.
    """
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def is_locked(fd: int) -> bool:
    """Say whether somebody has a shared lock on a twin."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
