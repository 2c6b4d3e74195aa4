"""Memory that is the reader's own for good: what ``MapMode.COPY`` gives, over any transport."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from teacher_logits.layout import round_up

if TYPE_CHECKING:
    from teacher_logits_client.openers import OpenedPayload


class OwnPayload:
    """A payload in memory that is the reader's own for good: whoever has the tensors owns it."""

    copied = True

    def __init__(self, opened: OpenedPayload) -> None:
        """Copy an opened payload; keep its memory where the bytes were copied already."""
        if opened.copied:
            self.buffer = opened.buffer
        else:
            size = len(opened.buffer)
            memory = mmap.mmap(
                -1, round_up(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            memory[:size] = opened.buffer
            self.buffer = memoryview(memory)[:size]
            opened.vacate()
        #: Asked when the copy was complete; what becomes of the room later is no concern of it.
        self._was_current = opened.is_current()

    def is_current(self) -> bool:
        """Say whether the bytes were still those of the lease when they had been copied."""
        return self._was_current

    def vacate(self) -> int:
        """Do nothing."""
        return 0
