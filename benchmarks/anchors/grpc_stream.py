"""Anchor: a bare gRPC stream of bytes, as plain as Python can have it, and as quick.

The server cuts messages from memory, one as the one before was taken; the client copies each
into memory that it uses again. Nothing is checked.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
from benchmarks.anchors.content import content_of
from benchmarks.report import write_line

if TYPE_CHECKING:
    from collections.abc import Iterator

METHOD = "/anchor.Bytes/Read"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]


class Reader:
    """The client's side."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._read: grpc.UnaryStreamMultiCallable[bytes, bytes]
        self._read = self._channel.unary_stream(METHOD)

    def fetch(self, buffer: memoryview, message_bytes: int) -> None:
        """Fill the buffer with the first bytes of the content."""
        at = 0
        for message in self._read(f"{len(buffer)} {message_bytes}".encode(), timeout=60):
            buffer[at : at + len(message)] = message
            at += len(message)
        if at != len(buffer):
            raise SystemExit(f"{at} of {len(buffer)} bytes came")

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


def serve(size_bytes: int) -> None:
    """Serve until standard input ends."""
    content = memoryview(content_of(size_bytes))

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        size, step = map(int, request.split())
        for start in range(0, size, step):
            yield bytes(content[start : min(start + step, size)])

    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(read)
    service, method = METHOD[1:].split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    with tempfile.TemporaryDirectory() as folder:
        unix = f"unix:{os.path.join(folder, 's')}"
        server.add_insecure_port(unix)
        tcp = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        write_line({"tcp": tcp, "unix": unix})
        sys.stdin.read()
        server.stop(0).wait()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
