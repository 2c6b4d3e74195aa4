"""A publisher's room: which payload lies where in its own slabs, and when that is free again.

Pure; ``own_slabs`` carries out. What a payload's room goes through:

    take -> writing --sealing--> doubtful --sealed--> sealed --free--> the pool's again
               |                     `-- the server refused --free-->
               `-- abandoned --free-->

While a seal is under way, and where its answer never came, the room is doubtful: the server
may have taken it. Then only the server's word frees it.

Promises: a payload leaves room for one more of its size while a lower step waits for room
here, or while the lowest step that lacks a shard is a lower one and has no room here yet.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError, PoolFullError
from teacher_logits.layout import round_up
from teacher_logits.pool import PAGE_BYTES, SLOTS_PER_SLAB, Growth, Pool
from teacher_logits_client.slabs.placed_room import PlacedRoom

if TYPE_CHECKING:
    from teacher_logits.payload import Extent
    from teacher_logits.pool import PoolUsage
    from teacher_logits_client.slabs.placed_room import Place


class Stage(enum.Enum):
    """Where a payload stands."""

    WRITING = "being written"
    DOUBTFUL = "sealed, as far as is known"
    SEALED = "not read by all yet"


@dataclass(kw_only=True)
class Held:
    """Room of one payload. The table changes it, and ``wants_copy`` whoever seals it."""

    step: int
    extent: Extent
    stage: Stage = Stage.WRITING
    #: Some reader cannot open a device's memory: what lies there is copied before the seal.
    wants_copy: bool = False


@dataclass(frozen=True, kw_only=True)
class Full:
    """There is no room now. ``droppable`` are slabs in which nothing lies: without them there
    may be; ``is_kept`` where there is room, which is kept for the lowest open step."""

    is_kept: bool
    droppable: tuple[str, ...]


class PublisherRoom:
    """The room of one publisher.

    Args:
        pool_size_bytes: most bytes that its slabs may have together.
        slab_size_bytes: usual size of a slab.
    """

    def __init__(self, *, pool_size_bytes: int, slab_size_bytes: int) -> None:
        self._pool = Pool(
            budget_bytes=pool_size_bytes,
            slab_size_bytes=min(slab_size_bytes, pool_size_bytes),
            slots_per_slab=SLOTS_PER_SLAB,
        )
        #: Room in memory that its owner registered; none of the pool's.
        self.placed = PlacedRoom()
        self._held: dict[str, Held] = {}
        self._lowest_open_step: int | None = None
        #: Steps that wait for room.
        self._wanted: set[int] = set()
        #: Whether there may be memory for one more slab.
        self._grows = True

    def usage(self) -> PoolUsage:
        """Return where the pool's bytes are; doubtful ones are in quarantine."""
        return self._pool.usage()

    def check_fits(self, size_bytes: int) -> None:
        """Refuse a payload that can never fit.

        Raises:
            PayloadInvalidError: it is larger than the pool.
        """
        budget = self._pool.budget_bytes
        if round_up(size_bytes, PAGE_BYTES) > budget:
            raise PayloadInvalidError(
                f"a payload of {size_bytes} bytes can never fit this publisher's pool of {budget} "
                "bytes: raise pool_size_bytes of open_publisher, or keep fewer positions or "
                "entries",
                facts={
                    "need_bytes": size_bytes,
                    "free_bytes": self.usage().free_bytes,
                    "budget_bytes": budget,
                },
            )

    def note_lowest_open(self, step: int | None) -> None:
        """Learn which is the lowest step that lacks a shard; None where that is not known."""
        self._lowest_open_step = step

    def note_growth(self, *, has_memory: bool) -> None:
        """Learn whether there is memory for one more slab, until one comes or is dropped."""
        self._grows = has_memory

    def want(self, step: int) -> None:
        """Note that a step waits for room."""
        self._wanted.add(step)

    def want_no_more(self, step: int) -> None:
        """Note that a step has its room, or does without."""
        self._wanted.discard(step)

    def take(
        self, payload_id: str, *, step: int, size_bytes: int, place: Place | None = None
    ) -> Extent | Growth | Full:
        """Take room for a payload, or say what must come first.

        ``place`` is where it is to lie, in memory that its owner registered.
        """
        if place is not None:
            placed = self.placed.take(place)
            if placed is None:
                return Full(is_kept=False, droppable=())
            self._held[payload_id] = Held(step=step, extent=placed)
            return placed
        self._pool.keep(held.extent for held in self._held.values())
        idle = set(self._pool.idle_slabs())
        try:
            extent = self._pool.reserve(size_bytes)
        except PoolFullError:
            return Full(is_kept=False, droppable=tuple(idle))
        if isinstance(extent, Growth):
            return extent
        if self._kept_for(step) is not None and not self._has_room_for_another(size_bytes):
            self._pool.free(extent)
            return Full(is_kept=True, droppable=tuple(idle - {extent.slab_id}))
        self._held[payload_id] = Held(step=step, extent=extent)
        return extent

    def add_slab(self, slab_id: str, size_bytes: int) -> None:
        """Take a slab into use."""
        self._pool.add_slab(slab_id, size_bytes)
        self._grows = True

    def drop_slab(self, slab_id: str) -> None:
        """Forget a slab in which nothing lies."""
        if slab_id in self.placed:
            self.placed.drop(slab_id)
        else:
            self._pool.drop_slab(slab_id)
            self._grows = True

    def is_idle(self, slab_id: str) -> bool:
        """Say whether nothing lies in a slab, which may be gone."""
        return all(held.extent.slab_id != slab_id for held in self._held.values())

    def find(self, payload_id: str) -> Held | None:
        """Return where a payload lies; None where it has no room here."""
        return self._held.get(payload_id)

    def want_copy(self, payload_id: str) -> None:
        """Note that a payload is to be copied to the host before its seal."""
        self._held[payload_id].wants_copy = True

    def is_free(self, *, but_copied: bool = False) -> bool:
        """Say whether nothing that was sealed, or may have been, is read any more.

        With ``but_copied`` what the host has a copy of does not count.
        """
        return all(
            held.stage is Stage.WRITING or (but_copied and held.wants_copy)
            for held in self._held.values()
        )

    def is_outstanding(self, slab_id: str) -> bool:
        """Say whether a slab holds what was, or may have been, sealed and is not free."""
        return any(
            held.extent.slab_id == slab_id and held.stage is not Stage.WRITING
            for held in self._held.values()
        )

    def sealing(self, payload_id: str) -> Held | None:
        """Note that a seal goes out; return where the payload lies."""
        held = self._held.get(payload_id)
        if held is not None and held.stage is Stage.WRITING:
            held.stage = Stage.DOUBTFUL
        return held

    def doubt(self, payload_id: str) -> None:
        """Note that a seal was not answered."""
        held = self._held.get(payload_id)
        if held and held.stage is Stage.DOUBTFUL and held.extent.slab_id not in self.placed:
            self._pool.quarantine(held.extent)

    def sealed(self, payload_id: str) -> None:
        """Note that the server has taken a payload; one that is free again meanwhile is fine."""
        held = self._held.get(payload_id)
        if held is not None:
            held.stage = Stage.SEALED
            self._pool.clear_quarantine(held.extent)

    def free(self, payload_id: str) -> Extent | None:
        """Give room back to the pool; None where the payload has none."""
        held = self._held.pop(payload_id, None)
        if held is None:
            return None
        if held.extent.slab_id in self.placed:
            self.placed.free(held.extent)
        else:
            self._pool.free(held.extent)
        return held.extent

    def full_error(
        self, size_bytes: int, *, step: int, full: Full, place: Place | None = None
    ) -> PoolFullError:
        """Return the error of a payload that has found no room in time."""
        if place is not None:
            return self._place_error(place, step=step)
        usage = self.usage()
        held = sorted(self._held.values(), key=lambda each: each.step)
        waits = "; ".join(f"step {each.step} is {each.stage.value}" for each in held[:8])
        if len(held) > 8:
            waits += f"; and {len(held) - 8} more"
        kept = f", and room is kept for step {self._kept_for(step)}" if full.is_kept else ""
        return PoolFullError(
            f"step {step} needs {size_bytes} bytes in one piece; of this publisher's pool of "
            f"{usage.budget_bytes} bytes {usage.free_bytes} are free (perhaps in pieces) and "
            f"{usage.quarantined_bytes} in doubt{kept}: it waits for what is held "
            f"({waits or 'nothing'}); have students return their leases, wait longer, or raise "
            "pool_size_bytes of open_publisher",
            facts={
                "step": step,
                "need_bytes": size_bytes,
                "free_bytes": usage.free_bytes,
                "quarantined_bytes": usage.quarantined_bytes,
                "budget_bytes": usage.budget_bytes,
                "held_payloads": len(held),
            },
        )

    def _place_error(self, place: Place, *, step: int) -> PoolFullError:
        """Return the error of a payload whose place has not come free in time."""
        there = sorted(
            (held.step, held.stage.value)
            for held in self._held.values()
            if held.extent.slab_id == place.slab_id
        )
        waits = "; ".join(f"step {each} is {stage}" for each, stage in there[:8])
        end = place.offset_bytes + place.size_bytes
        return PoolFullError(
            f"step {step} is to lie in bytes {place.offset_bytes} to {end} of its registered "
            f"buffer, columns over rows included, and what lies there is not free ({waits}): wait "
            "longer, have students return their leases, or use another part of the buffer",
            facts={
                "step": step,
                "offset_bytes": place.offset_bytes,
                "need_bytes": place.size_bytes,
                "held_payloads": len(there),
            },
        )

    def _kept_for(self, step: int) -> int | None:
        """Return the lower step that ``step`` has to leave room for; None where there is none."""
        lower = {wanted for wanted in self._wanted if wanted < step}
        lowest = self._lowest_open_step
        if lowest is not None and lowest < step:
            lower.add(lowest)
        return min(lower - {held.step for held in self._held.values()}, default=None)

    def _has_room_for_another(self, size_bytes: int) -> bool:
        try:
            probe = self._pool.reserve(size_bytes)
        except PoolFullError:
            return False
        if isinstance(probe, Growth):
            return self._grows
        self._pool.free(probe)
        return True


def with_holders(full: PoolFullError, holders: str) -> PoolFullError:
    """Return an error that names whom the server says that room waits for, if anybody."""
    if not holders:
        return full
    return PoolFullError(
        f"{full.message} ({holders})", facts=full.facts, retry_after=full.retry_after
    )
