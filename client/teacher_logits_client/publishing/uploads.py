"""Uploads: the way of a publisher that shares no memory with the server.

A draft is written into a buffer of this side, which later drafts use again. To seal it, its
bytes are sent in checked chunks of 1 MiB into room that the server holds for them; a stream
that breaks goes on at the byte that the server says it has come to, within the deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    DeadlinePassedError,
    PoolFullError,
    ReservationLapsedError,
    ServerUnreachableError,
    StreamBrokenError,
    TeacherLogitsError,
)
from teacher_logits.payload_room import HostRoom
from teacher_logits_client.calls.registry import chunk
from teacher_logits_client.fallback import pause_before_resuming
from teacher_logits_client.slabs.claims import ABANDON_SECONDS, Granted, seconds_until

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Mapping

    from teacher_logits.devices.probe import Probe
    from teacher_logits.terms import Reservation
    from teacher_logits_client.calls.registry import RegistryCalls
    from teacher_logits_client.line import Line
    from teacher_logits_client.openers.buffers import BufferPool
    from teacher_logits_client.slabs.claims import Claim, Sealing
    from teacher_logits_client.slabs.placed_columns import Registered

CHUNK_BYTES = 1 << 20


@dataclass
class _Upload:
    """A draft's bytes, and how many of them have come. Of the one thread that seals it."""

    buffer: mmap.mmap
    size_bytes: int
    sent_bytes: int = 0
    #: A stream broke, and the server is to be asked how far it came.
    is_unsure: bool = False

    @property
    def is_complete(self) -> bool:
        return self.sent_bytes == self.size_bytes


class Uploads:
    """See ``claims.Way``.

    Args:
        buffers: where drafts are written to.
        pause: waits for some seconds before a broken stream is resumed.
    """

    line: Line | None = None
    probe: Probe | None = None
    registered: Mapping[str, Registered] = MappingProxyType({})

    def __init__(
        self,
        session_id: str,
        *,
        registry: RegistryCalls,
        buffers: BufferPool,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session_id = session_id
        self._registry = registry
        self._buffers = buffers
        self._pause = pause
        self._lock = threading.Lock()
        self._uploads: dict[str, _Upload] = {}

    def reserve(self, claim: Claim, *, until: float) -> Granted:
        """Claim rows; the server waits for room. See ``Way.reserve``."""
        reservation = self._claim(claim, until)
        size = claim.payload.size_bytes
        buffer = self._buffers.take(size)
        with self._lock:
            self._uploads[reservation.payload_id] = _Upload(buffer, size)
        return Granted(reservation=reservation, room=HostRoom(memoryview(buffer)[:size]))

    def announce(self, payload_id: str, valid_count: int | None) -> None:
        """Do nothing: what was not sent yet lies where no reader looks."""

    def seal(self, payload_id: str, sealing: Sealing, *, until: float) -> None:
        """Send the bytes, then have them read; see ``Way.seal``."""
        with self._lock:
            upload = self._uploads.get(payload_id)
        if upload is None:
            raise ReservationLapsedError(
                f"payload {payload_id} is not being written any more: reserve its rows again",
                facts={"payload_id": payload_id},
            )
        if not upload.is_complete:
            self._send(payload_id, upload, until)
        self._registry.seal(
            self._session_id,
            payload_id,
            extent=None,
            bad_row_count=sealing.bad_row_count,
            valid_count=sealing.valid_count,
            digest=sealing.digest,
            timeout=seconds_until(until),
        )
        self._forget(payload_id)

    def abandon(self, payload_id: str, *, until: float) -> bool:
        """Give a reservation up; see ``Way.abandon``."""
        self._forget(payload_id)
        return self._registry.abandon(self._session_id, payload_id, timeout=seconds_until(until))

    def wait_free(self, *, until: float, but_copied: bool = False) -> None:
        """Do nothing: what was sealed lies in the server's memory."""

    def give_up(self, claim: Claim) -> None:
        """Give up a claim that was not answered; see ``Way.give_up``."""
        until = time.monotonic() + ABANDON_SECONDS
        granted = self.reserve(claim, until=until)
        self.abandon(granted.reservation.payload_id, until=until)

    def close(self) -> None:
        """Forget all drafts."""
        with self._lock:
            self._uploads.clear()

    def _claim(self, claim: Claim, until: float) -> Reservation:
        """Claim rows again and again, since the server waits for room only so long."""
        while True:
            try:
                return self._registry.reserve(
                    self._session_id,
                    request_id=claim.request_id,
                    payload=claim.payload,
                    row_positions=claim.row_positions,
                    real_rows=claim.real_rows,
                    timeout=seconds_until(until),
                )
            except DeadlinePassedError as error:
                if "need_bytes" not in error.facts:
                    raise  # it was not answered
                if time.monotonic() >= until:
                    raise PoolFullError(
                        error.message, facts=error.facts, retry_after=error.retry_after
                    ) from None
                claim.request_id = secrets.token_hex(12)  # the server has given the last one up

    def _forget(self, payload_id: str) -> None:
        with self._lock:
            upload = self._uploads.pop(payload_id, None)
        if upload is not None:
            self._buffers.put(upload.buffer)

    def _send(self, payload_id: str, upload: _Upload, until: float) -> None:
        """Send streams one after the other until all has come."""
        data = memoryview(upload.buffer)[: upload.size_bytes]
        fruitless = 0
        while True:
            asks = upload.is_unsure
            chunks = () if asks else _chunks(data, upload.sent_bytes)
            upload.is_unsure = True
            try:
                sent = self._registry.write(
                    self._session_id, payload_id, chunks, timeout=seconds_until(until)
                )
            except TeacherLogitsError as error:
                fruitless += 1
                self._pause_before_more(error, fruitless, payload_id, upload, until)
                continue
            fruitless = 0 if sent > upload.sent_bytes else fruitless
            upload.sent_bytes, upload.is_unsure = sent, False
            if upload.is_complete:
                return
            if not asks:
                fruitless += 1
                self._pause_before_more(_short(upload), fruitless, payload_id, upload, until)

    def _pause_before_more(
        self,
        error: TeacherLogitsError,
        fruitless: int,
        payload_id: str,
        upload: _Upload,
        until: float,
    ) -> None:
        pause = pause_before_resuming(error, fruitless=fruitless)
        if isinstance(error, StreamBrokenError) and pause is None:
            raise ServerUnreachableError(  # there is no other way to try
                f"payload {payload_id} had been sent to byte {upload.sent_bytes} of "
                f"{upload.size_bytes}, and {fruitless} streams one after the other brought no "
                f"more; the last one said: {error.message}",
                facts={"offset_bytes": upload.sent_bytes, "size_bytes": upload.size_bytes},
            ) from error
        if pause is None:
            raise error
        if time.monotonic() + pause >= until:
            raise DeadlinePassedError(
                f"payload {payload_id} had been sent to byte {upload.sent_bytes} of "
                f"{upload.size_bytes} when the deadline passed; the last stream said: "
                f"{error.message}",
                facts={"offset_bytes": upload.sent_bytes, "size_bytes": upload.size_bytes},
            ) from error
        self._pause(pause)


def _chunks(data: memoryview, start: int) -> Iterator[bytes]:
    for offset in range(start, len(data), CHUNK_BYTES):
        with data[offset : offset + CHUNK_BYTES] as part:
            yield chunk(part, offset)


def _short(upload: _Upload) -> StreamBrokenError:
    return StreamBrokenError(
        f"an upload ended at byte {upload.sent_bytes} of {upload.size_bytes}",
        facts={"offset_bytes": upload.sent_bytes, "size_bytes": upload.size_bytes},
    )
