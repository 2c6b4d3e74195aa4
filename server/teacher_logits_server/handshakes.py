"""TLS handshakes that failed: counted, by what gRPC's core says of them on standard error.

gRPC tells the program of connections that came about, and of no others: a line on standard error
is all that there is. So, while a server with TLS runs in a process of its own, that descriptor is
a pipe; lines about handshakes are counted, those about names that clients ask for are dropped, and
all others go where they went. The server's log does not pass through it.

Promises: nobody waits long who writes there; at the end the descriptor is as it was. What a library
says as it ends the process may be lost. With GRPC_VERBOSITY at ERROR or NONE nothing is said, and
nothing counted.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from teacher_logits_server.metrics.refusals import BrokenHandshake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_server.metrics.refusals import Refusals

STDERR = 2
_FAILED = b"] Handshake failed with"
_NAMES = b"] No match found for server name"
"""Said of a client that asks for another name, whose handshake may go well; it is dropped, since
whoever reaches the port could fill the log with it."""
_SAID = (
    (b"WRONG_VERSION_NUMBER", BrokenHandshake.NOT_TLS),
    (b"HTTP_REQUEST", BrokenHandshake.NOT_TLS),
    (b"PEER_DID_NOT_RETURN_A_CERTIFICATE", BrokenHandshake.CLIENT_CERTIFICATE_MISSING),
    (b"CERTIFICATE_VERIFY_FAILED", BrokenHandshake.CLIENT_CERTIFICATE_REFUSED),
)
_MOST_BYTES = 65536

_log = logging.getLogger(__name__)


@contextmanager
def watch_handshakes(refusals: Refusals, *, has_tls: bool) -> Iterator[TextIO]:
    """Count handshakes that fail meanwhile; yields the stream for the log, standard error's."""
    if not has_tls:
        yield sys.stderr
        return
    watch = HandshakeWatch(refusals)
    with open(watch.start(), "w", encoding="utf-8", buffering=1, errors="backslashreplace") as log:
        try:
            yield log
        finally:
            watch.stop()


class HandshakeWatch:
    """Reads standard error from ``start`` to ``stop``.

    Args:
        refusals: counts what failed.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._logged: set[BrokenHandshake] = set()
        self._rest = b""
        self._thread = threading.Thread(target=self._run, name="teacher-logits-tls", daemon=True)

    def start(self) -> int:
        """Begin; return a descriptor of what standard error was, which is the caller's."""
        self._kept = os.dup(STDERR)
        self._enough = os.eventfd(0, os.EFD_CLOEXEC)
        self._reading, writing = os.pipe()
        os.dup2(writing, STDERR)
        os.close(writing)
        self._thread.start()
        return os.dup(self._kept)

    def stop(self) -> None:
        """Put standard error back, and pass on what was written before."""
        os.dup2(self._kept, STDERR)
        os.eventfd_write(self._enough, 1)  # a child may hold the pipe's other end
        self._thread.join()
        for descriptor in (self._reading, self._enough, self._kept):
            os.close(descriptor)

    def _run(self) -> None:
        os.set_blocking(self._reading, False)
        is_over = False
        while not is_over:
            ready, _, _ = select.select([self._reading, self._enough], [], [])
            is_over = self._enough in ready
            self._read_all()
        self._pass_on(self._rest)

    def _read_all(self) -> None:
        while True:
            try:
                data = os.read(self._reading, _MOST_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if _FAILED in line:
                    self._note(line)
                elif _NAMES not in line:
                    self._pass_on(line + b"\n")

    def _note(self, line: bytes) -> None:
        why = next((each for word, each in _SAID if word in line), BrokenHandshake.BROKEN_OFF)
        self._refusals.broken_handshake(why)
        if why not in self._logged:  # once: whoever reaches the port can have it written
            self._logged.add(why)
            said = line.rpartition(_FAILED)[2].decode(errors="replace").strip()
            facts = {"reason": why.value, "said": said}
            _log.warning("a TLS handshake failed; more are only counted", extra={"facts": facts})

    def _pass_on(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._kept, data) :]
            except OSError:  # nobody reads there any more
                return
