"""Host payloads: a payload all of whose bytes lie in memory of this process's host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from teacher_logits.layout import Column

_HOST = torch.device("cpu")


class HostPayload:
    """The part of ``OpenedPayload`` that is alike wherever on the host the bytes lie.

    ``buffer`` are the payload's bytes, from its first to its last.
    """

    device = _HOST

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    def view_of(self, column: Column) -> memoryview:
        """Return a new object over the payload's bytes; see ``OpenedPayload.view_of``."""
        del column  # all columns lie in the same bytes
        return memoryview(self.buffer)

    def bytes_of(self, column: Column) -> memoryview:
        """Return the bytes of a column; no copy."""
        return self.buffer[column.offset_bytes : column.end_bytes]

    def note_stream(self, stream: torch.cuda.Stream) -> None:
        """Do nothing: a copy of memory that is not pinned has been taken when it returns."""

    def finish(self, *, outlived: bool) -> None:
        """Do nothing, likewise."""
