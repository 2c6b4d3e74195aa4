"""The guard around every RPC, before a real gRPC server and its own client."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from prometheus_client import CollectorRegistry

from teacher_logits.errors import (
    DrainingError,
    NotAvailable,
    PoolFullError,
    RequestInvalidError,
    SessionRefusedError,
    TeacherLogitsError,
    Violation,
)
from teacher_logits.wire.errors import DETAILS_KEY, from_status
from teacher_logits_server.interceptors import Guard
from teacher_logits_server.metrics.refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    Handle = Callable[..., Awaitable[object]]
    Context = grpc.aio.ServicerContext[StringValue, bytes]

T = TypeVar("T")
SECRET = "the password is swordfish"
PATIENCE = 20.0
UNARY, STREAM = "/test.Service/Unary", "/test.Service/Stream"
HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


async def echo(request: StringValue, context: object) -> StringValue:
    """Return what came."""
    return request


def failing(error: BaseException) -> Handle:
    """A handler that fails."""

    async def fail(request: StringValue, context: object) -> StringValue:
        raise error

    return fail


@dataclass(frozen=True)
class CallDetails:
    """What gRPC says of a call before it is handled."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


class TimedContext:
    """A context of which nothing but its deadline is looked at."""

    def time_remaining(self) -> float:
        return PATIENCE


class Caller:
    """A client of one server, with the plainest stubs there are."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def unary(
        self, request: bytes, *, method: str = UNARY, timeout: float | None = PATIENCE
    ) -> bytes:
        """Make a unary call."""
        stub: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(method)
        return await stub(request, timeout=timeout)

    def stream(
        self, *, method: str = STREAM, timeout: float | None = PATIENCE
    ) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        """Start a streaming call."""
        stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(method)
        return stub(b"", timeout=timeout)

    async def call(self, shape: str, *, timeout: float | None = PATIENCE) -> object:
        """Make a call of either shape, to its end."""
        if shape == "unary":
            return await self.unary(b"", timeout=timeout)
        return [chunk async for chunk in self.stream(timeout=timeout)]


@asynccontextmanager
async def served(
    *,
    unary: Handle = echo,
    stream: Handle = echo,
    is_ready: Callable[[], bool] = lambda: True,
    registry: CollectorRegistry | None = None,
) -> AsyncIterator[Caller]:
    """A server with one RPC of each shape, and health."""
    guard = Guard(is_ready=is_ready, refusals=Refusals(registry))
    server = grpc.aio.server(interceptors=(guard,))
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(
            unary, StringValue.FromString, StringValue.SerializeToString
        ),
        "Stream": grpc.unary_stream_rpc_method_handler(stream, StringValue.FromString),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", methods),)
    )
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Caller(channel)
    finally:
        await server.stop(0)


def run(scenario: Coroutine[object, object, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 2 * PATIENCE))


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, TeacherLogitsError]:
    """The status and the error of the tree that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    error = failure.value
    details = {key: value for key, value in error.trailing_metadata() or ()}
    found = from_status(status_pb2.Status.FromString(details[DETAILS_KEY]))
    assert found is not None
    return error.code(), found


def test_a_call_that_is_well_formed_reaches_its_handler_as_a_message() -> None:
    async def scenario() -> bytes:
        async with served() as caller:
            return await caller.unary(StringValue(value="hello").SerializeToString())

    assert StringValue.FromString(run(scenario())).value == "hello"


@pytest.mark.parametrize("shape", ["unary", "stream"])
def test_a_call_without_a_deadline_is_refused(shape: str) -> None:
    async def scenario() -> tuple[grpc.StatusCode, TeacherLogitsError]:
        async with served() as caller:
            return await refusal(caller.call(shape, timeout=None))

    code, error = run(scenario())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, RequestInvalidError)
    assert "needs a deadline" in error.message


