"""What is leased, and when its memory and its room may be used again: a table of leases.

Two things come back from a lease. Its *memory* on this side is vacant once the lease is
closed and the last tensor over it is gone. Its *room* on the server's side goes back with
the memory where reader and writer share it, and at the close where the bytes were copied:

    shared   open ---> closed ---> last view and forked children gone: VACATE, RETURN
    copied   open ---> closed: RETURN ---> last view gone: VACATE

A child that was forked while shared room could be read holds that room until it ends, since
it reads the same memory.

Pure: events go in, what is to be done comes out, each step once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, kw_only=True)
class ClientStatistics:
    """What a client has and had, at one instant.

    ``open_leases`` are in their owners' hands, ``viewed_leases`` closed with their room still
    read by a tensor that outlived them, ``held_leases`` closed and unviewed but held by a
    forked child. The rest counts since the client was made: leases returned, leases that a
    view outlived, leases dropped without being closed, exit checks that found reused room,
    payloads that came another way than settled, bytes that were streamed, and bytes of
    dirtied pages that were dropped.
    """

    open_sessions: int = 0
    open_leases: int = 0
    viewed_leases: int = 0
    held_leases: int = 0
    returned_leases: int = 0
    outlived_leases: int = 0
    dropped_leases: int = 0
    stale_payloads: int = 0
    fallbacks: int = 0
    streamed_bytes: int = 0
    dirtied_bytes: int = 0


class Step(enum.Enum):
    """What is to be done about a lease: use its memory anew, or give its room back."""

    VACATE = "vacate"
    RETURN = "return"


Due = list[tuple[str, Step]]


@dataclass
class Lease:
    """One lease. Only the table changes it once it was entered."""

    #: Whether the bytes are this side's own.
    copied: bool
    #: Names of columns that some tensor still views.
    views: set[str]
    closed: bool = False
    #: Whether the server has been told, or is about to be.
    returned: bool = False
    #: Children that were forked while the room could be read, and live.
    children: set[int] = field(default_factory=set)


class LeaseTable:
    """The leases of one client that are not over and done with."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._returned = 0
        self._outlived = 0
        self._dropped = 0

    def open(self, lease_id: str, *, copied: bool, views: Iterable[str] = ()) -> None:
        """Enter a lease; ``views`` names what of it tensors view already."""
        self.enter(lease_id, Lease(views=set(views), copied=copied))

    def enter(self, lease_id: str, lease: Lease) -> None:
        """Enter a lease that was made ready."""
        self._leases[lease_id] = lease

    def viewed(self, lease_id: str, name: str) -> bool:
        """Note that tensors are to view one more column; False where the lease is closed."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.closed:
            return False
        lease.views.add(name)
        return True

    def note_closed(self, lease_id: str, *, outlived: bool = False, dropped: bool = False) -> None:
        """Note that the owner is done with a lease; ``close`` says what is due. Twice is fine.

        ``outlived``: some view is not done. ``dropped``: the owner never closed it.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.closed:
            return
        lease.closed = True
        self._outlived += outlived
        self._dropped += dropped

    def close(self, lease_id: str, *, outlived: bool = False, dropped: bool = False) -> Due:
        """Note that the owner is done with a lease, and say what is due. Twice is fine."""
        self.note_closed(lease_id, outlived=outlived, dropped=dropped)
        lease = self._leases.get(lease_id)
        return [] if lease is None else self._due(lease_id, lease)

    def view_gone(self, lease_id: str, name: str) -> Due:
        """Note that the last tensor over one column is gone."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return []
        lease.views.discard(name)
        return self._due(lease_id, lease)

    def forked(self, child: int) -> bool:
        """Hold all shared room for a child that is being made; say whether there was any."""
        shared = [lease for lease in self._leases.values() if not lease.copied]
        for lease in shared:
            lease.children.add(child)
        return bool(shared)

    def child_ended(self, child: int) -> Due:
        """Let go of what a child held."""
        due: Due = []
        for lease_id, lease in list(self._leases.items()):
            if child in lease.children:
                lease.children.discard(child)
                due += self._due(lease_id, lease)
        return due

    def statistics(self) -> ClientStatistics:
        """Return what of the statistics this table knows."""
        closed = [lease for lease in self._leases.values() if lease.closed]
        viewed = [lease for lease in closed if lease.views]
        return ClientStatistics(
            open_leases=len(self._leases) - len(closed),
            viewed_leases=len(viewed),
            held_leases=sum(bool(e.children and not e.views) for e in closed),
            returned_leases=self._returned,
            outlived_leases=self._outlived,
            dropped_leases=self._dropped,
        )

    def _due(self, lease_id: str, lease: Lease) -> Due:
        if not lease.closed:
            return []
        returned: Due = []
        vacated: Due = []
        if not (lease.views or lease.children):
            del self._leases[lease_id]
            vacated.append((lease_id, Step.VACATE))
        if not lease.returned and (lease.copied or vacated):
            lease.returned = True
            self._returned += 1
            returned.append((lease_id, Step.RETURN))
        # In this order: once room is back, its writer may write into it.
        return returned + vacated if lease.copied else vacated + returned
