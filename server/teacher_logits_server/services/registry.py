"""The service of publishers: admission, reservations with their room, streamed bytes, seals.

Promises: a reservation of a publisher that streams waits for its room and its turn as long as
the call's deadline (``PoolFullError`` then) and ``default_wait`` (``DeadlinePassedError``: it may
be asked again) allow, and one whose call ends before is given up with it; no byte is written
outside of what was reserved, nor out of order; a stream that breaks goes on where it was; a
writer that sends nothing for ``default_wait`` is given up, and keeps its reservation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    DrainingError,
    PoolFullError,
    RequestInvalidError,
    TeacherLogitsError,
)
from teacher_logits.protocol import OURS, agree
from teacher_logits.shard_parts import shard_of
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.v1 import registry_service_pb2 as messages
from teacher_logits.v1 import registry_service_pb2_grpc as stubs
from teacher_logits.wire import teacher_from_wire
from teacher_logits.wire.protocol import spoken_from_wire
from teacher_logits.wire.session import session_to_wire
from teacher_logits.wire.transport import probe_from_wire
from teacher_logits_server.access import owner
from teacher_logits_server.services.opening import Opening, teller
from teacher_logits_server.services.patience import Patience
from teacher_logits_server.services.session_log import PUBLISHER, log_opened, log_refused
from teacher_logits_server.services.uploads import Upload
from teacher_logits_server.settlement.device_offers import DeviceOffer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from grpc.aio import ServicerContext

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.services.publishing import PublisherCalls
    from teacher_logits_server.services.waiting import Waiting
    from teacher_logits_server.slabs import ServerSlabs


class RegistryService(stubs.RegistryServiceServicer):
    """Admits publishers and takes what they write.

    Args:
        broker_path: where the broker listens; empty where there is none.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        slabs: ServerSlabs,
        calls: PublisherCalls,
        waiting: Waiting,
        broker_path: str,
    ) -> None:
        self._ledger = ledger
        self._slabs = slabs
        self._calls = calls
        self._waiting = waiting
        self._broker_path = broker_path
        #: How many calls wait for the room of one request.
        self._reserving: Counter[tuple[str, str]] = Counter()

    async def OpenPublisher(
        self,
        request: messages.OpenPublisherRequest,
        context: ServicerContext[messages.OpenPublisherRequest, messages.OpenPublisherResponse],
    ) -> messages.OpenPublisherResponse:
        """Admit a publisher (``opening``), or refuse it with every rule that it breaks."""
        agreed = agree(spoken_from_wire(request), OURS)
        profile = teacher_from_wire(request.profile)
        try:
            admit = partial(
                self._ledger.open_publisher,
                request_id=request.request_id,
                protocol_version=agreed.version,
                features=agreed.features,
                profile=profile,
                offer=_offer(request),
                owner=owner(),
            )
            opening = Opening(self._ledger, admit, teller(context))
            opened = await opening.wait(self._waiting, self._waiting.seconds_for(context))
        except TeacherLogitsError as error:
            log_refused(_publisher(profile), error, what=PUBLISHER)
            raise
        log_opened(_publisher(profile), opened, what=PUBLISHER)
        return messages.OpenPublisherResponse(
            session=session_to_wire(opened.terms),
            broker_path=self._broker_path,
            nonce=opened.nonce,
        )

    async def ReservePayload(
        self,
        request: messages.ReservePayloadRequest,
        context: ServicerContext[messages.ReservePayloadRequest, messages.ReservePayloadResponse],
    ) -> messages.ReservePayloadResponse:
        """Claim the rows of one shard of a step, and wait for the room of what is streamed."""
        response = self._calls.reserve(request)
        if not self._streams(request.session_id):
            return response
        key = request.session_id, request.request_id
        self._reserving[key] += 1
        has_room = False
        try:
            await self._room(request, response.payload_id, self._waiting.seconds_for(context))
            has_room = True
        finally:
            self._reserving[key] -= 1
            if not self._reserving[key]:
                del self._reserving[key]
                if not has_room:
                    self._give_up(request.session_id, response.payload_id)
        return response

    async def WritePayload(
        self,
        request_iterator: AsyncIterator[messages.WritePayloadRequest],
        context: ServicerContext[messages.WritePayloadRequest, messages.WritePayloadResponse],
    ) -> messages.WritePayloadResponse:
        """Take a payload's bytes, from any offset that has been reached on."""
        patience = Patience(self._waiting.longest_seconds)
        try:
            return await self._write(aiter(request_iterator), patience)
        finally:
            patience.end()

    async def _write(
        self, chunks: AsyncIterator[messages.WritePayloadRequest], patience: Patience
    ) -> messages.WritePayloadResponse:
        first = await _next(chunks, patience, reached=0)
        if first is None:
            raise RequestInvalidError("the first chunk names session and payload; none came")
        session_id, payload_id = first.session_id, first.payload_id
        with self._ledger.writing(session_id, payload_id) as writing:
            with self._slabs.room(writing.extent) as room:
                upload = Upload(writing=writing, room=room)
                chunk: messages.WritePayloadRequest | None = first
                while chunk is not None:
                    upload.check_names(chunk, session_id=session_id, payload_id=payload_id)
                    await upload.take(chunk)
                    chunk = await _next(chunks, patience, reached=upload.offset_bytes)
            return messages.WritePayloadResponse(offset_bytes=writing.offset_bytes)

    async def SealPayload(
        self,
        request: messages.SealPayloadRequest,
        context: ServicerContext[messages.SealPayloadRequest, messages.SealPayloadResponse],
    ) -> messages.SealPayloadResponse:
        """Make a payload readable and immutable."""
        # Its columns are looked into, and of a repeat every byte.
        await asyncio.to_thread(self._calls.seal, request, may_digest=True)
        return messages.SealPayloadResponse()

    async def AbandonPayload(
        self,
        request: messages.AbandonPayloadRequest,
        context: ServicerContext[messages.AbandonPayloadRequest, messages.AbandonPayloadResponse],
    ) -> messages.AbandonPayloadResponse:
        """Give a reservation up; twice is fine."""
        return self._calls.abandon(request)

    def _streams(self, session_id: str) -> bool:
        settlements = self._ledger.terms(session_id).settlements
        return any(each.writer_id == SERVER_WRITER for each in settlements)

    async def _room(
        self, request: messages.ReservePayloadRequest, payload_id: str, seconds: float
    ) -> None:
        """Wait until the payload has room in the server's slabs."""
        size_bytes = request.payload.size_bytes
        found_full: list[PoolFullError] = []

        async def look() -> bool | None:
            if self._ledger.draining:
                raise DrainingError("the server is shutting down and takes no new payloads")
            room = self._ledger.payload_room(request.session_id, payload_id)
            try:
                await asyncio.to_thread(self._slabs.room_for, room, size_bytes)
            except PoolFullError as error:
                found_full[:] = [error]
                return None
            return True

        def too_late(waited: float) -> TeacherLogitsError:
            (full,) = found_full
            holders = self._ledger.held_by(request.session_id)
            # The caller's own deadline says that the pool is full; ours, that it may ask again.
            kind = DeadlinePassedError if waited >= self._waiting.longest_seconds else PoolFullError
            return kind(
                f"no room after {span_text(waited)} for payload {payload_id}: {full.message}"
                + (f" ({holders})" if holders else ""),
                facts={**full.facts, "waited_seconds": waited},
                retry_after=full.retry_after,
            )

        await self._waiting.until(
            look,
            bell=self._waiting.room,
            seconds=seconds,
            too_late=too_late,
            session_id=request.session_id,
        )

    def _give_up(self, session_id: str, payload_id: str) -> None:
        """End a reservation that nobody will hear of."""
        try:
            self._ledger.abandon_payload(session_id, payload_id)
        except TeacherLogitsError:
            pass  # the session has ended, and its reservations with it


async def _next(
    chunks: AsyncIterator[messages.WritePayloadRequest], patience: Patience, *, reached: int
) -> messages.WritePayloadRequest | None:
    """Return the next chunk; None behind the last."""
    try:
        with patience:
            return await anext(chunks, None)
    except asyncio.CancelledError:
        if not patience.is_over:
            raise
        stall = patience.seconds
        raise DeadlinePassedError(
            f"the writer sent nothing for {span_text(stall)} (--default-wait), at byte "
            f"{reached}: the stream is over; go on from there while the reservation lasts",
            facts={"waited_seconds": stall, "offset_bytes": reached},
        ) from None


def _offer(request: messages.OpenPublisherRequest) -> DeviceOffer | None:
    if not request.HasField("probe"):
        return None
    return DeviceOffer(probe=probe_from_wire(request.probe), challenge=request.probe_challenge)


def _publisher(profile: TeacherProfile) -> dict[str, str | int]:
    return {
        "teacher_id": profile.teacher_id,
        "shard": shard_of(profile),
        "host_name": profile.hints.host_name,
        "pid": profile.hints.pid,
    }