@pytest.mark.parametrize("bad", [b"\xff\xff\xff", b"\n\x05abc", b"\n\x01\xff"])
def test_bytes_that_are_no_message_are_refused_with_their_number(bad: bytes) -> None:
    async def scenario() -> tuple[grpc.StatusCode, TeacherLogitsError]:
        async with served() as caller:
            return await refusal(caller.unary(bad))

    code, error = run(scenario())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.facts == {"method": "/test.Service/Unary", "size_bytes": len(bad)}


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (DrainingError("later"), grpc.StatusCode.UNAVAILABLE),
        (
            PoolFullError("full", facts={"need_bytes": 7}, retry_after=timedelta(seconds=3)),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (
            SessionRefusedError(
                [Violation(rule=f"rule_{n}", message="m" * 200) for n in range(500)]
            ),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ],
)
@pytest.mark.parametrize("shape", ["unary", "stream"])
def test_an_error_of_the_tree_arrives_as_what_it_was(
    raised: TeacherLogitsError, code: grpc.StatusCode, shape: str
) -> None:
    async def scenario() -> tuple[grpc.StatusCode, TeacherLogitsError]:
        async with served(unary=failing(raised), stream=failing(raised)) as caller:
            return await refusal(caller.call(shape))

    arrived_code, error = run(scenario())
    assert arrived_code is code
    assert type(error) is type(raised)
    assert error.message[:100] == raised.message[:100]
    assert error.facts.items() >= raised.facts.items()
    assert error.retry_after == raised.retry_after


@pytest.mark.parametrize("shape", ["unary", "stream"])
def test_any_other_failure_is_logged_and_keeps_its_text_to_itself(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> tuple[grpc.StatusCode, TeacherLogitsError]:
        fail = failing(KeyError(SECRET))
        async with served(unary=fail, stream=fail) as caller:
            return await refusal(caller.call(shape))

    code, error = run(scenario())
    assert code is grpc.StatusCode.INTERNAL
    assert SECRET not in error.message
    assert SECRET in caplog.text
    assert [record.levelno for record in ours(caplog.records)] == [logging.ERROR]


def test_a_stream_that_fails_half_way_ends_with_the_error_behind_its_chunks() -> None:
    async def two_then_fail(request: StringValue, context: Context) -> None:
        await context.write(b"one")
        await context.write(b"two")
        raise DrainingError("enough")

    async def scenario() -> tuple[list[bytes], str]:
        chunks = []
        async with served(stream=two_then_fail) as caller:
            try:
                async for chunk in caller.stream():
                    chunks.append(chunk)
            except grpc.aio.AioRpcError as error:
                return chunks, error.details() or ""
        return chunks, ""

    assert run(scenario()) == ([b"one", b"two"], "enough")


def ours(records: list[logging.LogRecord]) -> list[logging.LogRecord]:
    """Return what this project logged; asyncio speaks for loops of other tests too."""
    return [record for record in records if record.name.startswith("teacher_logits")]


def test_a_handler_that_ends_its_call_itself_is_left_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def abort(request: StringValue, context: Context) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")

    async def scenario() -> tuple[grpc.StatusCode, str | None]:
        async with served(unary=abort) as caller:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await caller.unary(b"")
            return failure.value.code(), failure.value.details()

    assert run(scenario()) == (grpc.StatusCode.NOT_FOUND, "no such thing")
    assert not ours(caplog.records)


def test_a_caller_that_goes_away_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def write_for_ever(request: StringValue, context: Context) -> None:
        try:
            while True:
                await context.write(bytes(2**20))
        finally:
            ended.set()

    async def scenario() -> None:
        async with served(stream=write_for_ever) as caller:
            await caller.stream().read()
            await caller.channel.close()
            await ended.wait()

    run(scenario())
    heard = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record for record in heard if record.name != "asyncio"] == []


