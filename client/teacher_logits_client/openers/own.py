"""Memory that is the reader's own for good: what ``MapMode.COPY`` gives, over any transport.

A column is copied where it lies: on the host into host memory, on a device into memory of torch's
own on the same device. The copies are complete when the payload is made, and the writer's room may
go back.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from teacher_logits.devices.views import DeviceView
from teacher_logits.layout import round_up
from teacher_logits.tensors import column_tensor, to_bytes
from teacher_logits_client.openers.host_payload import HostPayload

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from teacher_logits.layout import Column, ColumnKind
    from teacher_logits_client.openers import OpenedPayload, View


class OwnPayload:
    """A payload in memory that is the reader's own for good: whoever has the tensors owns it.

    ``device`` is where its columns over positions are.
    """

    copied = True

    def __init__(self, opened: OpenedPayload, columns: Sequence[Column]) -> None:
        """Copy an opened payload; keep its memory where the bytes were copied already."""
        self.device = opened.device
        self._on_device: dict[ColumnKind, torch.Tensor] = {}
        self._dlpack_device = (0, 0)
        if opened.copied and isinstance(opened, HostPayload):
            self._host = HostPayload(opened.buffer)
        else:
            self._host = self._copy(opened, columns)
            opened.finish(outlived=False)
            opened.vacate()
        #: Asked when the copy was complete; what becomes of the room later is no concern of it.
        self._was_current = opened.is_current()

    def _copy(self, opened: OpenedPayload, columns: Sequence[Column]) -> HostPayload:
        """Copy each column; the host's to where it lies in its payload, and nothing around it."""
        size = round_up(max((each.end_bytes for each in columns), default=1), mmap.PAGESIZE)
        memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for column in columns:
            view = opened.view_of(column)
            if isinstance(view, DeviceView):
                self._dlpack_device = view.dlpack_device
                self._on_device[column.kind] = column_tensor(view, column).clone()
            else:
                memory[column.offset_bytes : column.end_bytes] = opened.bytes_of(column)
        return HostPayload(memory)

    @property
    def buffer(self) -> memoryview:
        """The bytes on the host, from the payload's first on."""
        return self._host.buffer

    def view_of(self, column: Column) -> View:
        """Return a new object over a column's memory; see ``OpenedPayload.view_of``."""
        own = self._on_device.get(column.kind)
        if own is None:
            return self._host.view_of(column)
        # A view starts where the payload would, of which only this column is here.
        start = own.data_ptr() - column.offset_bytes if own.numel() else 0
        return DeviceView(start, column.end_bytes, device=self._dlpack_device, owner=own)

    def bytes_of(self, column: Column) -> memoryview:
        """Return a column's bytes; a copy of those on a device."""
        own = self._on_device.get(column.kind)
        if own is None:
            return self._host.bytes_of(column)
        return memoryview(to_bytes(own.cpu()))

    def note_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from other use until a stream has done its work, as torch does it."""
        for own in self._on_device.values():
            if own.is_cuda:
                own.record_stream(stream)

    def finish(self, *, outlived: bool) -> None:
        """Do nothing: torch takes memory back in the order of its streams."""

    def is_current(self) -> bool:
        """Say whether the bytes were still those of the lease when they had been copied."""
        return self._was_current

    def vacate(self) -> int:
        """Do nothing."""
        return 0
