"""A server of byte streams in a process of its own, to be killed: ``python bulk_server.py``.

It prints its address, and serves until its standard input ends. A stream is one chunk, and then
what the session id of its request says.
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


def _serve() -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(_read)
    service = "teacher_logits.v1.BulkService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"ReadPayload": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _serve()
