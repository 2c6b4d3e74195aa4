"""Anchor: Arrow Flight's DoGet of the same bytes, one column of fixed-size rows.

Flight's C++ receives into memory of its own; the client copies that into memory that it uses
again, as every other way here does. Nothing is checked. Needs pyarrow (group `bench`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.flight as flight
from benchmarks.anchors.content import content_of
from benchmarks.report import write_line

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW_BYTES = 384
BATCH_ROWS = 4096
"""A row is a position's 64 values and ids, a batch one row of the global batch."""


class Reader:
    """The client's side."""

    def __init__(self, address: str) -> None:
        self._client = flight.connect(address)

    def fetch(self, buffer: memoryview) -> None:
        """Fill the buffer with the first bytes of the content, rounded up to whole rows."""
        at = 0
        for chunk in self._client.do_get(flight.Ticket(str(len(buffer)).encode())):
            data = memoryview(chunk.data.column(0).buffers()[-1]).cast("B")[: len(buffer) - at]
            buffer[at : at + len(data)] = data
            at += len(data)
        if at != len(buffer):
            raise SystemExit(f"{at} of {len(buffer)} bytes came")

    def close(self) -> None:
        """Hang up."""
        self._client.close()


class Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow brings no types
    """Gives any beginning of the content, in batches that lie ready."""

    def __init__(self, address: str, content: bytes) -> None:
        super().__init__(address)
        self._content = pyarrow.py_buffer(content)

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.RecordBatchStream:
        """Answer one ticket, which is a number of bytes."""
        batches = list(self._batches(int(ticket.ticket)))
        reader = pyarrow.RecordBatchReader.from_batches(batches[0].schema, batches)
        return flight.RecordBatchStream(reader)

    def _batches(self, size_bytes: int) -> Iterator[pyarrow.RecordBatch]:
        rows = -(-size_bytes // ROW_BYTES)
        for first in range(0, rows, BATCH_ROWS):
            count = min(BATCH_ROWS, rows - first)
            data = self._content.slice(first * ROW_BYTES, count * ROW_BYTES)
            column = pyarrow.FixedSizeBinaryArray.from_buffers(
                pyarrow.binary(ROW_BYTES), count, [None, data]
            )
            yield pyarrow.RecordBatch.from_arrays([column], ["entries"])


def serve(size_bytes: int) -> None:
    """Serve until standard input ends."""
    content = content_of(size_bytes + ROW_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        unix = f"grpc+unix://{os.path.join(folder, 's')}"
        servers = [Server("grpc://127.0.0.1:0", content), Server(unix, content)]
        for server in servers:
            threading.Thread(target=server.serve, daemon=True).start()
        write_line({"tcp": f"grpc://127.0.0.1:{servers[0].port}", "unix": unix})
        sys.stdin.read()
        for server in servers:
            server.shutdown()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
