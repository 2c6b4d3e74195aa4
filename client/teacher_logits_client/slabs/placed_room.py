"""Placed room: extents in memory that its owner registered, where the owner says they lie.

Pure; ``publisher_room`` has one. Nothing is chosen here: an extent lies where its tensors are, or
has to wait until what lies there is free. Slots and generations are as in ``pool``.

Promises: two extents of a slab never touch, and a slot's generation rises with every use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.payload import Extent
from teacher_logits.pool import SLOTS_PER_SLAB


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a payload is to lie: whole pages of a slab that its owner registered."""

    slab_id: str
    offset_bytes: int
    size_bytes: int


@dataclass
class _Slab:
    next_generation: dict[int, int] = field(default_factory=dict)
    extents: dict[int, Extent] = field(default_factory=dict)


class PlacedRoom:
    """The registered slabs of one publisher, by id."""

    def __init__(self) -> None:
        self._slabs: dict[str, _Slab] = {}

    def __contains__(self, slab_id: str) -> bool:
        return slab_id in self._slabs

    def add(self, slab_id: str) -> None:
        """Take a slab in."""
        self._slabs[slab_id] = _Slab()

    def drop(self, slab_id: str) -> None:
        """Forget a slab in which nothing lies."""
        del self._slabs[slab_id]

    def take(self, place: Place) -> Extent | None:
        """Take room; None where something lies there yet.

        Raises:
            PayloadInvalidError: the slab was dropped.
        """
        slab = self._slabs.get(place.slab_id)
        if slab is None:
            raise PayloadInvalidError(
                f"the columns lie in a buffer that was closed ({place.slab_id}): register it "
                "anew, and close it when nothing is published from it any more",
                facts={"slab_id": place.slab_id},
            )
        end = place.offset_bytes + place.size_bytes
        for other in slab.extents.values():
            if place.offset_bytes < other.offset_bytes + other.size_bytes:
                if other.offset_bytes < end:
                    return None
        slot = next((slot for slot in range(SLOTS_PER_SLAB) if slot not in slab.extents), None)
        if slot is None:
            return None
        extent = Extent(
            slab_id=place.slab_id,
            offset_bytes=place.offset_bytes,
            size_bytes=place.size_bytes,
            slot=slot,
            generation=slab.next_generation.get(slot, 2),
        )
        slab.extents[slot] = extent
        return extent

    def free(self, extent: Extent) -> None:
        """Give room back."""
        slab = self._slabs[extent.slab_id]
        del slab.extents[extent.slot]
        slab.next_generation[extent.slot] = extent.generation + 2
