"""Which bytes of which slab are whose: extents, generations, quarantine, the byte budget.

Pure and synchronous. The pool decides and the rim carries out: it creates a slab when
``reserve`` answers with a ``Growth``, and writes the slots of the control page.

An extent's life, with what its slot holds:

    reserve          seal            free
    g-1 (odd)  --->  g (even)  --->  g+1 (odd)  --->  reserved again: g+1, sealed: g+2
    writer inside    readable        nobody inside

Room in quarantine is not free and not readable anew: its reader is gone but not proven
gone. Extents are whole pages, so that a reader can drop its dirtied pages of one extent
without touching another's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError, PoolFullError
from teacher_logits.layout import round_up
from teacher_logits.payload import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE_BYTES = 4096
SLOTS_PER_SLAB = 8184
"""Extents that one slab can hold at a time: the slots of its control page (``slab``)."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """``reserve`` needs a new slab with this much room for extents; create it and add it."""

    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """Bytes of the budget: ``budget = used + quarantined + free``; committed bytes are in slabs."""

    budget_bytes: int
    committed_bytes: int
    used_bytes: int
    quarantined_bytes: int
    slab_count: int
    extent_count: int

    @property
    def free_bytes(self) -> int:
        """Bytes neither used nor in quarantine."""
        return self.budget_bytes - self.used_bytes - self.quarantined_bytes


@dataclass
class _Slab:
    size_bytes: int
    #: Free runs, offset -> size; never adjacent, never empty.
    free: dict[int, int]
    #: Slots that no extent has, last used first.
    idle_slots: list[int]
    #: What a slot's extent holds when sealed next.
    next_generation: dict[int, int] = field(default_factory=dict)
    extents: dict[int, Extent] = field(default_factory=dict)

    def find_lost(self, slot_count: int) -> None:
        """Find room and slots anew that are neither free nor in an extent, if there are any."""
        used = sum(extent.size_bytes for extent in self.extents.values())
        if used + sum(self.free.values()) != self.size_bytes:
            ends = sorted((e.offset_bytes, e.size_bytes) for e in self.extents.values())
            runs, start = {}, 0
            for offset, size in [*ends, (self.size_bytes, 0)]:
                if offset > start:
                    runs[start] = offset - start
                start = offset + size
            self.free = runs
        if len(self.extents) + len(self.idle_slots) != slot_count:
            self.idle_slots = [s for s in range(slot_count - 1, -1, -1) if s not in self.extents]


class Pool:
    """Room for payloads inside a byte budget.

    Args:
        budget_bytes: most bytes that slabs may have together.
        slab_size_bytes: usual size of a slab; a larger payload gets a slab of its own size.
        slots_per_slab: most extents that one slab holds at a time.
        name, flag: what messages call it, and what raises its budget.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        slab_size_bytes: int,
        slots_per_slab: int,
        name: str = "pool",
        flag: str = "--pool-size",
    ) -> None:
        if min(budget_bytes, slab_size_bytes, slots_per_slab) < 1:
            raise ValueError("a pool needs a budget, a slab size and slots of at least 1")
        self._budget_bytes = budget_bytes
        self._slab_size_bytes = round_up(slab_size_bytes, PAGE_BYTES)
        self._slots_per_slab = slots_per_slab
        self._slabs: dict[str, _Slab] = {}
        self._quarantined: dict[tuple[str, int], int] = {}
        self.name = name
        self._way_out = f"or raise {flag} on the server"

    def check_fits(self, size_bytes: int) -> None:
        """Refuse a payload that could never fit, before anything is computed for it.

        Raises:
            PayloadInvalidError: it is larger than the whole budget; waiting does not help.
        """
        if round_up(size_bytes, PAGE_BYTES) > self._budget_bytes:
            raise PayloadInvalidError(
                f"a payload of {size_bytes} bytes can never fit the {self.name}'s budget of "
                f"{self._budget_bytes} bytes: ask for fewer rows or a smaller k, {self._way_out}",
                facts={
                    "need_bytes": size_bytes,
                    "free_bytes": self.usage().free_bytes,
                    "budget_bytes": self._budget_bytes,
                },
            )

    def reserve(self, size_bytes: int) -> Extent | Growth:
        """Take room, or say which slab must be created first.

        Raises:
            PoolFullError: it does not fit now.
            PayloadInvalidError: it never will.
        """
        self.check_fits(size_bytes)
        size = max(round_up(size_bytes, PAGE_BYTES), PAGE_BYTES)
        for slab_id, slab in self._slabs.items():
            extent = self._place(slab_id, slab, size)
            if extent is not None:
                return extent
        room = self._budget_bytes - self.usage().committed_bytes
        growth = max(size, min(self._slab_size_bytes, room))
        if growth > room:
            raise self._full(size)
        return Growth(size_bytes=growth)

    def add_slab(self, slab_id: str, size_bytes: int) -> None:
        """Take a new slab into use; ``size_bytes`` is its room for extents.

        Raises:
            PoolFullError: the budget has no room for it any more; another slab came first.
        """
        if slab_id in self._slabs:
            raise ValueError(f"slab {slab_id} is in the pool already")
        if size_bytes > self._budget_bytes - self.usage().committed_bytes:
            raise self._full(size_bytes)
        self._slabs[slab_id] = _Slab(
            size_bytes=size_bytes,
            free={0: size_bytes},
            idle_slots=list(range(self._slots_per_slab - 1, -1, -1)),
        )

    def has_slab(self, slab_id: str) -> bool:
        """Say whether a slab is in use here."""
        return slab_id in self._slabs

    def slabs(self) -> list[tuple[str, int, int]]:
        """Return (slab id, size, bytes in extents) of each slab."""
        return [
            (slab_id, slab.size_bytes, sum(e.size_bytes for e in slab.extents.values()))
            for slab_id, slab in self._slabs.items()
        ]

    def idle_slabs(self) -> list[str]:
        """Return the slabs in which no extent lies; the rim may drop them to make room."""
        return [slab_id for slab_id, slab in self._slabs.items() if not slab.extents]

    def drop_slab(self, slab_id: str) -> None:
        """Forget an idle slab; its bytes return to the budget."""
        if self._slabs[slab_id].extents:
            raise ValueError(f"slab {slab_id} still holds extents")
        del self._slabs[slab_id]

    def free(self, extent: Extent) -> None:
        """Give room back, from use or quarantine. The rim marks the slot ``generation + 1``."""
        slab = self._slabs[extent.slab_id]
        if slab.extents.get(extent.slot) != extent:
            raise ValueError(f"extent {extent} is not in use")
        slab.next_generation[extent.slot] = extent.generation + 2
        self._quarantined.pop((extent.slab_id, extent.slot), None)
        del slab.extents[extent.slot]
        slab.idle_slots.append(extent.slot)
        _give(slab.free, extent.offset_bytes, extent.size_bytes)

    def keep(self, extents: Iterable[Extent]) -> None:
        """Free all but some extents, which may be another pool's: what an interrupt left behind."""
        kept = {(extent.slab_id, extent.slot) for extent in extents}
        for slab_id, slab in self._slabs.items():
            for slot, extent in list(slab.extents.items()):
                if (slab_id, slot) not in kept:
                    self.free(extent)
            slab.find_lost(self._slots_per_slab)

    def quarantine(self, extent: Extent) -> None:
        """Mark room whose reader is gone but not proven gone."""
        if self._slabs[extent.slab_id].extents.get(extent.slot) != extent:
            raise ValueError(f"extent {extent} is not in use")
        self._quarantined[extent.slab_id, extent.slot] = extent.size_bytes

    def clear_quarantine(self, extent: Extent) -> None:
        """Count room as in use again, if it was in quarantine: who has it is known after all."""
        self._quarantined.pop((extent.slab_id, extent.slot), None)

    @property
    def budget_bytes(self) -> int:
        """Most bytes that slabs may have together."""
        return self._budget_bytes

    @property
    def quarantined_bytes(self) -> int:
        """Bytes whose reader is gone but not proven gone."""
        return sum(self._quarantined.values())

    def usage(self) -> PoolUsage:
        """Return where the budget's bytes are."""
        quarantined = self.quarantined_bytes
        in_extents = sum(e.size_bytes for s in self._slabs.values() for e in s.extents.values())
        return PoolUsage(
            budget_bytes=self._budget_bytes,
            committed_bytes=sum(slab.size_bytes for slab in self._slabs.values()),
            used_bytes=in_extents - quarantined,
            quarantined_bytes=quarantined,
            slab_count=len(self._slabs),
            extent_count=sum(len(slab.extents) for slab in self._slabs.values()),
        )

    def _place(self, slab_id: str, slab: _Slab, size: int) -> Extent | None:
        if not slab.idle_slots:
            return None
        # Best fit: the smallest run that is large enough, the lowest of equals.
        fits = [(run, offset) for offset, run in slab.free.items() if run >= size]
        if not fits:
            return None
        run, offset = min(fits)
        del slab.free[offset]
        if run > size:
            slab.free[offset + size] = run - size
        slot = slab.idle_slots.pop()
        extent = Extent(
            slab_id=slab_id,
            offset_bytes=offset,
            size_bytes=size,
            slot=slot,
            generation=slab.next_generation.get(slot, 2),
        )
        slab.extents[slot] = extent
        return extent

    def _full(self, size: int) -> PoolFullError:
        usage = self.usage()
        return PoolFullError(
            f"a payload needs {size} bytes in one piece; of the {self.name}'s "
            f"{usage.budget_bytes} bytes {usage.free_bytes} are free (perhaps in pieces) and "
            f"{usage.quarantined_bytes} in quarantine: wait for leases to come back, "
            f"{self._way_out}",
            facts={
                "need_bytes": size,
                "free_bytes": usage.free_bytes,
                "quarantined_bytes": usage.quarantined_bytes,
                "budget_bytes": usage.budget_bytes,
            },
        )


def _give(free: dict[int, int], offset: int, size: int) -> None:
    """Put a run back and join it with its neighbours."""
    behind = offset + size
    if behind in free:
        size += free.pop(behind)
    for start, run in free.items():
        if start + run == offset:
            free[start] = run + size
            return
    free[offset] = size
