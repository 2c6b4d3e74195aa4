"""Buffers: memory of this process that streamed payloads come into, and that is used again.

Buffers are kept when their last view is gone, since fresh pages cost ten times a warm copy,
and are made of huge pages where the kernel has them. Refuses what the kernel has no memory for.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

from teacher_logits.errors import PoolFullError
from teacher_logits.layout import round_up
from teacher_logits_client.config import DEFAULT_BUFFER_BYTES

#: A buffer is used for payloads down to this part of its size.
_LEAST_FILL = 0.5


class BufferPool:
    """Buffers of finished streams, kept for the next; shared by all sessions of a client.

    Args:
        most_bytes: bytes of idle buffers that are kept; the oldest go first.
    """

    def __init__(self, most_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        self._most_bytes = most_bytes
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that wait for use."""
        with self._lock:
            return sum(len(buffer) for buffer in self._idle)

    def take(self, size_bytes: int) -> mmap.mmap:
        """Return a buffer of at least that size: the smallest idle one, or a new one.

        Raises:
            PoolFullError: the kernel has no memory for a new one.
        """
        with self._lock:
            fits = [b for b in self._idle if len(b) * _LEAST_FILL <= size_bytes <= len(b)]
            if fits:
                best = min(fits, key=len)
                self._idle.remove(best)
                return best
        return _new_buffer(size_bytes)

    def put(self, buffer: mmap.mmap) -> None:
        """Take back a buffer that nothing views."""
        with self._lock:
            self._idle.append(buffer)
            kept = sum(len(each) for each in self._idle)
            while kept > self._most_bytes:
                kept -= len(self._idle.pop(0))


def _new_buffer(size_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        buffer = mmap.mmap(-1, round_up(size_bytes, mmap.PAGESIZE), flags=flags)
    except OSError as error:
        raise PoolFullError(
            f"a payload of {size_bytes} bytes is to be streamed, and this process gets no memory "
            f"for it ({error}): ask for fewer rows or entries, or close leases first",
            facts={"size_bytes": size_bytes},
        ) from error
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
