"""The openers of one session: those that its line, its process and its settings allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.transport import Transport
from teacher_logits_client.config import MapMode
from teacher_logits_client.openers.local import LocalOpener
from teacher_logits_client.openers.shared_memory import SharedMemoryOpener
from teacher_logits_client.openers.stream import StreamOpener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from teacher_logits.inprocess import Resident
    from teacher_logits_client.line import Line
    from teacher_logits_client.openers import Opener
    from teacher_logits_client.openers.stream import BufferPool


def openers_of(
    *,
    line: Line | None,
    resident: Resident | None,
    mode: MapMode,
    buffers: BufferPool,
    read: Callable[[str, int, float], Iterator[bytes]],
    count: Callable[[int], None],
) -> dict[Transport, Opener]:
    """Return the openers by their transport.

    Args:
        line: None where the session has none.
        resident: the server, where it is in this process.
        read: streams a lease's bytes; ``count`` is told how many came.
    """
    openers: dict[Transport, Opener] = {
        Transport.STREAM: StreamOpener(read, pool=buffers, count=count)
    }
    if line is not None:
        openers[Transport.SHARED_MEMORY] = SharedMemoryOpener(
            line.get_slab,
            mode=MapMode.COW if mode is MapMode.COW else MapMode.READ_ONLY,
            is_revoked=line.is_revoked,
            watch=line.watch,
        )
    if resident is not None:
        openers[Transport.LOCAL] = LocalOpener(resident)
    return openers
