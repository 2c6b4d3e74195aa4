"""However a stream of bytes ends, nothing of it outlives its client.

Counted are this process's descriptors, by what they lead to, and gRPC's living objects.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.client.calls.bulk_server import BREAKS, ENDS, PATIENCE, WAITS, bulk_server

from teacher_logits.errors import DeadlinePassedError, SessionExpiredError, StreamBrokenError
from teacher_logits_client.calls import Calls
from teacher_logits_client.config import parse_address

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    Stage = tuple[Calls, "subprocess.Popen[str]"]
    End = Callable[[Calls, "subprocess.Popen[str]"], None]


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server for all the tests that leave it alive."""
    with bulk_server() as (process, address):
        yield process, address


def stream_of(calls: Calls, kind: str, *, timeout: float = PATIENCE) -> Iterator[bytes]:
    return calls.read_payload(kind, "l", 0, timeout=timeout)


def begun(calls: Calls, kind: str) -> Iterator[bytes]:
    stream = stream_of(calls, kind)
    assert next(stream) == b"first"
    return stream


def read_to_its_end(calls: Calls, process: subprocess.Popen[str]) -> None:
    assert [*stream_of(calls, ENDS)] == [b"first"]


def broken_off_by_the_server(calls: Calls, process: subprocess.Popen[str]) -> None:
    with pytest.raises(StreamBrokenError, match="UNAVAILABLE: gone"):
        list(stream_of(calls, BREAKS))


def past_its_deadline(calls: Calls, process: subprocess.Popen[str]) -> None:
    with pytest.raises(DeadlinePassedError):
        list(stream_of(calls, WAITS, timeout=0.2))


def left_by_its_reader(calls: Calls, process: subprocess.Popen[str]) -> None:
    stream = begun(calls, WAITS)
    del stream


def left_while_bytes_are_wrong(calls: Calls, process: subprocess.Popen[str]) -> None:
    def refuse(chunk: bytes) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        list(map(refuse, stream_of(calls, WAITS)))


def under_way_when_the_client_is_closed(calls: Calls, process: subprocess.Popen[str]) -> None:
    stream = begun(calls, WAITS)
    closing = threading.Thread(target=calls.close)
    closing.start()
    with pytest.raises(SessionExpiredError, match="closed by this client"):
        next(stream)
    closing.join(PATIENCE)


def left_behind_the_client(calls: Calls, process: subprocess.Popen[str]) -> None:
    stream = begun(calls, WAITS)
    calls.close()
    del stream


def asked_for_when_the_client_is_closed(calls: Calls, process: subprocess.Popen[str]) -> None:
    calls.close()
    with pytest.raises(SessionExpiredError, match="closed by this client"):
        next(stream_of(calls, ENDS))


def uploaded_when_the_client_is_closed(calls: Calls, process: subprocess.Popen[str]) -> None:
    sent = threading.Event()

    def chunks() -> Iterator[bytes]:
        yield b"first"
        sent.set()

    def close() -> None:
        sent.wait(PATIENCE)
        calls.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(SessionExpiredError, match="closed by this client, and the upload of"):
        calls.registry.write("s", "p", chunks(), timeout=PATIENCE)
    closing.join(PATIENCE)
    with pytest.raises(SessionExpiredError, match="closed by this client"):
        calls.registry.write("s", "p", chunks(), timeout=PATIENCE)


def under_way_when_the_server_is_killed(calls: Calls, process: subprocess.Popen[str]) -> None:
    stream = begun(calls, WAITS)
    process.kill()
    process.wait(PATIENCE)
    with pytest.raises(StreamBrokenError):
        next(stream)


def resumed_where_nobody_is(calls: Calls, process: subprocess.Popen[str]) -> None:
    under_way_when_the_server_is_killed(calls, process)
    for _ in range(3):
        with pytest.raises(StreamBrokenError):
            next(stream_of(calls, ENDS))


@pytest.mark.parametrize(
    "end",
    [
        read_to_its_end,
        broken_off_by_the_server,
        past_its_deadline,
        left_by_its_reader,
        left_while_bytes_are_wrong,
        under_way_when_the_client_is_closed,
        left_behind_the_client,
        asked_for_when_the_client_is_closed,
        uploaded_when_the_client_is_closed,
    ],
)
def test_nothing_is_left_of_a_stream(end: End, lasting: tuple[subprocess.Popen[str], str]) -> None:
    check(end, *lasting)


@pytest.mark.parametrize("end", [under_way_when_the_server_is_killed, resumed_where_nobody_is])
def test_nothing_is_left_of_a_stream_whose_server_died(end: End) -> None:
    with bulk_server() as (process, address):
        check(end, process, address)


def test_no_thread_stands_between_a_stream_and_its_reader(
    lasting: tuple[subprocess.Popen[str], str],
) -> None:
    _process, address = lasting
    calls = Calls(parse_address(address))
    before = {*threading.enumerate()}
    stream = begun(calls, WAITS)
    assert {*threading.enumerate()} <= before
    del stream
    calls.close()


def check(end: End, process: subprocess.Popen[str], address: str) -> None:
    one_client(read_to_its_end, process, address)  # what gRPC keeps for good is there from now on
    gc.collect()
    gc.freeze()  # and is not looked at again, as all else that the other tests have made
    try:
        before = census()
        one_client(end, process, address)
        until = time.monotonic() + PATIENCE
        while (left := census() - before) and time.monotonic() < until:
            pass  # gRPC's threads let go of connections, in their own time
    finally:
        gc.unfreeze()
    assert left == Counter()


def one_client(end: End, process: subprocess.Popen[str], address: str) -> None:
    calls = Calls(parse_address(address))
    try:
        end(calls, process)
    finally:
        calls.close()


def census() -> Counter[str]:
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    counts = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("grpc"))
    for entry in os.listdir("/proc/self/fd"):
        try:
            counts[os.readlink(f"/proc/self/fd/{entry}").partition(":")[0]] += 1
        except OSError:
            continue  # the listing's own
    return counts
