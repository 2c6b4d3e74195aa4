"""Lending: pool, payloads and leases as one thing, so that no room is free under a reader.

Pure, and without a lock: the ledger has that. Every change of a hold goes through here, and
what it does to the room follows at once:

    FREE         the pool gets the extent back; its slot is marked ``generation + 1`` (odd)
    QUARANTINED  the pool counts the extent apart
    KEPT         nothing

The engine's device memory is a pool of its own (``own_device``), with the same rules; its slabs
are the server's, and so are the slots of their host twins.

Extents of publishers' own slabs go through here too: nothing of theirs is marked, and what
comes free is told to its writer.

Promises: an extent is marked odd before a writer gets it, even when it is sealed, odd again
before anybody else can get it; room is given back once. Refuses new payloads while too much
of the budget is in quarantine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import PoolFullError
from teacher_logits.pool import Growth, Pool, PoolUsage
from teacher_logits_server.lending.freed import Freed
from teacher_logits_server.lending.full import RETRY_AFTER, check_quarantine
from teacher_logits_server.lending.holdings import Held, Holdings
from teacher_logits_server.lending.leases import Doubt, Lease, Leases
from teacher_logits_server.lending.registry import Fate, Registry, Sealed
from teacher_logits_server.lending.relays import Relays
from teacher_logits_server.lending.runs import runs_of
from teacher_logits_server.lending.shares import Shares

if TYPE_CHECKING:
    from teacher_logits.payload import Extent
    from teacher_logits_server.caps import Cap
    from teacher_logits_server.lending.own_device import OwnDevice


class Slots(Protocol):
    """The control pages of the slabs, which tell readers whether an extent may be read."""

    def mark(self, extent: Extent, generation: int) -> None:
        """Write the extent's slot: an odd number bars readers, an even one lets them in."""


