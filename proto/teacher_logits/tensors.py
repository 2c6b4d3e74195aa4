"""Tensors over buffers: the one place where a column becomes a ``torch.Tensor``.

Every tensor holds the buffer object it was made over, and so keeps it alive; whoever owns
the memory learns from that object's end that no view is left.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import TYPE_CHECKING

import torch

from teacher_logits.devices.views import DeviceView, device_tensor
from teacher_logits.layout import Column, ColumnKind, ElementType, is_on_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    Buffer = memoryview | bytearray

DTYPES: dict[ElementType, torch.dtype] = {
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT32: torch.float32,
    ElementType.INT32: torch.int32,
    ElementType.INT64: torch.int64,
    ElementType.UINT8: torch.uint8,
}
ELEMENT_TYPES: dict[torch.dtype, ElementType] = {dtype: kind for kind, dtype in DTYPES.items()}


def column_tensor(buffer: Buffer | DeviceView, column: Column) -> torch.Tensor:
    """Return a view of one column; ``buffer`` starts at the payload's first byte.

    The tensor has the column's shape and shares the buffer's memory. Writing into a view
    of read-only memory ends the process: hand such views out only where that was asked for.

    Raises:
        ValueError: the buffer ends before the column, or is device memory and the column, over
            rows, lies in the host twin.
    """
    dtype = DTYPES[column.element_type]
    if isinstance(buffer, DeviceView):
        if not is_on_device(column.kind):
            raise ValueError(f"column {column.kind.value} lies in the host twin, not on the device")
        return device_tensor(
            buffer, dtype=dtype, shape=column.shape, offset_bytes=column.offset_bytes
        )
    count = column.size_bytes // column.element_type.size_bytes
    if count == 0:
        return torch.empty(column.shape, dtype=dtype)  # frombuffer refuses empty views
    if not memoryview(buffer).readonly:
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=column.offset_bytes).view(
            column.shape
        )
    # Only where it is needed: the filters are those of the whole process, for all its threads.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=column.offset_bytes)
    return flat.view(column.shape)


def column_tensors(
    buffer: Buffer | DeviceView, columns: Iterable[Column]
) -> dict[ColumnKind, torch.Tensor]:
    """Return a view of every column, by its kind."""
    return {column.kind: column_tensor(buffer, column) for column in columns}


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return a copy of a CPU tensor's elements, row-major."""
    flat = tensor.detach().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
