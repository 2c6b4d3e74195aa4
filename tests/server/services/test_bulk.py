"""The bulk service before readers that take their time, over a real connection."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from google.rpc import status_pb2

from teacher_logits.errors import (
    DeadlinePassedError,
    LimitReachedError,
    SessionExpiredError,
)
from teacher_logits.v1 import bulk_service_pb2
from teacher_logits.v1.bulk_service_pb2 import ReadPayloadRequest
from teacher_logits.wire.errors import DETAILS_KEY, from_status
from teacher_logits_server.exporters.stream import StreamExporter, frame
from teacher_logits_server.interceptors import Guard
from teacher_logits_server.services.bulk import BulkService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits_server.exporters.bringing import Bringing

PATIENCE = 30.0
CHUNK = 2**20
ASKED = ReadPayloadRequest(session_id="s-1", lease_id="l-1")


class Endless:
    """An exporter of a payload without end, which says when its room is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    @contextmanager
    def read(
        self, session_id: str, lease_id: str, offset: int, *, as_written: bool
    ) -> Iterator[Iterator[bytes]]:
        try:
            yield self._chunks()
        finally:
            self.let_go.set()

    def _chunks(self) -> Iterator[bytes]:
        content = memoryview(bytes(CHUNK))
        while True:
            yield frame(0, content)


def service_of(exporter: Endless, *, stall: timedelta) -> BulkService:
    return BulkService(
        exporter=cast("StreamExporter", exporter), stall=stall, max_session_streams=4
    )


@asynccontextmanager
async def streaming(
    exporter: Endless, *, stall: timedelta, service: BulkService | None = None
) -> AsyncIterator[grpc.aio.UnaryStreamCall[bytes, bytes]]:
    """A stream, of which nothing was read yet."""
    service = service or service_of(exporter, stall=stall)
    server = grpc.aio.server(interceptors=(Guard(is_ready=lambda: True),))
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            "/teacher_logits.v1.BulkService/ReadPayload"
        )
        yield method(ASKED.SerializeToString(), timeout=PATIENCE)
    await server.stop(0)


