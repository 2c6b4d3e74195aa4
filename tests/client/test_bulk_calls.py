"""Streams of bytes over TCP as the client reads them, from a server that does what a test says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from teacher_logits.errors import (
    DeadlinePassedError,
    ServerUnreachableError,
    SessionExpiredError,
    StreamBrokenError,
)
from teacher_logits_client.calls import Calls
from teacher_logits_client.config import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 30.0


class Tap:
    """Sends one chunk, then waits; then breaks off, or sends another and ends."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.breaks = False

    def read(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"first"
        self.go_on.wait(PATIENCE)
        if self.breaks:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield b"last"

    def renew(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.CANCELLED, "as of a call that is open when a server stops")


@pytest.fixture
def tap() -> Tap:
    return Tap()


@pytest.fixture
def calls(tap: Tap) -> Iterator[Calls]:
    with serving(tap) as address:
        calls = Calls(parse_address(address))
        yield calls
        tap.go_on.set()
        calls.close()


@contextmanager
def serving(tap: Tap) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(tap.read)
    cut: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(tap.renew)
    services = {
        "BulkService": {"ReadPayload": handler},
        "TeacherLogitsService": {"RenewSession": cut},
    }
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(f"teacher_logits.v1.{name}", handlers)
            for name, handlers in services.items()
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_every_chunk_comes_in_order(calls: Calls, tap: Tap) -> None:
    tap.go_on.set()
    assert [*calls.read_payload("s", "l", 0, timeout=PATIENCE)] == [b"first", b"last"]


def test_a_stream_that_the_server_breaks_off_says_so(calls: Calls, tap: Tap) -> None:
    tap.breaks = True
    stream = calls.read_payload("s", "l", 0, timeout=PATIENCE)
    assert next(stream) == b"first"
    tap.go_on.set()
    with pytest.raises(StreamBrokenError, match="broke off: UNAVAILABLE: gone"):
        next(stream)


def test_a_call_that_a_server_cuts_off_as_it_stops_is_no_cancelling_of_ours(calls: Calls) -> None:
    with pytest.raises(ServerUnreachableError, match=r"stopped before .* the renewal of a session"):
        calls.renew("s", timeout=PATIENCE)


def test_a_stream_ends_with_its_deadline(calls: Calls) -> None:
    with pytest.raises(DeadlinePassedError, match="the stream of lease l"):
        list(calls.read_payload("s", "l", 0, timeout=0.2))


def test_a_client_closed_by_another_thread_ends_a_stream_that_waits(calls: Calls) -> None:
    stream = calls.read_payload("s", "l", 0, timeout=PATIENCE)
    assert next(stream) == b"first"
    closing = threading.Thread(target=calls.close)
    closing.start()
    with pytest.raises(SessionExpiredError, match="session s was closed by this client"):
        next(stream)
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_streams_of_several_threads_do_not_wait_for_one_another(calls: Calls, tap: Tap) -> None:
    waiting = calls.read_payload("s", "l", 0, timeout=PATIENCE)
    assert next(waiting) == b"first"
    with ThreadPoolExecutor(2) as threads:
        others = [
            threads.submit(next, calls.read_payload("s", "l", 0, timeout=PATIENCE))
            for _ in range(2)
        ]
        assert [other.result(PATIENCE) for other in others] == [b"first", b"first"]
    tap.go_on.set()
    assert next(waiting) == b"last"
