"""The gRPC socket below gRPC: bytes that are HTTP/2, or once were.

input   bytes, sent on a connection of their own, which is then shut down half
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING

from tests.fuzz.surface import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fuzz.house import House

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
#: HPACK without its table: POST, http, a path and the headers that a call needs.
_CALL = (
    b"\x83\x86\x44\x2f/teacher_logits.v1.OperatorService/Inspect"
    b"\x41\x01x\x5f\x10application/grpc\x40\x02te\x08trailers"
)


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """One frame of HTTP/2."""
    size = struct.pack(">I", len(payload))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + payload


class Http2:
    """The surface."""

    name = "http2"

    def __init__(self, house: House) -> None:
        self._house = house
        self._path = house.server.address.removeprefix("unix:")

    def seeds(self) -> Sequence[bytes]:
        begin = _PREFACE + frame(_SETTINGS)
        call = frame(_HEADERS, _CALL, flags=4, stream=1) + frame(_DATA, bytes(5), flags=1, stream=1)
        more = frame(_CONTINUATION, _CALL[10:], flags=4, stream=1)
        return [
            begin + call,
            begin + frame(_PING, bytes(8)) + frame(_WINDOW, b"\0\0\1\0") + call,
            begin + frame(_HEADERS, _CALL[:10], stream=1) + more,
            begin + frame(_HEADERS, _CALL, flags=4, stream=1) + frame(_RESET, bytes(4), stream=1),
            begin + frame(_GOAWAY, bytes(8)),
            _PREFACE,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        ]

    def run(self, data: bytes) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(PATIENCE_SECONDS)
            end.connect(self._path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                end.sendall(data)
                end.shutdown(socket.SHUT_WR)
                while end.recv(1 << 16):
                    pass
        return "CLOSED"

    def check(self) -> None:
        self._house.assert_serves()

    def close(self) -> None:
        pass
