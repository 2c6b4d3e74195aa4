"""Relays: slabs that publishers write, of which the server only passes descriptors on.

Pure. Which publisher owns which slab, which extents of it may be read, and what is free again.
The server opens nothing: a publisher marks its own control pages, and hears of freed room.

Promises: an extent that is taken lies in its slab, apart from every other (of device memory: no
two columns touch, ``runs``), in a slot that no other has and with a generation that the slot has
never had; a slab's descriptor is needed until its publisher has dropped it, or is gone, and its
last extent is free. A slab id is used once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    NotAllowedError,
    PayloadInvalidError,
    PoolFullError,
)
from teacher_logits_server.lending.relayed import RelayedSlab
from teacher_logits_server.lending.runs import whole

if TYPE_CHECKING:
    from datetime import timedelta

    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.payload import Extent
    from teacher_logits.views import DeviceSlabView
    from teacher_logits_server.caps import Cap
    from teacher_logits_server.lending.runs import Run

MAX_SLAB_IDS = 1 << 18
"""Most slabs that one publisher's session may have had: their ids are kept, to be used once."""


@dataclass(frozen=True, kw_only=True)
class RelayUsage:
    """Bytes of the publishers' slabs, all together."""

    committed_bytes: int
    used_bytes: int
    quarantined_bytes: int
    slab_count: int
    extent_count: int


