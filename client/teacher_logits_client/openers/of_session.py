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

    from teacher_logits_client.agreement import Agreed
    from teacher_logits_client.openers import Opener
    from teacher_logits_client.openers.stream import BufferPool


def openers_of(
    agreed: Agreed,
    *,
    mode: MapMode,
    buffers: BufferPool,
    read: Callable[[str, int, float], Iterator[bytes]],
    count: Callable[[int], None],
) -> dict[Transport, Opener]:
    """Return the openers by their transport.

    Args:
        read: streams a lease's bytes; ``count`` is told how many came.
    """
    openers: dict[Transport, Opener] = {
        Transport.STREAM: StreamOpener(read, pool=buffers, count=count)
    }
    if agreed.line is not None:
        openers[Transport.SHARED_MEMORY] = SharedMemoryOpener(
            agreed.line.get_slab,
            mode=MapMode.COW if mode is MapMode.COW else MapMode.READ_ONLY,
            is_revoked=agreed.line.is_revoked,
            watch=agreed.line.watch,
        )
    if agreed.resident is not None:
        openers[Transport.LOCAL] = LocalOpener(agreed.resident)
    return openers
