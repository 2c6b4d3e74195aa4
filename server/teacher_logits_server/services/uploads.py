"""Uploads: one stream of a payload's bytes into its room, chunk by chunk.

Promises: the chunks of a stream lie behind one another; the first may start anywhere up to the
first byte that has not come; each is what its checksum says before a byte of it is written;
nothing is written behind the payload's end. A thread that copies is waited for, whatever
becomes of the call: the room is let go of behind it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import crc32c

from teacher_logits.errors import ChecksumError, RequestInvalidError

if TYPE_CHECKING:
    from teacher_logits.v1 import registry_service_pb2 as messages
    from teacher_logits_server.lending.rooms import Writing

MAX_CHUNK_BYTES = 4 * 1024**2
_BYTES_ON_LOOP = 128 * 1024
"""Larger chunks are checked and copied on a thread, which lets the loop serve others."""


class Upload:
    """One stream of bytes.

    Args:
        room: where they go.
    """

    def __init__(self, *, writing: Writing, room: memoryview) -> None:
        self._writing = writing
        self._room = room
        self._behind: int | None = None

    @property
    def offset_bytes(self) -> int:
        """First byte that has not come."""
        return self._writing.offset_bytes

    def check_names(
        self, chunk: messages.WritePayloadRequest, *, session_id: str, payload_id: str
    ) -> None:
        """Refuse a chunk of another payload than the stream's."""
        if chunk.session_id in ("", session_id) and chunk.payload_id in ("", payload_id):
            return
        raise RequestInvalidError(
            f"a chunk names payload {chunk.payload_id[:128]!r} in the stream of {payload_id}; one "
            "stream brings one payload",
            facts={"payload_id": payload_id},
        )

    async def take(self, chunk: messages.WritePayloadRequest) -> None:
        """Write a chunk.

        Raises:
            RequestInvalidError: it leaves a gap, is too large, or goes beyond the payload.
            ChecksumError: it is not what its checksum says; what came before counts, and the
                upload can go on from there.
        """
        self._check_place(chunk)
        end = chunk.offset_bytes + len(chunk.data)
        if len(chunk.data) <= _BYTES_ON_LOOP:
            self._copy(chunk)
        else:
            await _to_the_end(asyncio.ensure_future(asyncio.to_thread(self._copy, chunk)))
        self._behind = end
        self._writing.advance(max(end, self._writing.offset_bytes))

    def _check_place(self, chunk: messages.WritePayloadRequest) -> None:
        size, offset, reached = len(chunk.data), chunk.offset_bytes, self.offset_bytes
        limit = self._writing.payload.size_bytes
        if size > MAX_CHUNK_BYTES:
            why = f"has {size} bytes; a chunk has at most {MAX_CHUNK_BYTES}"
        elif self._behind is not None and offset != self._behind:
            why = f"starts at byte {offset}, and the one before ended at {self._behind}"
        elif not 0 <= offset <= reached:
            why = f"starts at byte {offset}, and bytes have come up to {reached}: go on from there"
        elif offset + size > limit:
            why = f"ends at byte {offset + size} of a payload of {limit}"
        else:
            return
        raise RequestInvalidError(
            f"a chunk of payload {self._writing.payload.payload_id} {why}",
            facts={"offset_bytes": offset, "size_bytes": size, "expected_offset_bytes": reached},
        )

    def _copy(self, chunk: messages.WritePayloadRequest) -> None:
        data = chunk.data
        checksum = crc32c.crc32c(data)
        if checksum != chunk.crc32c:
            raise ChecksumError(
                f"the {len(data)} bytes at {chunk.offset_bytes} of payload "
                f"{self._writing.payload.payload_id} changed on the way (CRC-32C "
                f"{checksum:#010x}, and was {chunk.crc32c:#010x}): go on from byte "
                f"{self.offset_bytes}",
                facts={"offset_bytes": self.offset_bytes, "size_bytes": len(data)},
            )
        self._room[chunk.offset_bytes : chunk.offset_bytes + len(data)] = data


async def _to_the_end(work: asyncio.Future[None]) -> None:
    """Wait for a thread's work; one that is cancelled waits too, and is cancelled then."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    work.result()
