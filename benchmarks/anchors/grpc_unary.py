"""Anchor: a bare gRPC unary call, as plain as Python can have it, and as quick.

The server sends a small message back as it came; nothing is read of it, and nothing checked.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import grpc
from benchmarks.report import write_line

METHOD = "/anchor.Echo/Call"
OPTIONS = [("grpc.enable_http_proxy", 0)]
MESSAGE = b"payload-00000001"


class Caller:
    """The client's side."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        self._call = self._channel.unary_unary(METHOD)

    def call(self) -> None:
        """Send the message, and have it back."""
        if self._call(MESSAGE, timeout=60) != MESSAGE:
            raise SystemExit("another message came back")

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


def serve() -> None:
    """Serve until standard input ends."""

    def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
        return request

    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(echo)
    service, method = METHOD[1:].split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    with tempfile.TemporaryDirectory() as folder:
        unix = f"unix:{os.path.join(folder, 's')}"
        server.add_insecure_port(unix)
        server.start()
        write_line({"unix": unix})
        sys.stdin.read()
        server.stop(0).wait()


if __name__ == "__main__":
    serve()
