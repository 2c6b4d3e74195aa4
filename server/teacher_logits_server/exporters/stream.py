"""The ``stream`` transport: a leased payload as chunks of bytes, framed by hand.

Each chunk is what protobuf would write for a ``ReadPayloadResponse``, byte for byte:

    | 08 varint offset | 15 crc32c, 4 bytes | 7a varint length | data ... |
      left out when 0     left out when 0      left out when empty

so that any gRPC client reads it with the plain stub, and the payload's bytes are copied
once (slab to message) instead of three times. The checksum is of the bytes as they were
read from the slab.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

import crc32c

from teacher_logits.errors import RequestInvalidError
from teacher_logits.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_server.exporters import Slabs
    from teacher_logits_server.ledger import Ledger

MAX_HEADER_BYTES = 2 * (1 + 10) + 5
_OFFSET_TAG, _CRC_TAG, _DATA_TAG = b"\x08", b"\x15", b"\x7a"
_CRC = struct.Struct("<I")


class StreamExporter:
    """Cuts leased payloads into chunks of at most ``chunk_bytes``."""

    transport = Transport.STREAM

    def __init__(self, *, ledger: Ledger, slabs: Slabs, chunk_bytes: int) -> None:
        self._ledger = ledger
        self._slabs = slabs
        self._chunk_bytes = chunk_bytes

    def start(self) -> None:
        """Nothing is to be started; the bulk service carries the bytes."""

    def stop(self) -> None:
        """Nothing is to be stopped."""

    @contextmanager
    def read(self, session_id: str, lease_id: str, offset_bytes: int) -> Iterator[Iterator[bytes]]:
        """Yield the chunks of a payload from an offset on, cut one at a time as they are taken.

        The payload's room is not reused before the context is left, whatever becomes of the
        lease meanwhile.

        Raises:
            RequestInvalidError: the offset is outside the payload.
            TeacherLogitsError: whatever the ledger says of the session and the lease.
        """
        with self._ledger.pin(session_id, lease_id) as (payload, extent):
            if not 0 <= offset_bytes <= payload.size_bytes:
                raise RequestInvalidError(
                    f"a stream cannot start at byte {offset_bytes} of payload "
                    f"{payload.payload_id}, which has {payload.size_bytes}",
                    facts={"offset_bytes": offset_bytes, "size_bytes": payload.size_bytes},
                )
            with self._slabs.room(extent) as room, room[: payload.size_bytes] as data:
                yield self._chunks(data, offset_bytes)

    def _chunks(self, data: memoryview, offset: int) -> Iterator[bytes]:
        for start in range(offset, len(data), self._chunk_bytes):
            with data[start : start + self._chunk_bytes] as part:
                yield frame(start, part)


def frame(offset_bytes: int, data: memoryview) -> bytes:
    """Return the bytes of one ``ReadPayloadResponse``."""
    checksum = crc32c.crc32c(data)
    parts: list[bytes | memoryview] = []
    if offset_bytes:
        parts += (_OFFSET_TAG, _varint(offset_bytes))
    if checksum:
        parts += (_CRC_TAG, _CRC.pack(checksum))
    if data:
        parts += (_DATA_TAG, _varint(len(data)), data)
    return b"".join(parts)


def _varint(number: int) -> bytes:
    """Protobuf's form of a number that is not negative: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
