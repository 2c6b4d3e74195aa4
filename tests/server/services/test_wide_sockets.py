"""Wide sockets: the send buffers of accepted Unix sockets, and of no others."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from tests.held import left_behind, open_descriptors

from teacher_logits_server.services import wide_sockets
from teacher_logits_server.services.bulk import BulkService
from teacher_logits_server.services.wide_sockets import WideSockets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_server.exporters.stream import StreamExporter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed in /proc")


@pytest.fixture(autouse=True)
def however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may leave many descriptors to the garbage collector."""
    monkeypatch.setattr(wide_sockets, "_MAX_DESCRIPTORS", 1 << 20)


@contextmanager
def accepted(path: str) -> Iterator[socket.socket]:
    """The accepted end of a connection over a Unix socket at ``path``."""
    with ExitStack() as stack:
        listener = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
        listener.bind(path)
        listener.listen()
        stack.enter_context(closing(socket.socket(socket.AF_UNIX))).connect(path)
        yield stack.enter_context(closing(listener.accept()[0]))


def room(of: socket.socket) -> int:
    return of.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        yield name


def test_what_was_accepted_at_the_path_becomes_wider(folder: str) -> None:
    path = f"{folder}/s"
    with accepted(path) as ours:
        before = room(ours)
        WideSockets([path]).look(0.0)
        assert room(ours) > before


def test_what_was_accepted_elsewhere_stays_as_it_was(folder: str) -> None:
    with accepted(f"{folder}/other") as theirs:
        before = room(theirs)
        WideSockets([f"{folder}/s"]).look(0.0)
        assert room(theirs) == before


def test_a_connection_that_comes_later_is_found_by_a_later_look(folder: str) -> None:
    path = f"{folder}/s"
    sockets = WideSockets([path])
    sockets.look(0.0)
    with accepted(path) as ours:
        before = room(ours)
        sockets.look(0.1)  # too soon after the last
        assert room(ours) == before
        sockets.look(0.3)
        assert room(ours) > before


def test_a_limit_that_was_set_otherwise_since_is_left_alone(folder: str) -> None:
    path = f"{folder}/s"
    sockets = WideSockets([path])
    with accepted(path) as ours:
        sockets.look(0.0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        changed = room(ours)
        sockets.look(1.0)
        assert room(ours) == changed


def test_looking_leaves_no_descriptor_open(folder: str) -> None:
    path = f"{folder}/s"
    with accepted(path):
        before = open_descriptors()
        WideSockets([path]).look(0.0)
        assert not left_behind(before, open_descriptors)


def test_a_stream_over_a_unix_socket_widens_its_connection(folder: str) -> None:
    path = f"{folder}/s"

    class OneChunk:
        @contextmanager
        def read(
            self, session_id: str, lease_id: str, offset: int, *, as_written: bool
        ) -> Iterator[Iterator[bytes]]:
            yield iter((b"chunk",))

    async def scenario() -> tuple[int, int]:
        service = BulkService(
            exporter=cast("StreamExporter", OneChunk()),
            stall=timedelta(seconds=30),
            max_session_streams=4,
            unix_paths=[path],
        )
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((service.handler(),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
            before = widest(path)
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
                "/teacher_logits.v1.BulkService/ReadPayload"
            )
            assert [chunk async for chunk in method(b"", timeout=30)] == [b"chunk"]
            after = widest(path)
        await server.stop(0)
        return before, after

    before, after = asyncio.run(scenario())
    assert 0 < before < after


def widest(path: str) -> int:
    """Return the largest send buffer of this process's sockets at a path; 0 where there is none."""
    rooms = [0]
    for name in os.listdir("/proc/self/fd"):
        with ExitStack() as stack:
            try:
                copy = os.dup(int(name))
                stack.callback(os.close, copy)
                found = socket.socket(fileno=copy)
            except OSError:
                continue
            stack.callback(found.detach)
            if found.family == socket.AF_UNIX and found.getsockname() == path:
                rooms.append(room(found))
    return max(rooms)
