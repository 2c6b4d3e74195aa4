"""Streams of bytes over TCP as the client reads them, from a server that does what a test says."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
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
from teacher_logits_client.calls.scoring import Scoring
from teacher_logits_client.config import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from teacher_logits_client.calls.pending import PendingLease

PATIENCE = 30.0


class Tap:
    """Sends one chunk, then waits; then breaks off, or sends another and ends."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        #: With what a stream breaks off, if it does.
        self.breaks: grpc.StatusCode | None = None

    def read(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"first"
        self.go_on.wait(PATIENCE)
        if self.breaks is not None:
            context.abort(self.breaks, "gone")
        yield b"last"

    def stop(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.CANCELLED, "as of a call that is open when a server stops")

    def wait(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.go_on.wait(PATIENCE)
        return b""


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
    stop: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(tap.stop)
    wait: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(tap.wait)
    services = {
        "BulkService": {"ReadPayload": handler},
        "TeacherLogitsService": {"RenewSession": stop, "AcquireStep": stop},
        "ScoringService": {"Score": stop, "ScoredIds": wait},
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


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_stream_that_the_server_breaks_off_says_so(
    calls: Calls, tap: Tap, code: grpc.StatusCode
) -> None:
    tap.breaks = code
    stream = calls.read_payload("s", "l", 0, timeout=PATIENCE)
    assert next(stream) == b"first"
    tap.go_on.set()
    with pytest.raises(StreamBrokenError, match=f"broke off: {code.name}: gone"):
        next(stream)


def renewal(calls: Calls) -> None:
    calls.renew("s", timeout=PATIENCE)


def step(calls: Calls) -> None:
    pending = calls.acquire_step("s", request_id="r", step=7, timeout=PATIENCE)
    pending.result(PATIENCE)


def asked(calls: Calls, *, ids_per_position: int = 0) -> PendingLease:
    scoring = Scoring(
        session_id="s",
        request_id="r",
        input_ids=b"",
        row_lengths=(),
        prefix_ids=b"",
        prefix_lengths=(),
        row_windows=(),
        mask_bad_rows=False,
        ids_per_position=ids_per_position,
    )
    return calls.score(scoring, what="the scores", timeout=PATIENCE)


def scores(calls: Calls) -> None:
    asked(calls).result(PATIENCE)


@pytest.mark.parametrize(
    ("call", "what"),
    [(renewal, "the renewal of a session"), (step, "step 7"), (scores, "the scores")],
)
def test_a_call_that_a_server_cuts_off_as_it_stops_is_no_cancelling_of_ours(
    calls: Calls, call: Callable[[Calls], None], what: str
) -> None:
    with pytest.raises(ServerUnreachableError, match=f"stopped before .* {what}"):
        call(calls)


def test_a_call_under_way_when_its_own_client_is_closed_was_cancelled(calls: Calls) -> None:
    pending = asked(calls, ids_per_position=1)
    calls.close()
    with pytest.raises(CancelledError, match="the scores was cancelled"):
        pending.result(PATIENCE)


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
