"""A server of byte streams in a process of its own, to be killed: ``python bulk_server.py``.

It prints its address, and serves until its standard input ends. A stream is one chunk, and then
what the session id of its request says. An upload is not answered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDS, BREAKS, WAITS = "ends", "breaks", "waits"
PATIENCE = 30.0


@contextmanager
def bulk_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run one; yields its process and its address."""
    command = [sys.executable, __file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def _read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    over = threading.Event()
    context.add_callback(over.set)
    yield b"first"
    if BREAKS.encode() in request:
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
    if WAITS.encode() in request:
        over.wait(PATIENCE)


def _write(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    over = threading.Event()
    context.add_callback(over.set)
    over.wait(PATIENCE)
    return b""


def _serve() -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    read: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(_read)
    write: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(_write)
    services = {"BulkService": {"ReadPayload": read}, "RegistryService": {"WritePayload": write}}
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(f"teacher_logits.v1.{name}", handlers)
            for name, handlers in services.items()
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _serve()