def test_a_write_that_fails_waits_for_the_news_that_its_reader_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> bool:
        failed = asyncio.Event()

        async def fail(request: bytes, context: object) -> None:
            failed.set()
            raise grpc.aio.InternalError("send failed")

        async def find(details: object) -> grpc.RpcMethodHandler[bytes, object]:
            return cast(
                "grpc.RpcMethodHandler[bytes, object]", grpc.unary_stream_rpc_method_handler(fail)
            )

        details = cast("grpc.HandlerCallDetails", CallDetails(method=STREAM))
        guarded = await Guard(is_ready=lambda: True).intercept_service(find, details)
        assert guarded is not None
        handle = cast("Handle", guarded.unary_stream)
        call = asyncio.ensure_future(handle(b"", TimedContext()))
        await failed.wait()
        call.cancel()  # as gRPC does
        await asyncio.wait([call])
        return call.cancelled()

    assert run(scenario())
    assert not ours(caplog.records)


def test_an_unknown_method_is_unimplemented() -> None:
    async def scenario() -> grpc.StatusCode:
        async with served() as caller:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await caller.unary(b"", method="/test.Service/Other")
            return failure.value.code()

    assert run(scenario()) is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_of_another_kind_that_parses_is_the_handlers_business() -> None:
    async def scenario() -> bytes:
        async with served() as caller:
            return await caller.unary(Struct().SerializeToString())

    assert run(scenario()) == b""


class TestHealth:
    def test_is_answered_while_the_teacher_loads_and_nothing_else_is(self) -> None:
        async def scenario() -> tuple[bytes, grpc.StatusCode, TeacherLogitsError]:
            async with served(is_ready=lambda: False) as caller:
                answer = await caller.unary(b"", method=HEALTH_CHECK)
                return (answer, *await refusal(caller.unary(b"")))

        answer, code, error = run(scenario())
        assert HealthCheckResponse.FromString(answer).status == HealthCheckResponse.SERVING
        assert code is grpc.StatusCode.UNAVAILABLE
        assert isinstance(error, NotAvailable)
        assert error.retry_after

    def test_can_be_watched_without_a_deadline_and_not_asked_without_one(self) -> None:
        async def scenario() -> tuple[object, grpc.StatusCode]:
            async with served() as caller:
                watch = caller.stream(method=HEALTH_WATCH, timeout=None)
                first = await watch.read()
                watch.cancel()
                code, _ = await refusal(caller.unary(b"", method=HEALTH_CHECK, timeout=None))
                return first, code

        first, code = run(scenario())
        assert isinstance(first, bytes)
        assert HealthCheckResponse.FromString(first).status == HealthCheckResponse.SERVING
        assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", [UNARY, "/teacher_logits.v1.ScoringService/Score"])
def test_a_request_of_more_than_64_kib_is_refused_unread_unless_it_scores(method: str) -> None:
    read: list[int] = []

    def parse(raw: bytes) -> bytes:
        read.append(len(raw))
        return raw

    async def scenario(size: int) -> None:
        async def handle(request: bytes, context: object) -> bytes:
            return b""

        async def handler(details: object) -> grpc.RpcMethodHandler[bytes, bytes]:
            return grpc.unary_unary_rpc_method_handler(handle, parse)

        guard = Guard(is_ready=lambda: True)
        guarded = await guard.intercept_service(
            handler, cast("grpc.HandlerCallDetails", CallDetails(method))
        )
        assert guarded is not None
        call = cast("Handle", guarded.unary_unary)
        await call(b"x" * size, RefusingContext())

    run(scenario(65536))
    if method == UNARY:
        with pytest.raises(RefusedError, match=r"65537 bytes .* at most 65536"):
            run(scenario(65537))
        assert read == [65536]
    else:
        run(scenario(65537))
        assert read == [65536, 65537]


class RefusedError(Exception):
    """What an aborted call ends with."""


class RefusingContext(TimedContext):
    """A context whose calls end with what they are aborted for."""

    async def abort(self, code: object, message: str, details: object) -> None:
        raise RefusedError(message)