async def read_all(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def test_a_reader_that_takes_nothing_is_given_up_and_told_so() -> None:
    async def scenario() -> DeadlinePassedError:
        exporter = Endless()
        async with streaming(exporter, stall=timedelta(milliseconds=50)) as call:
            await asyncio.wait_for(exporter.let_go.wait(), PATIENCE)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await read_all(call)
            details = dict(failure.value.trailing_metadata() or ())
            status = status_pb2.Status.FromString(cast("bytes", details[DETAILS_KEY]))
            error = from_status(status)
            assert isinstance(error, DeadlinePassedError)
            return error

    error = asyncio.run(scenario())
    assert "took nothing for 0.05 s (--default-wait)" in error.message


def test_a_reader_that_goes_away_gives_the_room_back() -> None:
    async def scenario() -> None:
        exporter = Endless()
        async with streaming(exporter, stall=timedelta(seconds=PATIENCE)) as call:
            chunk = await call.read()
            assert isinstance(chunk, bytes)
            assert bulk_service_pb2.ReadPayloadResponse.FromString(chunk).data == bytes(CHUNK)
            call.cancel()
            await asyncio.wait_for(exporter.let_go.wait(), PATIENCE)

    asyncio.run(scenario())


def test_a_stream_to_a_session_that_the_server_ends_is_told_so() -> None:
    async def scenario() -> TeacherLogitsError | None:
        exporter = Endless()
        patience = timedelta(seconds=PATIENCE)
        service = service_of(exporter, stall=patience)
        async with streaming(exporter, stall=patience, service=service) as call:
            assert isinstance(await call.read(), bytes)
            service.end(["s-another"])
            assert isinstance(await call.read(), bytes)
            service.end(["s-1", "s-another"])
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await read_all(call)
            await asyncio.wait_for(exporter.let_go.wait(), PATIENCE)
            details = dict(failure.value.trailing_metadata() or ())
            status = status_pb2.Status.FromString(cast("bytes", details[DETAILS_KEY]))
            return from_status(status)

    error = asyncio.run(scenario())
    assert isinstance(error, SessionExpiredError)
    assert error.facts == {"session_id": "s-1"}


class SlowLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes when the test says so."""

    now = 1000.0

    def time(self) -> float:
        return self.now


async def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SlowLoop)
    loop.now += seconds
    for _ in range(3):  # timers that are due, what they cancel, and what that wakes
        await asyncio.sleep(0)


def of_three_chunks(*, stall: timedelta) -> BulkService:
    return BulkService(
        exporter=cast("StreamExporter", ThreeChunks()), stall=stall, max_session_streams=4
    )


def test_a_reader_that_is_slow_and_takes_something_now_and_then_is_served_to_the_end() -> None:
    service = of_three_chunks(stall=timedelta(seconds=30))
    reader = SlowReader()

    async def scenario() -> None:
        context = cast("grpc.aio.ServicerContext[ReadPayloadRequest, bytes]", reader)
        serving = asyncio.ensure_future(service.read_payload(ReadPayloadRequest(), context))
        for _ in range(3):
            await pass_time(29)
            reader.take.set()
            await pass_time(0)
        await serving

    with closing(SlowLoop()) as loop:
        loop.run_until_complete(scenario())
    assert reader.taken == [b"one", b"two", b"three"]


def test_a_reader_that_stops_in_the_middle_is_given_up_after_the_wait() -> None:
    service = of_three_chunks(stall=timedelta(seconds=30))
    reader = SlowReader()

    async def scenario() -> None:
        context = cast("grpc.aio.ServicerContext[ReadPayloadRequest, bytes]", reader)
        serving = asyncio.ensure_future(service.read_payload(ReadPayloadRequest(), context))
        await pass_time(29)
        reader.take.set()
        await pass_time(0)
        await pass_time(29)
        assert not serving.done()
        await pass_time(2)
        with pytest.raises(DeadlinePassedError, match="took nothing for 30 s"):
            await serving

    with closing(SlowLoop()) as loop:
        loop.run_until_complete(scenario())
    assert reader.taken == [b"one"]


def test_under_several_streams_others_are_heard_between_any_two_chunks() -> None:
    told: list[str] = []
    service = of_three_chunks(stall=timedelta(seconds=PATIENCE))

    class Eager:
        """A call whose reader takes everything at once, which the loop hears on its next turn."""

        async def write(self, chunk: bytes) -> None:
            told.append("chunk")
            await asyncio.sleep(0)

    async def listen() -> None:
        while len([each for each in told if each == "chunk"]) < 6:
            told.append("heard")
            await asyncio.sleep(0)

    async def scenario() -> None:
        context = cast("grpc.aio.ServicerContext[ReadPayloadRequest, bytes]", Eager())
        streams = [service.read_payload(ReadPayloadRequest(), context) for _ in range(2)]
        await asyncio.gather(*streams, listen())

    asyncio.run(scenario())
    assert told.count("chunk") == 6
    assert ["chunk", "chunk"] not in [told[at : at + 2] for at in range(len(told) - 2)]


def test_streams_that_wait_for_their_payload_to_be_brought_count() -> None:
    class Never:
        """Brings what never comes."""

        def start(self, session_id: str, lease_id: str, *, seconds: float) -> Future[None]:
            return Future()

    service = BulkService(
        exporter=cast("StreamExporter", ThreeChunks()),
        stall=timedelta(seconds=PATIENCE),
        max_session_streams=1,
        bringing=cast("Bringing", Never()),
    )

    async def scenario() -> None:
        context = cast("grpc.aio.ServicerContext[ReadPayloadRequest, bytes]", Waits())
        first = asyncio.ensure_future(service.read_payload(ReadPayloadRequest(), context))
        await asyncio.sleep(0)
        with pytest.raises(LimitReachedError, match="--max-session-streams"):
            await service.read_payload(ReadPayloadRequest(), context)
        first.cancel()
        await asyncio.wait([first])
        again = asyncio.ensure_future(service.read_payload(ReadPayloadRequest(), context))
        await asyncio.sleep(0)
        assert not again.done()
        again.cancel()

    class Waits:
        """A call without a deadline."""

        def time_remaining(self) -> None:
            return None

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


class ThreeChunks:
    """An exporter of a payload of three chunks."""

    @contextmanager
    def read(
        self, session_id: str, lease_id: str, offset: int, *, as_written: bool
    ) -> Iterator[Iterator[bytes]]:
        yield iter((b"one", b"two", b"three"))


class SlowReader:
    """A call whose reader takes a chunk each time that it is told to."""

    def __init__(self) -> None:
        self.take = asyncio.Event()
        self.taken: list[bytes] = []

    async def write(self, chunk: bytes) -> None:
        await self.take.wait()
        self.take.clear()
        self.taken.append(chunk)
