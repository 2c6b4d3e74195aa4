"""What bulk is measured on: a server's payload, and a reader that streams it again and again.

    python -m benchmarks.bulk ADDRESS PAYLOAD_ID

reads at full speed until its standard input ends, and says how much that was. `Streamed` is
the opener of the client as it is, with every check that is on by default, on one lease.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from benchmarks.processes import PATIENCE_SECONDS, our_server
from benchmarks.report import write_line
from benchmarks.teacher import VOCABULARY

import teacher_logits_client as tl
from teacher_logits.digest import payload_digest
from teacher_logits_client.calls import Calls
from teacher_logits_client.config import parse_address
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.stream import StreamOpener

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP_K = 64
SPAN_TOKENS = 65536


class Streamed:
    """A lease of one payload, over connections of its own."""

    def __init__(self, address: str, session_id: str, payload_id: str) -> None:
        self._calls = Calls(parse_address(address))
        self._session_id = session_id
        self._lease = self._calls.acquire(
            session_id, request_id="stream", payload_id=payload_id, timeout=PATIENCE_SECONDS
        )
        self._opener = StreamOpener(self._read, pool=BufferPool(), count=lambda size: None)
        self.size_bytes = self._lease.payload.size_bytes

    def fetch(self) -> None:
        """Have all of it in memory that is used again."""
        until = time.monotonic() + PATIENCE_SECONDS
        self._opener.open(self._lease, until=until).vacate()

    def digest(self) -> str:
        """Return the digest of what a stream brings, as a leased payload tells it."""
        opened = self._opener.open(self._lease, until=time.monotonic() + PATIENCE_SECONDS)
        return payload_digest(
            (
                column.kind.value,
                column.element_type.value,
                column.shape,
                opened.buffer[column.offset_bytes : column.end_bytes],
            )
            for column in self._lease.payload.columns
        )

    def close(self) -> None:
        """Hang up."""
        self._calls.close()

    def _read(self, lease_id: str, offset_bytes: int, timeout: float) -> Iterator[bytes]:
        return self._calls.read_payload(self._session_id, lease_id, offset_bytes, timeout=timeout)


@contextmanager
def serving(*flags: str, net: str, tokens: int) -> Iterator[dict[str, object]]:
    """Run a server that takes payloads of so many tokens; yields its readiness."""
    with tempfile.TemporaryDirectory() as folder:
        listen = ("127.0.0.1:0", "--insecure") if net == "tcp" else (f"unix:{folder}/s",)
        most = str(max(SPAN_TOKENS, 2 * tokens))
        always = ("--listen", *listen, "--broker", f"{folder}/b", "--max-request-tokens", most)
        with our_server(*always, *flags) as told:
            yield told


@contextmanager
def session_of(address: str, *, transport: tl.Transport, rows: int = 1) -> Iterator[tl.Session]:
    """Open a session of one rank over one transport, over connections of its own."""
    grid = tl.BatchGrid(global_batch_size=rows, data_parallel_size=1, micro_batch_size=1)
    profile = tl.StudentProfile(batch_grid=grid, top_k=TOP_K, transports=(transport,))
    with tl.connect(address) as client, client.open_session(profile) as session:
        yield session


@contextmanager
def scored(session: tl.Session, *, rows: int, tokens: int) -> Iterator[tl.LeasedPayload]:
    """Have the teacher score so many rows, and hold the payload for the block."""
    ids = [[(7 * row + at) % VOCABULARY for at in range(tokens)] for row in range(rows)]
    with session.score(ids).result() as leased:
        yield leased


def read_on(argv: list[str]) -> int:
    """Read until standard input ends."""
    address, payload_id = argv
    enough = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        enough.set()

    with ExitStack() as stack:
        session = stack.enter_context(session_of(address, transport=tl.Transport.STREAM))
        streamed = Streamed(address, session.terms.session_id, payload_id)
        stack.callback(streamed.close)
        streamed.fetch()
        write_line({"ready": True})
        threading.Thread(target=listen, daemon=True).start()
        started, fetched = time.perf_counter(), 0
        while not enough.is_set():
            streamed.fetch()
            fetched += streamed.size_bytes
        write_line({"gbps": fetched / (time.perf_counter() - started) / 1e9})
    return 0


if __name__ == "__main__":
    sys.exit(read_on(sys.argv[1:]))
