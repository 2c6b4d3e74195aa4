"""The ``stream`` transport: a leased payload as chunks of bytes, framed by hand.

Each chunk is what protobuf would write for a ``ReadPayloadResponse``, byte for byte:

    | 08 varint offset | 15 crc32c, 4 bytes | 7a varint length | data ... |
      left out when 0     left out when 0      left out when empty

so that any gRPC client reads it with the plain stub, and the payload's bytes are copied
once (slab to message) instead of three times. A lease on some rows of a payload is streamed as a
payload of these rows alone, gathered from where their columns lie. The checksum is of the bytes
as they were read from the slab, or as they were encoded: what a session's codec makes of a payload
is made chunk by chunk (``encoder``).
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import crc32c

from teacher_logits.errors import RequestInvalidError
from teacher_logits.transport import Transport
from teacher_logits_server.exporters.encoder import Encoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits.cuts import Segment
    from teacher_logits.payload import Extent
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.lending.rooms import Pinned

ENCODED_CHUNK_BYTES = 1 << 18
"""Most bytes, and most entries looked at, of a chunk that is encoded: the server's loop hears
nobody while it makes one."""

MAX_HEADER_BYTES = 2 * (1 + 10) + 5
_OFFSET_TAG, _CRC_TAG, _DATA_TAG = b"\x08", b"\x15", b"\x7a"
_CRC = struct.Struct("<I")


class Rooms(Protocol):
    """Slabs that can be read here; ``slabs.ServerSlabs`` and ``foreign.ForeignSlabs``."""

    def room(self, extent: Extent) -> memoryview:
        """Return an extent's bytes; KeyError where its slab is none of these."""


class StreamExporter:
    """Cuts leased payloads into chunks of at most ``chunk_bytes``, whoever wrote them.

    Args:
        slabs: where slabs are looked for, one behind the other.
    """

    transport = Transport.STREAM

    def __init__(self, *, ledger: Ledger, slabs: Sequence[Rooms], chunk_bytes: int) -> None:
        self._ledger = ledger
        self._slabs = slabs
        self._chunk_bytes = chunk_bytes

    def start(self) -> None:
        """Nothing is to be started; the bulk service carries the bytes."""

    def stop(self) -> None:
        """Nothing is to be stopped."""

    @contextmanager
    def read(
        self, session_id: str, lease_id: str, offset_bytes: int, *, as_written: bool = False
    ) -> Iterator[Iterator[bytes]]:
        """Yield the chunks of a payload from an offset on, cut one at a time as they are taken.

        In the encoding of its lease, unless ``as_written``. The payload's room is not reused
        before the context is left, whatever becomes of the lease meanwhile.

        Raises:
            RequestInvalidError: the offset is outside the stream.
            TeacherLogitsError: whatever the ledger says of the session and the lease.
            CodecError: with a chunk, where the codec cannot carry what was written.
        """
        with self._ledger.pin(session_id, lease_id) as pinned:
            payload, encoding = pinned.payload, None if as_written else pinned.encoding
            size = payload.size_bytes if encoding is None else encoding.size_bytes
            if not 0 <= offset_bytes <= size:
                raise RequestInvalidError(
                    f"a stream cannot start at byte {offset_bytes} of payload "
                    f"{payload.payload_id}, which has {size}",
                    facts={"offset_bytes": offset_bytes, "size_bytes": size},
                )
            with self._room(pinned.room) as room:
                if encoding is None:
                    yield self._chunks(pinned, room, offset_bytes)
                else:
                    yield self._encoded(Encoder(pinned, encoding, room), offset_bytes, size)

    def _room(self, extent: Extent) -> memoryview:
        for slabs in self._slabs:
            try:
                return slabs.room(extent)
            except KeyError:
                continue
        raise KeyError(extent.slab_id)  # a pinned extent's slab is in one of them

    def _chunks(self, pinned: Pinned, room: memoryview, offset: int) -> Iterator[bytes]:
        size = pinned.payload.size_bytes
        for start in range(offset, size, self._chunk_bytes):
            stop = min(start + self._chunk_bytes, size)
            yield frame(start, *_parts(pinned.segments, room, start, stop))

    def _encoded(self, encoder: Encoder, offset: int, size: int) -> Iterator[bytes]:
        most = min(self._chunk_bytes, ENCODED_CHUNK_BYTES)
        while offset < size:
            stop = encoder.stop_of(offset, most)
            yield frame(offset, *encoder.parts(offset, stop))
            offset = stop


def frame(offset_bytes: int, *data: bytes | memoryview) -> bytes:
    """Return the bytes of one ``ReadPayloadResponse``, whose data may lie in several places."""
    checksum, size_bytes = 0, 0
    for part in data:
        checksum = crc32c.crc32c(part, checksum)
        size_bytes += len(part)
    header = b""
    if offset_bytes:
        header += _OFFSET_TAG + _varint(offset_bytes)
    if checksum:
        header += _CRC_TAG + _CRC.pack(checksum)
    if size_bytes:
        header += _DATA_TAG + _varint(size_bytes)
    return b"".join((header, *data))


def _parts(
    segments: Sequence[Segment], room: memoryview, start: int, stop: int
) -> Iterator[bytes | memoryview]:
    """Yield the payload's bytes from ``start`` to ``stop``, in place; padding as zeros."""
    at = start
    for each in segments:
        first = max(each.offset_bytes, at)
        last = min(each.offset_bytes + each.size_bytes, stop)
        if first >= last:
            continue
        if first > at:
            yield bytes(first - at)
        shift = each.source_offset_bytes - each.offset_bytes
        yield room[first + shift : last + shift]
        at = last
    if at < stop:
        yield bytes(stop - at)


def _varint(number: int) -> bytes:
    """Protobuf's form of a number that is not negative: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