class Relays:
    """The slabs of all publishers, by id.

    Args:
        cap: the slabs that one publisher may have at a time; each is a descriptor that the server
            keeps.
    """

    def __init__(self, cap: Cap) -> None:
        self._cap = cap
        self._relays: dict[str, RelayedSlab] = {}
        self._used: dict[str, set[str]] = {}
        self._told_dropped: list[str] = []
        self._told_readers: list[tuple[str, str]] = []

    def add(
        self,
        slab_id: str,
        size_bytes: int,
        *,
        session_id: str,
        writer_id: str,
        device: DeviceMemoryPart | None = None,
    ) -> None:
        """Take a slab in; ``device`` is what of it lies in device memory.

        Raises:
            NotAllowedError: its id was used before, or the publisher has had too many.
            LimitReachedError: it has as many slabs as one may have.
            PayloadInvalidError: it has no room.
        """
        used = self._used.setdefault(session_id, set())
        if slab_id in self._relays or slab_id in used:
            raise NotAllowedError(
                f"slab id {slab_id!r} was used before: give each slab an id of its own",
                facts={"slab_id": slab_id},
            )
        self._cap.check(sum(relay.session_id == session_id for relay in self._relays.values()))
        if len(used) >= MAX_SLAB_IDS:
            raise NotAllowedError(
                f"this publisher has brought {len(used)} slabs, as many as a session may: open it "
                "anew, and let its slabs be used again",
                facts={"slab_count": len(used), "limit": MAX_SLAB_IDS},
            )
        if size_bytes < 1:
            raise PayloadInvalidError(
                f"slab {slab_id!r} has {size_bytes} bytes of room", facts={"size_bytes": size_bytes}
            )
        used.add(slab_id)
        self._relays[slab_id] = RelayedSlab(
            slab_id=slab_id,
            session_id=session_id,
            writer_id=writer_id,
            size_bytes=size_bytes,
            device=device,
        )

    def drop(self, slab_id: str, *, session_id: str) -> None:
        """Learn that nothing will be written to a slab any more; one that is gone is fine.

        Raises:
            NotAllowedError: it is another publisher's.
        """
        relay = self._relays.get(slab_id)
        if relay is None:
            return
        if relay.session_id != session_id:
            raise _not_yours(slab_id)
        self._drop(relay)

    def leave(self, session_id: str) -> None:
        """Learn that a publisher is gone."""
        for relay in list(self._relays.values()):
            if relay.session_id == session_id:
                self._drop(relay)
        self._used.pop(session_id, None)

    def writer_of(self, slab_id: str) -> str | None:
        """Return who writes a slab; None where there is no such slab."""
        relay = self._relays.get(slab_id)
        return relay.writer_id if relay is not None else None

    def device_of(self, slab_id: str) -> DeviceMemoryPart | None:
        """Return what of a slab lies in device memory; None where nothing does."""
        relay = self._relays.get(slab_id)
        return relay.device if relay is not None else None

    def note_passed(self, slab_id: str, session_id: str) -> None:
        """Note that a reader is passed a slab's descriptor."""
        self._relays[slab_id].passed_to.add(session_id)

    def forget_reader(self, session_id: str) -> None:
        """Learn that a session has ended."""
        for relay in self._relays.values():
            relay.passed_to.discard(session_id)

    def check_extent(
        self,
        extent: Extent,
        need_bytes: int,
        *,
        session_id: str,
        runs: tuple[Run, ...] | None = None,
    ) -> None:
        """Refuse an extent that a payload of ``need_bytes`` cannot lie in.

        ``runs`` are what the payload takes there; all of it where they are not given.

        Raises:
            NotAllowedError: the slab is not this publisher's.
            PayloadInvalidError: it lies outside of the slab, is too small, touches another, or
                its slot or generation cannot be.
        """
        relay = self._relays.get(extent.slab_id)
        if relay is None or relay.session_id != session_id:
            raise _not_yours(extent.slab_id)
        relay.check_place(extent, need_bytes, whole(extent) if runs is None else runs)

    def take(self, extent: Extent, *, runs: tuple[Run, ...] | None = None) -> None:
        """Take an extent that was checked into use."""
        relay = self._relays[extent.slab_id]
        relay.take(extent, whole(extent) if runs is None else runs)

    def free(self, extent: Extent) -> None:
        """Free an extent; its writer may use it again."""
        relay = self._relays[extent.slab_id]
        relay.free(extent)
        if relay.is_dropped:
            self._drop(relay)

    def quarantine(self, extent: Extent) -> None:
        """Mark room whose reader is gone but not proven gone."""
        relay = self._relays[extent.slab_id]
        if relay.extents.get(extent.slot) != extent:
            raise ValueError(f"extent {extent} is not in use")
        relay.quarantined.add(extent.slot)

    def is_dropped(self, slab_id: str) -> bool:
        """Say whether nobody will write to a slab any more."""
        relay = self._relays.get(slab_id)
        return relay is None or relay.is_dropped

    def check_quarantine(self, session_id: str, *, most: float, retry_after: timedelta) -> None:
        """Refuse new payloads of a publisher of whose slabs too much is in quarantine.

        Raises:
            PoolFullError: more than the share ``most`` is.
        """
        own = [relay for relay in self._relays.values() if relay.session_id == session_id]
        quarantined = sum(relay.quarantined_bytes for relay in own)
        committed = sum(relay.size_bytes for relay in own)
        if quarantined <= committed * most:
            return
        raise PoolFullError(
            f"{quarantined} of the {committed} bytes of this publisher's slabs are in quarantine, "
            f"and new payloads are refused above {most:g} of them (--max-quarantine): processes "
            "that may still read them dropped their line; end them (`teacher-logits inspect` "
            "shows them), or take their room by force (--reclaim quarantined)",
            facts={"quarantined_bytes": quarantined, "committed_bytes": committed},
            retry_after=retry_after,
        )

    def take_dropped(self) -> list[str]:
        """Return the slabs whose descriptors nobody needs any more, each once."""
        dropped, self._told_dropped = self._told_dropped, []
        return dropped

    def take_unmappable(self) -> list[tuple[str, str]]:
        """Return (session id, slab id) of those slabs and whoever may have them mapped, once."""
        told, self._told_readers = self._told_readers, []
        return told

    def usage(self) -> RelayUsage:
        """Return where the publishers' bytes are."""
        quarantined = sum(relay.quarantined_bytes for relay in self._relays.values())
        extents = [e for relay in self._relays.values() for e in relay.extents.values()]
        return RelayUsage(
            committed_bytes=sum(relay.size_bytes for relay in self._relays.values()),
            used_bytes=sum(extent.size_bytes for extent in extents) - quarantined,
            quarantined_bytes=quarantined,
            slab_count=len(self._relays),
            extent_count=len(extents),
        )

    def device_slabs(self) -> tuple[DeviceSlabView, ...]:
        """Describe the slabs in device memory."""
        views = (relay.view() for relay in self._relays.values())
        return tuple(view for view in views if view is not None)

    def _drop(self, relay: RelayedSlab) -> None:
        relay.is_dropped = True
        if not relay.extents:
            del self._relays[relay.slab_id]
            self._told_dropped.append(relay.slab_id)
            self._told_readers += [(reader, relay.slab_id) for reader in relay.passed_to]


def _not_yours(slab_id: str) -> NotAllowedError:
    return NotAllowedError(
        f"slab {slab_id[:128]!r} is none of this publisher's: pass its descriptor first",
        facts={"slab_id": slab_id[:128]},
    )
