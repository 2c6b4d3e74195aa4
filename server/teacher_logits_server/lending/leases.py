"""Leases: who may read which payload, and which of them are gone but not proven gone.

Pure. A lease has no clock of its own: it lives while its session does, or until it is
returned. One whose session ended without proof that its reader is gone is *quarantined*:
it can still be returned, and holds its room until then.

Promises: a lease is found by its id, by its session, and by the request that asked for it,
so that a retry gets the same one; it ends once. Which room that frees is the registry's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.encodings import AS_WRITTEN, StreamCodec
from teacher_logits.errors import LeaseLostError, NotAllowedError
from teacher_logits_server.lending.granted import Granted

if TYPE_CHECKING:
    from collections.abc import Iterator


class Doubt(enum.Enum):
    """Why a reader that is gone may still read."""

    LINE_ENDED = "line_ended"
    TTL_PASSED = "ttl_passed"


@dataclass(kw_only=True)
class Lease:
    """The right of one session to read one payload. Only the table changes it.

    ``request_id`` is empty for the leases of a step, which its grant knows, and ``digest`` tells
    that request from another. ``rows`` are the global rows that it is for, None for all.
    ``streams``: its reader looks into no slab; ``as_object``: nor is it streamed to while an object
    store has its bytes; ``on_device``: it reads columns over positions from device memory;
    ``codec``: what its stream is encoded in. ``doubt`` says why it is in quarantine.
    """

    lease_id: str
    session_id: str
    request_id: str
    payload_id: str
    granted_at: float
    rows: range | None = None
    streams: bool = False
    as_object: bool = False
    on_device: bool = False
    codec: StreamCodec = AS_WRITTEN
    digest: bytes = b""
    doubt: Doubt | None = None

    @property
    def quarantined(self) -> bool:
        """Whether its reader is gone and not proven gone."""
        return self.doubt is not None


class Leases:
    """The table of leases."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._by_session: dict[str, dict[str, Lease]] = {}
        self._by_request: dict[tuple[str, str], Lease] = {}
        self.granted = Granted()

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def grant(self, lease: Lease) -> None:
        """Take a new lease in."""
        self._leases[lease.lease_id] = lease
        self._by_session.setdefault(lease.session_id, {})[lease.lease_id] = lease
        if lease.request_id:
            self._by_request[lease.session_id, lease.request_id] = lease

    def by_id(self, lease_id: str) -> Lease | None:
        """Return a lease, whoever has it."""
        return self._leases.get(lease_id)

    def find(self, session_id: str, lease_id: str) -> Lease | None:
        """Return a session's own lease, or None where it has ended or never was.

        Raises:
            NotAllowedError: another session has it.
        """
        lease = self._leases.get(lease_id)
        if lease is not None and lease.session_id != session_id:
            raise NotAllowedError(
                f"lease {lease_id} belongs to another session than {session_id}",
                facts={"lease_id": lease_id, "session_id": session_id},
            )
        return lease

    def get(self, session_id: str, lease_id: str) -> Lease:
        """Return a session's own lease.

        Raises:
            LeaseLostError: it has ended, or never was.
            NotAllowedError: another session has it.
        """
        lease = self.find(session_id, lease_id)
        if lease is None:
            raise LeaseLostError(
                f"session {session_id} has no lease {lease_id[:128]!r}: it was returned, or never "
                "granted; score or acquire again",
                facts={"lease_id": lease_id[:128], "session_id": session_id},
            )
        return lease

    def of_request(self, session_id: str, request_id: str) -> Lease | None:
        """Return the lease that a request of this session was granted, if it lasts."""
        return self._by_request.get((session_id, request_id))

    def of_session(self, session_id: str) -> list[Lease]:
        """Return what a session holds, quarantined leases too."""
        return list(self._by_session.get(session_id, {}).values())

    def count_of(self, session_id: str) -> int:
        """Count what a session holds."""
        return len(self._by_session.get(session_id, ()))

    def quarantine(self, lease: Lease, doubt: Doubt) -> None:
        """Mark a lease whose reader is gone but not proven gone."""
        lease.doubt = doubt

    def in_quarantine(self) -> list[Lease]:
        """Return the leases in quarantine."""
        return [lease for lease in self._leases.values() if lease.quarantined]

    def end(self, lease: Lease) -> None:
        """Forget a lease."""
        del self._leases[lease.lease_id]
        held = self._by_session[lease.session_id]
        del held[lease.lease_id]
        if not held:
            del self._by_session[lease.session_id]
        if self._by_request.get((lease.session_id, lease.request_id)) is lease:
            del self._by_request[lease.session_id, lease.request_id]
