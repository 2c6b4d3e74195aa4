"""Opener for ``stream``: the bytes come in gRPC messages, into memory that is used again.

A chunk is a ``ReadPayloadResponse``, read in place: its header field by field, its data
copied or decoded once, into the buffer (``decoder``). A stream that breaks is resumed at the byte
it broke at. Every chunk's checksum is compared before its bytes count.
"""

from __future__ import annotations

import logging
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

import crc32c

from teacher_logits.encodings import CODEC_FACT
from teacher_logits.errors import (
    ChecksumError,
    DeadlinePassedError,
    PayloadInvalidError,
    StreamBrokenError,
    TeacherLogitsError,
)
from teacher_logits.transport import Transport
from teacher_logits_client.fallback import pause_before_resuming
from teacher_logits_client.openers.buffered_payload import BufferedPayload
from teacher_logits_client.openers.codec_terms import check_encoding
from teacher_logits_client.openers.decoder import Copying, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from teacher_logits.encodings import StreamCodec
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_client.openers.buffers import BufferPool
    from teacher_logits_client.openers.decoder import Sink

    Read = Callable[[str, int, float], Iterable[bytes]]

_log = logging.getLogger("teacher_logits_client")

_OFFSET_FIELD, _CRC_FIELD, _DATA_FIELD = 1, 2, 15
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Chunk(NamedTuple):
    """One chunk: where its data starts in the payload, its checksum, and the data in place."""

    offset_bytes: int
    crc32c: int
    data: memoryview


class StreamOpener:
    """Reads leases of one session from its server.

    Args:
        read: yields a lease's chunks from an offset on; called with the lease's id, the
            offset, and the seconds that it may take.
        read_as_written: likewise, whatever the lease's encoding; where its codec cannot carry
            what was written, that is what is read, and of the session's later leases too.
        codec: what the session was settled on; a lease in another is refused.
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
        codec: StreamCodec | None = None,
        read_as_written: Read | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read = read
        self._read_as_written = read_as_written
        self._pool = pool
        self._count = count
        self._codec = codec
        self._pause = pause
        self._has_refused = False

    def open(self, lease: LeaseTerms, *, until: float) -> BufferedPayload:
        """Return the lease's payload, all of it. See ``Opener.open``.

        Raises:
            PayloadInvalidError: what was decoded is none, or it comes in another codec.
            PoolFullError: this process has no memory for it.
        """
        if self._codec is not None:
            check_encoding(lease, self._codec)
        size = lease.payload.size_bytes
        buffer = self._pool.take(size)
        try:
            with memoryview(buffer)[:size] as room:
                self._bring(room, lease, until)
        except BaseException:
            self._pool.put(buffer)
            raise
        return BufferedPayload(buffer, size, self._pool)

    def close(self) -> None:
        """Keep nothing, so let go of nothing; the buffers are the client's."""

    def _bring(self, room: memoryview, lease: LeaseTerms, until: float) -> None:
        """Fill the room with the payload, whose bytes come encoded where the lease says so."""
        if lease.encoding is None:
            self._fill(Copying(room), self._read, lease, until)
            return
        as_written = self._read_as_written
        if as_written is None or not self._has_refused:
            try:
                decoder = Decoder(lease.payload, lease.encoding, room)
                self._fill(decoder, self._read, lease, until)
                return
            except PayloadInvalidError as error:
                if as_written is None or CODEC_FACT not in error.facts:
                    raise
                self._has_refused = True
                _log.warning(
                    "payload %s comes as it was written, and so does what is streamed to this "
                    "session from here on: %s",
                    lease.payload.payload_id,
                    error.message,
                )
        self._fill(Copying(room), as_written, lease, until)

    def _fill(self, sink: Sink, read: Read, lease: LeaseTerms, until: float) -> None:
        """Read streams one after the other until all has come."""
        filled, fruitless, size = 0, 0, sink.size_bytes
        while True:
            before = filled
            try:
                for message in read(lease.lease_id, filled, until - time.monotonic()):
                    data = _checked(parse_chunk(message), filled, size)
                    sink.take(data, filled)
                    filled += len(data)
                if filled < size:
                    raise _broken(f"ended at byte {filled} of {size}", lease)
                break
            except TeacherLogitsError as error:
                fruitless = 0 if filled > before else fruitless + 1
                pause = pause_before_resuming(error, fruitless=fruitless)
                if pause is None:
                    raise
                if time.monotonic() + pause >= until:
                    raise DeadlinePassedError(
                        f"payload {lease.payload.payload_id} had come to byte {filled} of "
                        f"{size} when its deadline passed; the last stream said: "
                        f"{error.message}",
                        facts={"offset_bytes": filled, "size_bytes": size},
                    ) from error
                self._pause(pause)
            finally:
                self._count(filled - before)
        sink.finish()


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


def _checked(chunk: Chunk, filled: int, size: int) -> memoryview:
    """Return the data of a chunk that begins where the last one ended, and is as it was sent."""
    stop = filled + len(chunk.data)
    if chunk.offset_bytes != filled or stop > size:
        raise _broken(
            f"sent bytes {chunk.offset_bytes} to {chunk.offset_bytes + len(chunk.data)} where "
            f"byte {filled} of {size} was next"
        )
    found = crc32c.crc32c(chunk.data)
    if found != chunk.crc32c:
        raise ChecksumError(
            f"the {len(chunk.data)} bytes from byte {filled} on changed on the way: their CRC-32C "
            f"is {found:08x}, and was {chunk.crc32c:08x} where they were sent",
            facts={"offset_bytes": filled, "size_bytes": len(chunk.data)},
        )
    return chunk.data


def _broken(what: str, lease: LeaseTerms | None = None) -> StreamBrokenError:
    whose = f" of payload {lease.payload.payload_id}" if lease else ""
    return StreamBrokenError(f"the stream{whose} {what}")
