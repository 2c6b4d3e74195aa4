"""Buffered payloads: a lease's bytes, copied into a buffer of this process that is used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.openers.host_payload import HostPayload

if TYPE_CHECKING:
    import mmap

    from teacher_logits_client.openers.buffers import BufferPool


class BufferedPayload(HostPayload):
    """A payload in a buffer of this side."""

    copied = True

    def __init__(self, buffer: mmap.mmap, size_bytes: int, pool: BufferPool) -> None:
        super().__init__(memoryview(buffer)[:size_bytes])
        self._memory = buffer
        self._pool = pool

    def is_current(self) -> bool:
        """Say that it is: nobody else has these bytes."""
        return True

    def vacate(self) -> int:
        """Give the buffer back to the pool."""
        self._pool.put(self._memory)
        return 0
