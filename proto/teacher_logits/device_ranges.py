"""Where a device slab and its columns may lie: the checks of numbers that a peer sends.

    allocation                 0 ...... base offset ............................ allocation end
    slab, device_bytes                  0 .... extent ................ device end
    column on the device                       0 ... column offset ... column end

Python's integers do not overflow, and what does not fit 63 bits is refused: no driver is ever
asked for an address that was made from an unchecked number. Columns over rows are none of the
device's, and lie in the host twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.device_memory import HANDLE_BYTES
from teacher_logits.errors import SlabOpenError
from teacher_logits.layout import is_on_device

if TYPE_CHECKING:
    from teacher_logits.device_memory import ExportedMemory
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent


def check_exported(slab_id: str, exported: ExportedMemory, size_bytes: int) -> None:
    """Refuse numbers of an exported slab that cannot be; sums cannot overflow here.

    Raises:
        SlabOpenError: the handle is no handle, or the slab is not inside its allocation.
    """
    if len(exported.handle) != HANDLE_BYTES:
        raise SlabOpenError(
            f"the handle of slab {slab_id} has {len(exported.handle)} bytes, and a handle has "
            f"{HANDLE_BYTES}",
            facts={"slab_id": slab_id, "handle_bytes": len(exported.handle)},
        )
    start, whole = exported.base_offset_bytes, exported.allocation_bytes
    if start < 0 or size_bytes < 1 or start + size_bytes > min(whole, (1 << 63) - 1):
        raise outside_allocation(slab_id, exported, size_bytes, whole)


def check_device_column(extent: Extent, column: Column, *, device_bytes: int) -> int:
    """Return where a column on the device ends, from its extent's start on, in bytes."""
    end = column.end_bytes
    if (
        not is_on_device(column.kind)
        or min(extent.offset_bytes, column.offset_bytes, column.size_bytes, *column.shape) < 0
        or end > extent.size_bytes
        or extent.offset_bytes + end > device_bytes
    ):
        raise SlabOpenError(
            f"column {column.kind.value}, bytes {column.offset_bytes} to {end} of an extent of "
            f"{extent.size_bytes} at {extent.offset_bytes}, is not among the {device_bytes} bytes "
            f"that slab {extent.slab_id} has on its device",
            facts={
                "column": column.kind.value,
                "column_offset_bytes": column.offset_bytes,
                "column_end_bytes": end,
                "offset_bytes": extent.offset_bytes,
                "size_bytes": extent.size_bytes,
                "device_bytes": device_bytes,
            },
        )
    return end


def outside_allocation(
    slab_id: str, exported: ExportedMemory, size: int, whole: int
) -> SlabOpenError:
    return SlabOpenError(
        f"slab {slab_id} is said to be {size} bytes at {exported.base_offset_bytes} of its "
        f"allocation of {whole} bytes on {exported.device_uuid}",
        facts={
            "slab_id": slab_id,
            "base_offset_bytes": exported.base_offset_bytes,
            "size_bytes": size,
            "allocation_bytes": whole,
            "device_uuid": exported.device_uuid,
        },
    )
