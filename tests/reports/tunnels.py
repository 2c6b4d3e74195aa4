"""A tunnel: whoever connects at one path speaks with a server at another, and gets bytes alone.

What a container gateway or `ssh -L` does. Descriptors do not pass.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PIECE_BYTES = 1 << 17


class Tunnel:
    """What passes: each connection as its two ends, the caller's and the server's."""

    def __init__(self, near: Path, far: Path, kind: socket.SocketKind) -> None:
        self._far, self._kind = far, kind
        self._ends: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._gate = socket.socket(socket.AF_UNIX, kind)
        self._gate.bind(str(near))
        self._gate.listen()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self) -> None:
        """End every connection, and take no new one."""
        self._end(self._gate)
        self._accepting.join()
        for end in self._ends:
            self._end(end)
        for pump in self._pumps:
            pump.join()
        for end in (self._gate, *self._ends):
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._gate.accept()
                server = socket.socket(socket.AF_UNIX, self._kind)
                self._ends += [caller, server]
                server.connect(str(self._far))
                self._pump(caller, server)
                self._pump(server, caller)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        pump = threading.Thread(target=self._pass_on, args=(source, target), daemon=True)
        self._pumps.append(pump)
        pump.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        """Pass on what comes, packet by packet, until either side has gone."""
        with suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                target.sendall(piece)
        self._end(target)

    @staticmethod
    def _end(end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def tunnel(
    near: Path, far: Path, *, kind: socket.SocketKind = socket.SOCK_STREAM
) -> Iterator[Tunnel]:
    """Have whoever connects at ``near`` speak with who listens at ``far``."""
    made = Tunnel(near, far, kind)
    try:
        yield made
    finally:
        made.cut()
        near.unlink()
