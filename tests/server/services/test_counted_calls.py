"""Counted calls: one call too many is refused, health is answered, and who ends makes room."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import grpc
import pytest
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health
from prometheus_client import CollectorRegistry

from teacher_logits.wire.errors import DETAILS_KEY, from_status
from teacher_logits_server.interceptors import Guard
from teacher_logits_server.metrics.refusals import Refusals
from teacher_logits_server.services.counted_calls import CountedCalls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Q = TypeVar("Q")
R = TypeVar("R")
PATIENCE = 30.0
METHOD = "/test.Service/Wait"
CHECK = "/grpc.health.v1.Health/Check"


def test_one_call_too_many_is_refused_and_counted_and_a_probe_answered() -> None:
    async def scenario() -> None:
        go_on, arrived = asyncio.Event(), asyncio.Semaphore(0)

        async def wait(request: bytes, context: object) -> bytes:
            arrived.release()
            await go_on.wait()
            return request

        registry = CollectorRegistry()
        limits = CountedCalls(max_calls=2, max_watchers=1, refusals=Refusals(registry))
        server = grpc.aio.server(interceptors=(limits, Guard(is_ready=lambda: True)))
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(wait)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", {"Wait": handler}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
            waiting = [call(b"", timeout=PATIENCE) for _ in range(2)]
            for _ in waiting:
                await arrived.acquire()

            with pytest.raises(grpc.aio.AioRpcError) as told:
                await call(b"", timeout=PATIENCE)
            check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            await check(b"", timeout=PATIENCE)
            go_on.set()
            for each in waiting:
                await each
            await call(b"", timeout=PATIENCE)
        await server.stop(0)
        counted = {"surface": "rpc", "reason": "LIMIT_REACHED"}
        assert registry.get_sample_value("teacher_logits_refusals_total", counted) == 1
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = dict(told.value.trailing_metadata() or ())[DETAILS_KEY]
        assert isinstance(details, bytes)
        error = from_status(status_pb2.Status.FromString(details))
        assert error is not None
        assert error.reason == "LIMIT_REACHED"
        assert error.facts == {
            "limit_name": "calls",
            "count": 2,
            "limit": 2,
            "flag": "--max-calls",
        }

    asyncio.run(scenario())


def test_a_call_whose_message_never_comes_counts_until_it_ends() -> None:
    async def scenario() -> None:
        async def answer(request: bytes, context: object) -> bytes:
            return request

        arrivals = Arrivals()
        server, port = served(answer, CountedCalls(max_calls=2, max_watchers=1), arrivals)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
            silent: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(METHOD)
            begun = [silent(timeout=PATIENCE) for _ in range(2)]
            for _ in begun:
                await arrivals.came.acquire()
            assert await call(b"", timeout=PATIENCE).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for each in begun:
                each.cancel()
            assert await until_it_is(grpc.StatusCode.OK, call)
        await server.stop(0)

    asyncio.run(scenario())


def test_a_look_at_health_whose_message_never_comes_is_ended() -> None:
    async def scenario() -> tuple[grpc.StatusCode, bytes]:
        async def answer(request: bytes, context: object) -> bytes:
            return request

        counted = CountedCalls(max_calls=2, max_watchers=1, message_seconds=0.05)
        server, port = served(answer, counted)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(CHECK)
            silent: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(CHECK)
            code = await silent(timeout=PATIENCE).code()
            answered = await check(b"", timeout=PATIENCE)
        await server.stop(0)
        return code, answered

    assert asyncio.run(scenario()) == (grpc.StatusCode.DEADLINE_EXCEEDED, b"\x08\x01")


class Arrivals(grpc.aio.ServerInterceptor):
    """Says of each call that it has come, whether its message has or not."""

    def __init__(self) -> None:
        self.came = asyncio.Semaphore(0)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, R] | None:
        self.came.release()
        return await continuation(handler_call_details)


def served(
    answer: Callable[[bytes, object], Awaitable[bytes]],
    counted: CountedCalls,
    *more: grpc.aio.ServerInterceptor,
) -> tuple[grpc.aio.Server, int]:
    """A server of one method, and of health."""
    server = grpc.aio.server(interceptors=(counted, *more, Guard(is_ready=lambda: True)))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Wait": handler}),)
    )
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    return server, server.add_insecure_port("127.0.0.1:0")


async def until_it_is(
    code: grpc.StatusCode, call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
) -> bool:
    """Call until that is what it ends in."""
    give_up = asyncio.get_running_loop().time() + PATIENCE
    while await call(b"", timeout=PATIENCE).code() is not code:
        if asyncio.get_running_loop().time() > give_up:
            return False
    return True
