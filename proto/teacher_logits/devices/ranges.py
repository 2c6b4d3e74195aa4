"""Where a device slab and its columns may lie: the checks of numbers that a peer sends.

    allocation                 0 ...... base offset ............................ allocation end
    slab, device_bytes                  0 .... extent ................ device end
    column on the device                       0 ... column offset ... column end

What a peer says of its memory is checked once, as it comes off the wire (``check_claimed``), and
where a column lies when it is asked for; whether the allocation is as large as its writer says, the
driver is asked. Python's integers do not overflow, and what no device has is refused: no driver is
ever asked for an address that was made from an unchecked number. Columns over rows are none of the
device's, and lie in the host twin.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from teacher_logits.device_memory import HANDLE_BYTES, MAX_ALLOCATION_BYTES
from teacher_logits.errors import RequestInvalidError, SlabOpenError
from teacher_logits.layout import ALIGNMENT_BYTES, is_on_device

if TYPE_CHECKING:
    from teacher_logits.device_memory import ExportedMemory
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent


_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/_-]{1,90}\Z")


def check_claimed(memory: ExportedMemory, *, what: str, size_bytes: int = 1) -> ExportedMemory:
    """Return what a peer says of memory that it exported, if it may be so.

    ``size_bytes`` from the base offset on have to lie in the allocation; ``what`` names it.

    Raises:
        RequestInvalidError: a handle of another length, a UUID that is none, or numbers that
            cannot be.
    """
    if len(memory.handle) != HANDLE_BYTES:
        raise RequestInvalidError(
            f"{what} has a handle of {len(memory.handle)} bytes; the driver's have {HANDLE_BYTES}",
            facts={"handle_bytes": len(memory.handle)},
        )
    if not _UUID.match(memory.device_uuid):
        raise RequestInvalidError(
            f"{what} lies on device {memory.device_uuid[:96]!r}, which is no UUID as the driver's "
            "tools print it: GPU-... or MIG-...",
            facts={"device_uuid": memory.device_uuid[:96]},
        )
    base, allocated = memory.base_offset_bytes, memory.allocation_bytes
    in_place = 0 <= base <= base + size_bytes <= allocated <= MAX_ALLOCATION_BYTES
    if size_bytes < 1 or not in_place or base % ALIGNMENT_BYTES:
        raise RequestInvalidError(
            f"{what} has {size_bytes} bytes at {base} of an allocation of {allocated}: they lie in "
            f"it, from a multiple of {ALIGNMENT_BYTES} on, and it has at most "
            f"{MAX_ALLOCATION_BYTES}",
            facts={
                "size_bytes": size_bytes,
                "base_offset_bytes": base,
                "allocation_bytes": allocated,
            },
        )
    return memory


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
