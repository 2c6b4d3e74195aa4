"""Opener for ``stream``: the bytes come in gRPC messages, into memory that is used again.

A chunk is a ``ReadPayloadResponse``, read in place: its header field by field, its data
copied once, into the buffer. A stream that breaks is resumed at the byte it broke at. Every
chunk's checksum is compared before its bytes count.

Buffers are kept when their last view is gone, since fresh pages cost ten times a warm copy,
and are made of huge pages where the kernel has them.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import crc32c

from teacher_logits.errors import (
    ChecksumError,
    DeadlinePassedError,
    StreamBrokenError,
    TeacherLogitsError,
)
from teacher_logits.layout import round_up
from teacher_logits.transport import Transport
from teacher_logits_client.config import DEFAULT_BUFFER_BYTES
from teacher_logits_client.fallback import pause_before_resuming
from teacher_logits_client.openers.host_payload import HostPayload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from teacher_logits.terms import LeaseTerms

    Read = Callable[[str, int, float], Iterable[bytes]]

_OFFSET_FIELD, _CRC_FIELD, _DATA_FIELD = 1, 2, 15
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
#: A buffer is used for payloads down to this part of its size.
_LEAST_FILL = 0.5


class Chunk(NamedTuple):
    """One chunk: where its data starts in the payload, its checksum, and the data in place."""

    offset_bytes: int
    crc32c: int
    data: memoryview


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
        """Return a buffer of at least that size: the smallest idle one, or a new one."""
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
    buffer = mmap.mmap(
        -1,
        round_up(size_bytes, mmap.PAGESIZE),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


class StreamedPayload(HostPayload):
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


class StreamOpener:
    """Reads leases of one session from its server.

    Args:
        read: yields a lease's chunks from an offset on; called with the lease's id, the
            offset, and the seconds that it may take.
        count: told how many bytes came.
        pause: waits for some seconds before a broken stream is resumed.
    """

    transport = Transport.STREAM

    def __init__(
        self,
        read: Read,
        *,
        pool: BufferPool,
        count: Callable[[int], None],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read = read
        self._pool = pool
        self._count = count
        self._pause = pause

    def open(self, lease: LeaseTerms, *, until: float) -> StreamedPayload:
        """Return the lease's bytes, all of them. See ``Opener.open``."""
        size = lease.payload.size_bytes
        buffer = self._pool.take(size)
        try:
            with memoryview(buffer)[:size] as room:
                self._fill(room, lease, until)
        except BaseException:
            self._pool.put(buffer)
            raise
        return StreamedPayload(buffer, size, self._pool)

    def close(self) -> None:
        """Keep nothing, so let go of nothing; the buffers are the client's."""

    def _fill(self, room: memoryview, lease: LeaseTerms, until: float) -> None:
        """Read streams one after the other until the room is full."""
        filled, fruitless = 0, 0
        while True:
            before = filled
            try:
                for message in self._read(lease.lease_id, filled, until - time.monotonic()):
                    filled += _store(parse_chunk(message), room, filled)
                if filled == len(room):
                    return
                raise _broken(f"ended at byte {filled} of {len(room)}", lease)
            except TeacherLogitsError as error:
                fruitless = 0 if filled > before else fruitless + 1
                pause = pause_before_resuming(error, fruitless=fruitless)
                if pause is None:
                    raise
                if time.monotonic() + pause >= until:
                    raise DeadlinePassedError(
                        f"payload {lease.payload.payload_id} had come to byte {filled} of "
                        f"{len(room)} when its deadline passed; the last stream said: "
                        f"{error.message}",
                        facts={"offset_bytes": filled, "size_bytes": len(room)},
                    ) from error
                self._pause(pause)
            finally:
                self._count(filled - before)


def parse_chunk(message: bytes) -> Chunk:
    """Read one ``ReadPayloadResponse`` without copying its data.

    Raises:
        StreamBrokenError: it is none.
    """
    view, at = memoryview(message), 0
    offset, checksum, data = 0, 0, view[:0]
    try:
        while at < len(view):
            tag, at = _varint(view, at)
            field, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                number, at = _varint(view, at)
                offset = number if field == _OFFSET_FIELD else offset
            elif kind == _FIXED32:
                (number,) = struct.unpack_from("<I", view, at)
                checksum, at = (number if field == _CRC_FIELD else checksum), at + 4
            elif kind == _BYTES:
                length, at = _varint(view, at)
                if at + length > len(view):
                    raise IndexError
                data, at = (view[at : at + length] if field == _DATA_FIELD else data), at + length
            elif kind == _FIXED64:
                at += 8
            else:
                raise IndexError
    except (IndexError, struct.error):
        raise _broken(f"sent {len(message)} bytes that are no chunk, at byte {at}") from None
    return Chunk(offset, checksum, data)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    number, shift = 0, 0
    while True:
        byte = view[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
        if shift > 63:
            raise IndexError


def _store(chunk: Chunk, room: memoryview, filled: int) -> int:
    """Copy a chunk to where the last one ended; return its bytes."""
    size = len(chunk.data)
    if chunk.offset_bytes != filled or filled + size > len(room):
        raise _broken(
            f"sent bytes {chunk.offset_bytes} to {chunk.offset_bytes + size} where byte {filled} "
            f"of {len(room)} was next"
        )
    found = crc32c.crc32c(chunk.data)
    if found != chunk.crc32c:
        raise ChecksumError(
            f"the {size} bytes from byte {filled} on changed on the way: their CRC-32C is "
            f"{found:08x}, and was {chunk.crc32c:08x} where they were sent",
            facts={"offset_bytes": filled, "size_bytes": size},
        )
    room[filled : filled + size] = chunk.data
    return size


def _broken(what: str, lease: LeaseTerms | None = None) -> StreamBrokenError:
    whose = f" of payload {lease.payload.payload_id}" if lease else ""
    return StreamBrokenError(f"the stream{whose} {what}")
