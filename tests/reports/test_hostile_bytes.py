"""Bytes that mean harm, at every door: R43. They are refused, none of them runs, and nobody falls.

A pickle runs its code where it is opened. So each one here would leave a file behind.
"""

import contextlib
import os
import pickle
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest
from tests.reports.conftest import Tried
from tests.reports.raw import EVERY_METHOD, OUR_METHODS, Method, refused
from tests.transport_suite.right import RAGGED, assert_right
from tests.transport_suite.writing import a_profile

import teacher_logits_client as tl
from teacher_logits.errors import (
    ContractViolation,
    RequestInvalidError,
    StaleReference,
    TeacherLogitsError,
)
from teacher_logits_client import Transport
from teacher_logits_client.line import packets

CHANCE = random.Random(43)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def bombs(tmp_path: Path) -> list[bytes]:
    """Pickles of every protocol; the first file that one of them makes is the end of the test."""
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    return [pickle.dumps(Bomb(tmp_path / "boom"), protocol=number) for number in protocols]


#: Bytes that are no message of protobuf: a tag without its value, lengths past the end, a group
#: that never ends, field number 0, a varint without end.
BROKEN = [
    b"\x0a",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x0b\x0b\x0b",
    b"\x00\x00",
    b"\x08" + b"\xff" * 11,
]
NOISE = [CHANCE.randbytes(size) for size in (1, 7, 100, 4000)]


def assert_a_refusal(error: TeacherLogitsError) -> None:
    """It says what is wrong with the call, and not that the server failed."""
    assert isinstance(error, ContractViolation | StaleReference), error


@pytest.mark.parametrize("method", EVERY_METHOD, ids=str)
def test_r43_a_pickle_at_any_rpc_is_refused_and_never_opened(
    tried: Tried, method: Method, bombs: list[bytes], tmp_path: Path
) -> None:
    for bomb in bombs:
        answer = refused(partial(tried.raw.send, method, bomb))
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(answer.error, RequestInvalidError)
        assert answer.error.facts == {"method": method.path, "size_bytes": len(bomb)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", EVERY_METHOD, ids=str)
def test_r43_bytes_that_are_no_message_are_refused_at_any_rpc(tried: Tried, method: Method) -> None:
    for data in BROKEN:
        answer = refused(partial(tried.raw.send, method, data))
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(answer.error, RequestInvalidError)


@pytest.mark.parametrize("method", OUR_METHODS, ids=str)
def test_r43_noise_is_refused_or_means_nothing_at_any_rpc(tried: Tried, method: Method) -> None:
    """Random bytes may happen to be a message, but then they ask for nothing that there is."""
    for data in NOISE:
        try:
            answer = refused(partial(tried.raw.send, method, data))
        except AssertionError:
            assert method.descriptor.name == "Inspect"  # which asks nothing of its request
        else:
            assert_a_refusal(answer.error)


@pytest.mark.parametrize("method", EVERY_METHOD, ids=str)
def test_r43_every_rpc_needs_a_deadline_but_the_watch_over_health(
    tried: Tried, method: Method
) -> None:
    if method.path.endswith("Health/Watch"):
        return
    answer = refused(lambda: tried.raw.send(method, b"", timeout=None))
    assert isinstance(answer.error, RequestInvalidError)
    assert "deadline" in answer.error.message


def test_r43_a_pickle_in_every_text_and_bytes_of_a_request_stays_text(
    tried: Tried, bombs: list[bytes], tmp_path: Path
) -> None:
    """Well-formed messages whose fields are pickles; the text of one is Latin-1 of its bytes."""
    for method in OUR_METHODS:
        for bomb in bombs:
            fields = method.descriptor.input_type.fields
            given: dict[str, object] = {
                field.name: bomb if field.type == field.TYPE_BYTES else bomb.decode("latin-1")
                for field in fields
                if field.type in (field.TYPE_BYTES, field.TYPE_STRING)
            }
            if not given:
                continue
            data = method.request(**given).SerializeToString()
            answer = refused(partial(tried.raw.send, method, data))
            assert_a_refusal(answer.error)
    assert list(tmp_path.iterdir()) == []


def test_r43_what_is_no_http_at_all_does_not_stop_the_server(
    tried: Tried, bombs: list[bytes], tmp_path: Path
) -> None:
    path = tried.server.address.removeprefix("unix:")
    for data in (*bombs, *NOISE, *BROKEN, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    assert list(tmp_path.iterdir()) == []


def test_r43_a_pickle_or_noise_at_the_broker_ends_a_strangers_line_and_no_other(
    tried: Tried, bombs: list[bytes], tmp_path: Path
) -> None:
    broker = tried.server.address.removeprefix("unix:") + ".broker"
    profile = a_profile(top_k=8, transports=(Transport.SHARED_MEMORY,))
    with tried.client.open_session(profile) as session, session.score(RAGGED).result() as leased:
        for data in (*bombs, *NOISE, *BROKEN, b""):
            stranger = packets.connect(broker, 20)
            packets.send(stranger, data)
            stranger.settimeout(20)
            answers = iter(partial(stranger.recv, 65536), b"")
            assert len(list(answers)) == 1  # an error, and then the end of the line
            stranger.close()
        payload_id = leased.payload.payload_id
        with session.acquire(payload_id=payload_id, input_ids=RAGGED) as again:
            assert again.transport is tl.Transport.SHARED_MEMORY
            assert_right(again, RAGGED)
    assert list(tmp_path.iterdir()) == []


def test_r43_the_bombs_would_have_gone_off(bombs: list[bytes], tmp_path: Path) -> None:
    for bomb in bombs:
        pickle.loads(bomb)
        (tmp_path / "boom").rmdir()