def refusals_of(registry: CollectorRegistry) -> dict[str, float]:
    """What was counted of refusals: by the reason alone, where the surface is gRPC's."""
    return {
        sample.labels["reason"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "teacher_logits_refusals_total" and sample.labels["surface"] == "rpc"
    }


def test_every_refused_call_is_counted_once_by_its_reason() -> None:
    registry = CollectorRegistry()
    broken = [
        Violation(rule="gbs_mismatch", message="m"),
        Violation(rule="dp_mismatch", message="m"),
    ]

    async def scenario() -> None:
        refused, failed = failing(SessionRefusedError(broken)), failing(KeyError("x"))
        async with served(unary=refused, stream=failed, registry=registry) as caller:
            await refusal(caller.unary(b""))
            await refusal(caller.unary(b"\xff"))
            await refusal(caller.unary(b"", timeout=None))
            await refusal(caller.call("stream"))
            for method in ("/test.Service/None", "/no.Such/Thing", f"/a/{SECRET}"):
                with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                    await caller.unary(b"", method=method)

    run(scenario())

    assert refusals_of(registry) == {
        "SESSION_REFUSED": 1,
        "REQUEST_INVALID": 2,
        "UNKNOWN_METHOD": 3,
    }
    value = registry.get_sample_value
    of = "teacher_logits_errors_total"
    assert value(of, {"surface": "rpc", "class": "contract_violation"}) == 3
    assert value(of, {"surface": "rpc", "class": "internal"}) == 1  # no refusal: the server failed
    for violation in broken:
        assert value("teacher_logits_broken_rules_total", {"rule": violation.rule}) == 1


def test_a_call_before_the_teacher_is_loaded_is_counted_too() -> None:
    registry = CollectorRegistry()

    async def scenario() -> None:
        async with served(registry=registry, is_ready=lambda: False) as caller:
            await refusal(caller.unary(b""))

    run(scenario())

    assert refusals_of(registry) == {"NOT_AVAILABLE": 1}


def test_a_health_watch_of_bytes_that_are_no_message_is_refused_as_any_call() -> None:
    async def scenario() -> tuple[grpc.StatusCode, TeacherLogitsError]:
        async with served() as caller:
            stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            stub = caller.channel.unary_stream(HEALTH_WATCH)
            return await refusal(stub(b"\xff\xff", timeout=PATIENCE).read())

    code, error = run(scenario())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, RequestInvalidError)


async def _tell(
    requests: AsyncIterator[StringValue], context: object
) -> AsyncIterator[StringValue]:
    async for request in requests:
        yield request


@asynccontextmanager
async def reflecting(
    seconds: float,
) -> AsyncIterator[Callable[[], grpc.aio.StreamStreamCall[bytes, bytes]]]:
    """A server whose reflection is a generator, as gRPC's own is, and calls of it."""
    guard = Guard(is_ready=lambda: True, reflection_seconds=seconds)
    server = grpc.aio.server(interceptors=(guard,))
    handler = grpc.stream_stream_rpc_method_handler(
        _tell, StringValue.FromString, StringValue.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("grpc.reflection.v1alpha.S", {"Info": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.stream_stream("/grpc.reflection.v1alpha.S/Info")
    finally:
        await server.stop(0)


def test_reflection_that_stays_open_is_ended() -> None:
    async def scenario() -> tuple[object, tuple[grpc.StatusCode, TeacherLogitsError]]:
        async with reflecting(0.1) as start:
            call = start()
            await call.write(StringValue(value="x").SerializeToString())
            return await call.read(), await refusal(call.read())

    first, (code, error) = run(scenario())
    assert first == StringValue(value="x").SerializeToString()
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "open for 0.1 s" in error.message


def test_reflection_refuses_bytes_that_are_no_message() -> None:
    async def scenario() -> tuple[grpc.StatusCode, TeacherLogitsError]:
        async with reflecting(PATIENCE) as start:
            call = start()
            await call.write(b"\xff\xff")
            return await refusal(call.read())

    code, error = run(scenario())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "are no message" in error.message
