"""A relayed slab: one slab of a publisher's, and what of it may be read.

Pure; a row of ``relays``. A slab of device memory is ``size_bytes`` of host memory, its twin, and
``device`` at the same offsets (``runs``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.pool import SLOTS_PER_SLAB
from teacher_logits.views import DeviceSlabView
from teacher_logits_server.lending.runs import device_bytes, device_end, touch

if TYPE_CHECKING:
    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.payload import Extent
    from teacher_logits_server.lending.runs import Run


@dataclass(kw_only=True)
class RelayedSlab:
    """One slab. Only its table changes it."""

    slab_id: str
    session_id: str
    writer_id: str
    size_bytes: int
    device: DeviceMemoryPart | None = None
    is_dropped: bool = False
    #: By slot.
    extents: dict[int, Extent] = field(default_factory=dict)
    runs: dict[int, tuple[Run, ...]] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)
    #: Sessions that were passed its descriptor.
    passed_to: set[str] = field(default_factory=set)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes whose reader is gone and not proven gone."""
        return sum(self.extents[slot].size_bytes for slot in self.quarantined)

    def check_place(self, extent: Extent, need_bytes: int, runs: tuple[Run, ...]) -> None:
        """Refuse a place in which a payload cannot lie, of which it takes ``runs``.

        Raises:
            PayloadInvalidError: see ``Relays.check_extent``.
        """
        end = extent.offset_bytes + extent.size_bytes
        if extent.offset_bytes < 0 or extent.size_bytes < 1 or end > self.size_bytes:
            raise _bad(extent, f"is outside the slab's {self.size_bytes} bytes")
        if extent.size_bytes < need_bytes:
            raise _bad(extent, f"is too small for a payload of {need_bytes} bytes")
        if self.device is not None and device_end(runs) > self.device.size_bytes:
            raise _bad(
                extent,
                f"has columns up to byte {device_end(runs)} of the device's memory, which has "
                f"{self.device.size_bytes}",
            )
        if not 0 <= extent.slot < SLOTS_PER_SLAB:
            raise _bad(extent, f"has slot {extent.slot} of {SLOTS_PER_SLAB}")
        if extent.slot in self.extents:
            raise _bad(extent, f"has slot {extent.slot}, which another extent has")
        last = self.generations.get(extent.slot, 0)
        if extent.generation % 2 or extent.generation <= last:
            raise _bad(
                extent, f"has generation {extent.generation}: it must be even, and above {last}"
            )
        for slot, other in self.extents.items():
            is_apart = (
                other.offset_bytes >= end
                or extent.offset_bytes >= other.offset_bytes + other.size_bytes
            )
            if not is_apart and touch(runs, self.runs[slot]):
                raise _bad(
                    extent,
                    f"touches the one of {other.size_bytes} bytes at {other.offset_bytes}, which "
                    "is not free",
                )

    def take(self, extent: Extent, runs: tuple[Run, ...]) -> None:
        """Take an extent that was checked into use."""
        self.extents[extent.slot] = extent
        self.runs[extent.slot] = runs
        self.generations[extent.slot] = extent.generation

    def free(self, extent: Extent) -> None:
        """Free an extent."""
        if self.extents.get(extent.slot) != extent:
            raise ValueError(f"extent {extent} is not in use")
        del self.extents[extent.slot], self.runs[extent.slot]
        self.quarantined.discard(extent.slot)

    def view(self) -> DeviceSlabView | None:
        """Describe it; None where none of it is device memory."""
        if self.device is None:
            return None
        return DeviceSlabView(
            slab_id=self.slab_id,
            writer_id=self.writer_id,
            session_id=self.session_id,
            device_uuid=self.device.memory.device_uuid,
            size_bytes=self.device.size_bytes,
            used_bytes=sum(map(device_bytes, self.runs.values())),
            reader_count=len(self.passed_to),
        )


def _bad(extent: Extent, what: str) -> PayloadInvalidError:
    return PayloadInvalidError(
        f"the extent of {extent.size_bytes} bytes at {extent.offset_bytes} of slab "
        f"{extent.slab_id} {what}",
        facts={
            "offset_bytes": extent.offset_bytes,
            "size_bytes": extent.size_bytes,
            "slot": extent.slot,
            "generation": extent.generation,
        },
    )
