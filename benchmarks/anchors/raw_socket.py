"""Anchor: a raw TCP or Unix socket, sent from memory and received into memory. The limit.

Nothing is framed and nothing checked: two copies, both the kernel's.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading

from benchmarks.anchors.content import content_of
from benchmarks.report import write_line

SLICE_BYTES = 1 << 20
MOST_AT_ONCE = 4 << 20
_SIZE_BYTES = 8


class Reader:
    """The client's side."""

    def __init__(self, address: str) -> None:
        if address.startswith("unix:"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            self._socket = socket.create_connection((host, int(port)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(self, buffer: memoryview) -> None:
        """Fill the buffer with the first bytes of the content."""
        self._socket.sendall(len(buffer).to_bytes(_SIZE_BYTES, "little"))
        at = 0
        while at < len(buffer):
            with buffer[at : at + MOST_AT_ONCE] as part:
                got = self._socket.recv_into(part)
            if not got:
                raise SystemExit(f"{at} of {len(buffer)} bytes came")
            at += got

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def serve(size_bytes: int) -> None:
    """Serve until standard input ends."""
    content = memoryview(content_of(size_bytes))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "s")
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(path)
        unix.listen()
        tcp = socket.create_server(("127.0.0.1", 0))
        for listener in (unix, tcp):
            threading.Thread(target=_accept, args=(listener, content), daemon=True).start()
        write_line({"tcp": f"127.0.0.1:{tcp.getsockname()[1]}", "unix": f"unix:{path}"})
        sys.stdin.read()


def _accept(listener: socket.socket, content: memoryview) -> None:
    while True:
        connection, _ = listener.accept()
        if connection.family == socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SLICE_BYTES)
        threading.Thread(target=_send, args=(connection, content), daemon=True).start()


def _send(connection: socket.socket, content: memoryview) -> None:
    with connection:
        while size := int.from_bytes(connection.recv(_SIZE_BYTES), "little"):
            for start in range(0, size, SLICE_BYTES):
                connection.sendall(content[start : min(start + SLICE_BYTES, size)])


if __name__ == "__main__":
    serve(int(sys.argv[1]))
