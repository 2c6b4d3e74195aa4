"""Counted calls: one call too many is refused, health is answered, and who ends makes room."""

from __future__ import annotations

import asyncio

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

PATIENCE = 30.0
METHOD = "/test.Service/Wait"


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
