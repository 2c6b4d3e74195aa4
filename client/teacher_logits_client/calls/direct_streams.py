"""Direct streams: messages come to the thread that asks for them, not by way of one of gRPC's.

As a rule a thread of gRPC's makes bytes of every message and wakes the reader, which costs the
two of them some 70 us a message, a tenth of what a chunk of a payload takes.

Promises: nothing of a stream is left, wherever its reader leaves it.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

CHANNEL_OPTIONS = [("SingleThreadedUnaryStream", 1)]
"""Of ``grpc.experimental.ChannelOptions``. Streams of such a channel are read in ``ending``."""


@contextmanager
def ending(stream: grpc.Call) -> Iterator[None]:
    """End a stream with the block, if it has not ended."""
    try:
        yield
    finally:
        stream.cancel()
        _hear_out(stream)


def _hear_out(stream: grpc.Call) -> None:
    """Take the events that gRPC owes a stream which has ended, which come at once.

    Nobody else asks for them, and gRPC (1.85) keeps a stream that is owed any, and its connection,
    for good. It has no public name for this; where it has these no more, it is left to gRPC.
    """
    with suppress(AttributeError):
        while stream._state.due:  # type: ignore[attr-defined]
            stream._consume_next_event()  # type: ignore[attr-defined]
