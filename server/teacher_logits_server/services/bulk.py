"""The bulk service: streams leased payloads to readers that share no memory with the server.

Chunks go out one at a time, each cut when the one before has been taken, so that no stream
holds more than one. Streams take turns, a chunk each and the sessions in rotation (``turns``), and
the loop hears everybody else between two of them: a control call waits for a few chunks, however
many streams there are. A stream alone waits for no turn: the loop hears everybody while its chunk
is taken. A session has so many streams at most. A reader that takes nothing for ``stall`` is given
up, and the room with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import grpc

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, SessionExpiredError
from teacher_logits.v1 import bulk_service_pb2 as messages
from teacher_logits_server.caps import Cap
from teacher_logits_server.metrics.instruments import Instruments
from teacher_logits_server.services.patience import Patience
from teacher_logits_server.services.turns import Turns
from teacher_logits_server.services.wide_sockets import WideSockets

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from datetime import timedelta

    from teacher_logits_server.exporters.bringing import Bringing
    from teacher_logits_server.exporters.stream import StreamExporter

SERVICE = "teacher_logits.v1.BulkService"


class BulkService:
    """Streams what the exporter cuts, as it is: no message of protobuf is made.

    Args:
        stall: how long a reader may take nothing.
        max_session_streams: how many streams one session may have at a time.
        unix_paths: where this server's Unix sockets are; see ``wide_sockets``.
        instruments: what its streams and their bytes are counted in.
        bringing: brings what stays where it was computed, if anything does.
    """

    def __init__(
        self,
        *,
        exporter: StreamExporter,
        stall: timedelta,
        max_session_streams: int,
        unix_paths: Collection[str] = (),
        instruments: Instruments | None = None,
        bringing: Bringing | None = None,
    ) -> None:
        self._instruments = instruments or Instruments()
        self._exporter = exporter
        self._bringing = bringing
        self._sockets = WideSockets(unix_paths)
        self._stall_seconds = stall.total_seconds()
        self._turns = Turns()
        self._streams: Counter[str] = Counter()
        self._over: set[str] = set()
        self._cap = Cap(
            name="session_streams",
            most=max_session_streams,
            flag="--max-session-streams",
            what="streams to this session",
            way_out="read some to the end",
        )

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service's handler; its responses are bytes already."""
        read: grpc.RpcMethodHandler[messages.ReadPayloadRequest, bytes]
        read = grpc.unary_stream_rpc_method_handler(
            self.read_payload, request_deserializer=messages.ReadPayloadRequest.FromString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"ReadPayload": read})

    def end(self, session_ids: Collection[str]) -> None:
        """End the streams to these sessions, each with its next chunk. On the loop."""
        self._over.update(each for each in session_ids if self._streams[each])

    async def read_payload(
        self,
        request: messages.ReadPayloadRequest,
        context: grpc.aio.ServicerContext[messages.ReadPayloadRequest, bytes],
    ) -> None:
        """Write a payload's chunks, from an offset on."""
        session_id = request.session_id
        self._cap.check(self._streams[session_id])
        patience = Patience(self._stall_seconds)
        self._streams[session_id] += 1  # before anything is waited for
        self._instruments.streams.inc()
        try:
            await self._bring(request, context)
            reading = self._exporter.read(
                session_id,
                request.lease_id,
                request.offset_bytes,
                as_written=request.as_written,
            )
            with reading as chunks:
                self._sockets.look(asyncio.get_running_loop().time())
                while (chunk := await self._next(chunks, session_id)) is not None:
                    with patience:
                        await context.write(chunk)
                    self._instruments.streamed(len(chunk))
        except asyncio.CancelledError:
            if not patience.is_over:
                raise
            raise self._stalled(request) from None
        finally:
            self._streams[session_id] -= 1
            self._instruments.streams.dec()
            if not self._streams[session_id]:
                del self._streams[session_id]
                self._over.discard(session_id)
                self._turns.forget(session_id)
            patience.end()

    async def _bring(
        self,
        request: messages.ReadPayloadRequest,
        context: grpc.aio.ServicerContext[messages.ReadPayloadRequest, bytes],
    ) -> None:
        """Have a payload in a slab of this server that stays where it was computed."""
        if self._bringing is None:
            return
        left = context.time_remaining()
        seconds = self._stall_seconds if left is None else min(left, self._stall_seconds)
        lease = request.session_id, request.lease_id
        future = self._bringing.start(*lease, seconds=seconds)
        if future is not None:
            await asyncio.shield(asyncio.wrap_future(future))  # others may wait for it

    async def _next(self, chunks: Iterator[bytes], session_id: str) -> bytes | None:
        """Cut a chunk when it is this stream's turn; None where there is no more."""
        if len(self._streams) > 1 or self._streams[session_id] > 1:
            await self._turns.take(session_id)
        if session_id in self._over:
            raise SessionExpiredError(
                f"session {session_id} has ended, and its streams with it: open a new one",
                facts={"session_id": session_id},
            )
        return next(chunks, None)

    def _stalled(self, request: messages.ReadPayloadRequest) -> DeadlinePassedError:
        return DeadlinePassedError(
            f"the reader of lease {request.lease_id} took nothing for "
            f"{span_text(self._stall_seconds)} (--default-wait): the stream is over; it can be "
            "resumed while the lease lives",
            facts={"lease_id": request.lease_id, "waited_seconds": self._stall_seconds},
        )
