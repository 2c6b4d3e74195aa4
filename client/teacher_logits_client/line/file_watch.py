"""File watch: who waits on a broker line is woken when a slab's file is touched.

A writer touches its slab's file behind each seal (``slab``), and the kernel tells every watch of
that file, in whatever container: nothing is passed between the two for that. What has changed,
the slots say. One watch a line, for all of its slabs; the kernel ends it with the process.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import suppress

from teacher_logits.errors import SlabOpenError

_IN_ATTRIB = 0x4
_READ_BYTES = 4096
_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """An inotify instance. Any thread may add and remove; who waits drains."""

    def __init__(self) -> None:
        """Begin to watch nothing.

        Raises:
            SlabOpenError: this platform has no such thing, or this user has too many of them.
        """
        try:
            self.fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError:
            raise SlabOpenError("this platform cannot watch a slab's file") from None
        if self.fd < 0:
            raise _failed("max_user_instances")
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False

    def add(self, fd: int) -> int:
        """Watch the file of a descriptor; return the number under which it is removed.

        Raises:
            SlabOpenError: it cannot be watched.
        """
        number = int(_libc.inotify_add_watch(self.fd, b"/proc/self/fd/%d" % fd, _IN_ATTRIB))
        if number < 0:
            raise _failed("max_user_watches")
        return number

    def remove(self, number: int) -> None:
        """Watch a file no more: until then the kernel keeps it, whoever else lets it go."""
        if self._close.alive:
            _libc.inotify_rm_watch(self.fd, number)

    def drain(self) -> None:
        """Take in what was told, so that the next touch wakes anew."""
        with suppress(OSError):
            if self._close.alive:  # else its number may be another file's
                os.read(self.fd, _READ_BYTES)

    def close(self) -> None:
        """Watch nothing any more; twice is fine."""
        self._close()


def _failed(limit: str) -> SlabOpenError:
    error = ctypes.get_errno()
    return SlabOpenError(
        f"a slab's file cannot be watched ({os.strerror(error)}): raise fs.inotify.{limit}, or "
        "leave steps to be granted when they are sealed",
        facts={"errno": error},
    )
