"""Payload room: where a writer writes the columns of a payload, on the host or on a device.

In a slab of device memory the columns over positions lie on the device, and those over rows in
its host twin, at the same offsets (``device_slab``). A writer sees tensors either way.

``settle`` comes before every seal: work that was given to a device goes on after the call that
gave it, and a reader must not see what it has not written yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from teacher_logits.layout import is_on_device
from teacher_logits.tensors import column_tensor, column_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from teacher_logits.devices.slab import DeviceSlab
    from teacher_logits.layout import Column, ColumnKind
    from teacher_logits.payload import Extent


class WriterRoom(Protocol):
    """Room of one payload, writable."""

    def tensors(self, columns: Sequence[Column]) -> dict[ColumnKind, torch.Tensor]:
        """Return a tensor over each column, where readers will read it."""

    def read(self, column: Column) -> memoryview:
        """Return the bytes of a column as they are now, perhaps a copy."""

    def settle(self) -> None:
        """Wait until all that the caller has had written is written."""


class HostRoom:
    """Bytes of the host, the payload's from its first on."""

    def __init__(self, room: memoryview) -> None:
        self.view = room

    def tensors(self, columns: Sequence[Column]) -> dict[ColumnKind, torch.Tensor]:
        """See ``WriterRoom``."""
        return column_tensors(self.view, columns)

    def read(self, column: Column) -> memoryview:
        """See ``WriterRoom``; no copy."""
        return self.view[column.offset_bytes : column.end_bytes]

    def settle(self) -> None:
        """Do nothing: a copy to the host is complete when it returns."""


class DeviceRoom:
    """An extent of a device slab and of its twin."""

    def __init__(self, slab: DeviceSlab, extent: Extent) -> None:
        self._slab = slab
        self._extent = extent
        self._twin = slab.room(extent)

    def tensors(self, columns: Sequence[Column]) -> dict[ColumnKind, torch.Tensor]:
        """See ``WriterRoom``."""
        return {
            column.kind: column_tensor(
                self._slab.device_view(self._extent, column)
                if is_on_device(column.kind)
                else self._twin,
                column,
            )
            for column in columns
        }

    def read(self, column: Column) -> memoryview:
        """See ``WriterRoom``; a copy where it lies on the device."""
        if is_on_device(column.kind):
            return memoryview(self._slab.read_device(self._extent, column))
        return self._twin[column.offset_bytes : column.end_bytes]

    def settle(self) -> None:
        """See ``WriterRoom``: the caller's current stream is waited for, on the host."""
        self._slab.settle()
