"""Clients that watch a server's health and do nothing else, a connection each.

    python -m benchmarks.watchers ADDRESS COUNT

watches until its standard input ends.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import grpc
from benchmarks.report import write_line

WATCH = "/grpc.health.v1.Health/Watch"

#: Or all channels to one address share a connection.
_APART = (("grpc.use_local_subchannel_pool", 1),)


def watch_on(argv: list[str]) -> int:
    """Watch until standard input ends."""
    address, count = argv
    with ExitStack() as stack:
        for _ in range(int(count)):
            channel = stack.enter_context(grpc.insecure_channel(address, options=_APART))
            watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(WATCH)
            watching = watch(b"")
            stack.callback(watching.cancel)
            next(watching)
        write_line({"ready": True})
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(watch_on(sys.argv[1:]))
