"""How quickly a payload is streamed, beside a bare gRPC stream, Arrow Flight and a raw socket.

    python -m benchmarks.stream                      12.6 and 50 MB, over TCP and a Unix socket
    python -m benchmarks.stream --rows 1 --tokens 64 --nets unix --rounds 2

The server and each anchor's are processes of their own; one client reads from all of them, in
turn, in an order that changes each round, into memory that it uses again. Ours has the checks
that are on by default: every chunk's checksum and place, and the size. Anchors check nothing.

One JSON object a line, in GB/s of the payload, by `name`. `stream` is ours, a line for each
anchor, with its `ratio` to that. `anchor` is the other way: `grpc_1mib` and `grpc_2mib` by the
size of its messages, `flight`, `raw_socket`. Needs pyarrow (group `bench`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.anchors import flight, grpc_stream, raw_socket
from benchmarks.anchors.content import content_of
from benchmarks.bulk import Streamed, scored, serving, session_of
from benchmarks.processes import child
from benchmarks.report import report

import teacher_logits_client as tl

if TYPE_CHECKING:
    from collections.abc import Callable

    Fetch = Callable[[], None]

MIB = 1 << 20
TIMED_IN_A_ROW = 3
OURS = "stream"


def main(argv: list[str]) -> int:
    """Run all and write the figures."""
    options = _parser().parse_args(argv)
    for net in options.nets.split(","):
        for rows in map(int, options.rows.split(",")):
            with ExitStack() as stack:
                size_bytes, ways = _ways(stack, net=net, rows=rows, tokens=options.tokens)
                speeds = _measure(ways, size_bytes=size_bytes, rounds=options.rounds)
            ours = speeds.pop(OURS)
            varied = {"size_bytes": size_bytes, "net": net}
            for name, theirs in speeds.items():
                report("anchor", "GB/s", theirs, name=name, **varied)
            for name, theirs in speeds.items():
                report("stream", "GB/s", ours, against=(name, theirs), name=OURS, **varied)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.stream", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", default="8,32", help="rows of each payload, with commas between")
    parser.add_argument("--tokens", type=int, default=3968, help="tokens a row")
    parser.add_argument("--nets", default="tcp,unix", help="how the processes are connected")
    parser.add_argument("--rounds", type=int, default=15)
    return parser


def _measure(ways: dict[str, Fetch], *, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return GB/s of each way: for each round the median of a few in a row."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    order, chance = list(ways), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            seconds = sorted(_timed(ways[name]) for _ in range(TIMED_IN_A_ROW))
            speeds[name].append(size_bytes / seconds[TIMED_IN_A_ROW // 2] / 1e9)
    return speeds


def _timed(fetch: Fetch) -> float:
    started = time.perf_counter()
    fetch()
    return time.perf_counter() - started


def _ways(stack: ExitStack, *, net: str, rows: int, tokens: int) -> tuple[int, dict[str, Fetch]]:
    """Start the servers; return the payload's size and what fetches it, each tried once."""
    told = stack.enter_context(serving(net=net, tokens=rows * tokens))
    address = str(told["address"])
    session = stack.enter_context(session_of(address, transport=tl.Transport.STREAM, rows=rows))
    held = stack.enter_context(scored(session, rows=rows, tokens=tokens))
    ours = Streamed(address, session.terms.session_id, held.payload.payload_id)
    stack.callback(ours.close)
    if ours.digest() != held.digest():
        raise SystemExit("a stream brought other bytes than the first")
    return ours.size_bytes, {OURS: ours.fetch, **_anchors(stack, net, ours.size_bytes)}


def _anchors(stack: ExitStack, net: str, size_bytes: int) -> dict[str, Fetch]:
    """Start the anchors; return what fetches as many bytes from each, each tried once."""

    def address_of(module: str) -> str:
        anchor = stack.enter_context(child(f"benchmarks.anchors.{module}", str(size_bytes)))
        return str(anchor.hear()[net])

    buffer = memoryview(bytearray(size_bytes))
    bare = grpc_stream.Reader(address_of("grpc_stream"))
    arrow = flight.Reader(address_of("flight"))
    raw = raw_socket.Reader(address_of("raw_socket"))
    for reader in (bare, arrow, raw):
        stack.callback(reader.close)
    ways: dict[str, Fetch] = {
        "grpc_1mib": lambda: bare.fetch(buffer, MIB),
        "grpc_2mib": lambda: bare.fetch(buffer, 2 * MIB),
        "flight": lambda: arrow.fetch(buffer),
        "raw_socket": lambda: raw.fetch(buffer),
    }
    content = content_of(size_bytes)
    for name, fetch in ways.items():
        buffer[:] = bytes(size_bytes)
        fetch()
        if buffer != content:
            raise SystemExit(f"{name} brought other bytes")
    return ways


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