class Lending:
    """Room, what lies in it, and who holds it.

    Args:
        max_quarantine: the share of the budget in quarantine above which new payloads are
            refused.
        slab_cap, session_share: see ``Relays`` and ``Holdings``.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        slots: Slots,
        slab_cap: Cap,
        max_quarantine: float = 0.5,
        session_share: float = 1.0,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._max_quarantine = max_quarantine
        self._registry = Registry()
        self.freed = Freed()
        self.leases = Leases()
        self.relays = Relays(slab_cap)
        #: Device memory of the engines', where they have some.
        self.own_device: OwnDevice | None = None
        #: Host memory that each engine's payloads may take.
        self.shares = Shares({})
        self.holdings = Holdings(session_share)

    # Room

    def check_fits(self, size_bytes: int, *, on_device: bool = False, teacher_id: str = "") -> None:
        """Refuse a payload that can never fit; see ``Pool`` and, on the host, ``Shares``."""
        self._pool_for(on_device).check_fits(size_bytes)
        if not on_device:
            self.shares.check_fits(teacher_id, size_bytes)

    def reserve(
        self,
        size_bytes: int,
        *,
        on_device: bool = False,
        teacher_id: str = "",
        session_id: str = "",
        is_shared: bool = False,
    ) -> Extent | Growth:
        """Take room and bar readers from it, or say which slab must be created first.

        Raises:
            PoolFullError: it does not fit now, or too much room is in quarantine.
            PayloadInvalidError: it never will.
        """
        pool = self._pool_for(on_device)
        pool.check_fits(size_bytes)
        if not on_device:
            self.shares.check(teacher_id, size_bytes, retry_after=RETRY_AFTER)
        if session_id and is_shared:
            self.holdings.check(pool, session_id, size_bytes, retry_after=RETRY_AFTER)
        check_quarantine(pool, size_bytes, most=self._max_quarantine)
        try:
            answer = pool.reserve(size_bytes)
        except PoolFullError as error:
            error.retry_after = RETRY_AFTER
            raise
        if not isinstance(answer, Growth):
            self._slots.mark(answer, answer.generation - 1)
            if not on_device:
                self.shares.take(teacher_id, answer)
            if session_id:
                self.holdings.take(pool, session_id, answer)
        return answer

    def room_held(self, *, on_device: bool, is_shared: bool) -> Held:
        """Return what was scored for each session takes of a pool; see ``Holdings``."""
        return self.holdings.held(self._pool_for(on_device), is_shared=is_shared)

    def add_slab(self, slab_id: str, size_bytes: int, *, on_device: bool = False) -> None:
        """Take a new slab into use; see ``Pool.add_slab``."""
        self._pool_for(on_device).add_slab(slab_id, size_bytes)

    def has_slab(self, slab_id: str) -> bool:
        """Say whether a slab of the server's own is in use."""
        return self._pool.has_slab(slab_id) or self.has_device_slab(slab_id)

    def has_device_slab(self, slab_id: str) -> bool:
        """Say whether a slab of the engine's device memory is in use."""
        return self.own_device is not None and self.own_device.pool.has_slab(slab_id)

    def take_idle_slabs(self, *, on_device: bool = False) -> list[str]:
        """Drop the slabs in which nothing lies, so that slabs of another size may come."""
        idle = self._pool_for(on_device).idle_slabs()
        drop = self.own_device.drop_slab if on_device and self.own_device else self._pool.drop_slab
        for slab_id in idle:
            drop(slab_id)
        return idle

    def give_back(self, extent: Extent) -> None:
        """Free room, from a writer or from its last reader."""
        self._slots.mark(extent, extent.generation + 1)
        self._pool_for(self.has_device_slab(extent.slab_id)).free(extent)
        self.shares.give_back(extent)
        self.holdings.give_back(extent)
        self.freed.note(extent.size_bytes)

    def check_relays(self, session_id: str) -> None:
        """Refuse new payloads of a publisher of whose own slabs too much is in quarantine."""
        self.relays.check_quarantine(session_id, most=self._max_quarantine, retry_after=RETRY_AFTER)

    def usage(self) -> PoolUsage:
        """Return where the bytes of the budget of host memory are."""
        return self._pool.usage()

    def take_unmappable(self) -> list[tuple[str, str]]:
        """Return slabs that readers are to let go of: (session id, slab id), each once."""
        own = self.own_device.take_unmappable() if self.own_device is not None else []
        return self.relays.take_unmappable() + own

    def forget_reader(self, session_id: str) -> None:
        """Learn that a session has ended, and has no slab open any more."""
        self.relays.forget_reader(session_id)
        if self.own_device is not None:
            self.own_device.forget_reader(session_id)

    # Payloads and leases

    def seal(self, sealed: Sealed) -> None:
        """Let readers into an extent; a publisher lets them into its own by itself."""
        self._registry.seal(sealed)
        if sealed.on_device and sealed.owner:
            runs = runs_of(sealed.room, sealed.payload, host_copy=sealed.host_copy)
            self.relays.take(sealed.room, runs=runs)
        elif sealed.owner:
            self.relays.take(sealed.room)
        elif sealed.extent is not None:
            self._slots.mark(sealed.extent, sealed.extent.generation)

    def bring(self, payload_id: str, extent: Extent) -> None:
        """Let readers into the copy of a payload that stays elsewhere."""
        self._registry.bring(payload_id, extent)
        self._slots.mark(extent, extent.generation)

    def payloads(self) -> list[Sealed]:
        """Return the payloads that are held."""
        return list(self._registry)

    def open_payload(self, payload_id: str) -> Sealed:
        """Return a payload that gives new leases; see ``Registry.open_payload``."""
        return self._registry.open_payload(payload_id)

    def held(self, payload_id: str) -> Sealed:
        """Return a payload that somebody holds."""
        return self._registry.held(payload_id)

    def is_held(self, payload_id: str) -> bool:
        """Say whether somebody holds a payload, or may still read it."""
        return self._registry.is_held(payload_id)

    def is_leased(self, payload_id: str) -> bool:
        """Say whether a payload has a lease."""
        return self._registry.is_leased(payload_id)

    def is_written_again(self, sealed: Sealed) -> bool:
        """Say whether a payload's room will be somebody else's, once it is free.

        It will not in the slab of a publisher that is gone: what is read there stays as it is.
        """
        return not sealed.owner or not self.relays.is_dropped(sealed.room.slab_id)

    def retire(self, payload_id: str) -> None:
        """Give no new lease on a registered payload."""
        sealed = self._registry.held(payload_id)
        self._apply(sealed, self._registry.retire(payload_id))

    def sealed(self, lease: Lease) -> Sealed:
        """Return what a lease is on."""
        return self._registry.held(lease.payload_id)

    def lend(self, lease: Lease) -> Sealed:
        """Grant a lease.

        Raises:
            PayloadRetiredError: its payload gives none any more.
        """
        sealed = self._registry.lend(lease.payload_id)
        self.leases.grant(lease)
        return sealed

    def take_back(self, lease: Lease) -> None:
        """End a lease whose reader has said, or is proven, to be gone."""
        sealed = self.sealed(lease)
        self.leases.end(lease)
        if lease.quarantined:
            self._apply(sealed, self._registry.clear_doubt(lease.payload_id))
        else:
            self._apply(sealed, self._registry.take_back(lease.payload_id))

    def quarantine(self, lease: Lease, doubt: Doubt) -> None:
        """Keep the room of a lease whose reader is gone but not proven gone."""
        self.leases.quarantine(lease, doubt)
        sealed = self.sealed(lease)
        self._apply(sealed, self._registry.doubt(lease.payload_id))

    def pin(self, payload_id: str) -> Sealed:
        """Hold a payload's room while the server reads it, whatever becomes of its leases."""
        return self._registry.pin(payload_id)

    def unpin(self, sealed: Sealed) -> None:
        """Let go of a pin."""
        payload_id = sealed.payload.payload_id
        sealed = self._registry.held(payload_id)  # it may have been brought meanwhile
        self._apply(sealed, self._registry.unpin(payload_id))

    def _apply(self, sealed: Sealed, fate: Fate) -> None:
        if fate is Fate.FREE and sealed.stays:
            self.discard(sealed)
        elif fate is Fate.FREE and sealed.owner:
            self.relays.free(sealed.room)
            self.freed.note_foreign(sealed.owner, sealed.payload.payload_id, sealed.size_bytes)
        elif fate is Fate.FREE:
            self.give_back(sealed.room)
        elif fate is Fate.QUARANTINED and sealed.owner:
            self.relays.quarantine(sealed.room)
        elif fate is Fate.QUARANTINED and sealed.extent is not None:
            pool = self._pool_for(self.has_device_slab(sealed.extent.slab_id))
            pool.quarantine(sealed.extent)

    def discard(self, sealed: Sealed) -> None:
        """Free what a payload of the server's own takes that nobody reads: here, or elsewhere."""
        if sealed.extent is not None:
            self.give_back(sealed.extent)
        if sealed.stays:
            size_bytes = 0 if sealed.extent else sealed.size_bytes
            self.freed.note_stored(sealed.payload.payload_id, size_bytes)

    def _pool_for(self, on_device: bool) -> Pool:
        if not on_device:
            return self._pool
        if self.own_device is None:
            raise ValueError("this server has no device memory of its own")
        return self.own_device.pool
