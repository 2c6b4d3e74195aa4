"""The ledger: the server's tables behind one short lock, and the only thing the rim calls.

gRPC services, the broker's thread, the scorer's thread and the reaper share it. Its floors:

    Ledger      payloads and leases: publish, acquire, release, pin, inspect   (here)
    Handshake   sessions: open, prove, renew, end
    Room        the lock, the pool, who is told of free room

Promises: a payload is leased in the step that seals it, so that no sealed payload is ever
without a holder; a retry of a request gets the same lease; returning a lease twice is fine;
room is free once its last lease, pin and doubt are gone, and then exactly once.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import (
    NotAllowedError,
    RequestInvalidError,
    SessionExpiredError,
    TeacherLogitsError,
)
from teacher_logits.terms import SERVER_WRITER, LeaseTerms
from teacher_logits_server.capability import check_payload_suits
from teacher_logits_server.handshake import Handshake, OpenedSession
from teacher_logits_server.leases import Lease
from teacher_logits_server.views import LedgerView, view_ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Extent, Payload
    from teacher_logits_server.registry import Sealed
    from teacher_logits_server.sessions import Session

__all__ = ["Ledger", "OpenedSession"]


class Ledger(Handshake):
    """Sessions, room and leases of one server. For its arguments see ``Handshake``."""

    def publish(
        self, *, session_id: str, request_id: str, payload: Payload, extent: Extent
    ) -> LeaseTerms:
        """Seal a payload and lease it to the session that asked, in one step.

        The extent is the ledger's from here on, whatever happens. Where the request was
        answered meanwhile, that lease is returned.

        Raises:
            SessionExpiredError: the session has ended meanwhile; the room is free again.
            RequestInvalidError: the request was given up meanwhile; likewise.
        """
        with self._step() as now:
            try:
                session = self._sessions.settled(session_id, now=now)
                session.requests.check_wanted(request_id)
                lease = self._lending.leases.of_request(session_id, request_id)
            except TeacherLogitsError:
                self._lending.give_back(extent)
                raise
            if lease is not None:
                self._lending.give_back(extent)
                return self._lease_terms(session, lease, self._lending.sealed(lease))
            self._lending.seal(payload, extent)
            return self._lend(session, request_id, payload.payload_id, now)

    def note_request(self, session_id: str, request_id: str, digest: bytes) -> None:
        """Note what stands in a scoring request, so that its id is not used for another.

        Raises:
            RequestInvalidError: the id was used for another request, or is no name.
            SessionExpiredError, NotAllowedError: as for ``find_request``.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            session.requests.note(keys.check_name(request_id, what="request id"), digest)

    def find_request(self, session_id: str, request_id: str) -> LeaseTerms | None:
        """Return the lease that an earlier call with this request id got, if it lasts.

        Raises:
            RequestInvalidError: the request was given up, or its id is no name.
            SessionExpiredError: the session has ended.
            NotAllowedError: its transports are not settled.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            session.requests.check_wanted(keys.check_name(request_id, what="request id"))
            lease = self._lending.leases.of_request(session_id, request_id)
            if lease is None:
                return None
            return self._lease_terms(session, lease, self._lending.sealed(lease))

    def acquire(self, *, session_id: str, request_id: str, payload_id: str) -> LeaseTerms:
        """Lease a payload that another lease keeps; a call repeated gets the same lease.

        Raises:
            PayloadRetiredError: nobody has a lease on it, or it never was.
            PayloadInvalidError: it lacks what this session settled.
            RequestInvalidError: the request id was used for another payload, or given up.
            SessionExpiredError, NotAllowedError: as for ``find_request``.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            keys.check_epoch(payload_id, self.epoch, what="payload")
            session.requests.check_wanted(keys.check_name(request_id, what="request id"))
            lease = self._lending.leases.of_request(session_id, request_id)
            if lease is not None and lease.payload_id != payload_id:
                raise RequestInvalidError(
                    f"request id {request_id[:128]!r} has leased payload {lease.payload_id} "
                    "already; take a fresh id for each request",
                    facts={"request_id": request_id[:128], "payload_id": lease.payload_id},
                )
            if lease is not None:
                return self._lease_terms(session, lease, self._lending.sealed(lease))
            sealed = self._lending.open_payload(payload_id)
            check_payload_suits(
                session.student, sealed.payload, vocabulary_size=session.vocabulary_size
            )
            return self._lend(session, request_id, payload_id, now)

    def release(self, session_id: str, lease_id: str) -> None:
        """Take a lease back; once more is fine, and so is one whose session was closed.

        Raises:
            SessionExpiredError: the session has ended, and this lease with it.
            NotAllowedError: another session has the lease.
        """
        with self._step() as now:
            for what, identifier in (("session", session_id), ("lease", lease_id)):
                keys.check_epoch(identifier, self.epoch, what=what)
            lease = self._lending.leases.find(session_id, lease_id)
            session = self._sessions.find(session_id)
            if session is None or lease is None:
                self._check_returned(session_id, session, now)
                return
            self._sessions.note(session, now=now)
            self._lending.take_back(lease)
            self._drop_if_done(session)

    def release_request(self, session_id: str, request_id: str) -> None:
        """Take back what a request was granted, and grant it nothing any more; twice is fine.

        For a client whose call ended before its lease was in hand.

        Raises:
            SessionExpiredError: the session has ended, and its leases with it.
            RequestInvalidError: the id is no name.
        """
        with self._step() as now:
            keys.check_epoch(session_id, self.epoch, what="session")
            keys.check_name(request_id, what="request id")
            lease = self._lending.leases.of_request(session_id, request_id)
            session = self._sessions.find(session_id)
            if session is None or (lease is None and self._sessions.is_over(session, now=now)):
                self._check_returned(session_id, session, now)
                return
            self._sessions.note(session, now=now)
            session.requests.give_up(request_id)
            if lease is not None:
                self._lending.take_back(lease)
                self._drop_if_done(session)

    @contextmanager
    def pin(self, session_id: str, lease_id: str) -> Iterator[tuple[Payload, Extent]]:
        """Read a leased payload; its room is not reused before the block is left.

        Raises:
            LeaseLostError: the lease has ended, or never was.
            SessionExpiredError, NotAllowedError: as for ``find_request``; or the lease is
                another session's.
        """
        with self._step() as now:
            self._hear(session_id, now)
            keys.check_epoch(lease_id, self.epoch, what="lease")
            sealed = self._lending.pin(self._lending.leases.get(session_id, lease_id))
        try:
            yield sealed.payload, sealed.extent
        finally:
            with self._step():
                self._lending.unpin(sealed)

    def may_open(self, session_id: str, slab_id: str) -> None:
        """Refuse a slab that is not in use, or to a session not proven to share memory.

        Raises:
            SessionExpiredError: the session has ended.
            NotAllowedError: it streams, or is not settled, or there is no such slab.
        """
        with self._step() as now:
            shares_memory = self._hear(session_id, now).shares_memory
            if shares_memory and self._lending.has_slab(slab_id):
                return
        shown = slab_id[:128]
        why = (
            f"there is no slab {shown!r}; leases name those there are"
            if shares_memory
            else f"session {session_id} has settled on streaming, and slabs are for those who "
            "share memory with the server"
        )
        raise NotAllowedError(why, facts={"session_id": session_id, "slab_id": shown})

    def lease_count(self) -> int:
        """Return how many leases may still come back; those in quarantine do not count."""
        with self._step():
            return sum(not lease.quarantined for lease in self._lending.leases)

    def view(self) -> LedgerView:
        """Describe everything at this instant."""
        with self._step() as now:
            return view_ledger(
                sessions=self._sessions,
                lending=self._lending,
                teacher_id=self.teacher.teacher_id,
                draining=self._draining,
                now=now,
            )

    def _lend(self, session: Session, request_id: str, payload_id: str, now: float) -> LeaseTerms:
        lease = Lease(
            lease_id=keys.new_id("l", self.epoch),
            session_id=session.session_id,
            request_id=request_id,
            payload_id=payload_id,
            granted_at=now,
        )
        return self._lease_terms(session, lease, self._lending.lend(lease))

    def _lease_terms(self, session: Session, lease: Lease, sealed: Sealed) -> LeaseTerms:
        return LeaseTerms(
            lease_id=lease.lease_id,
            payload=sealed.payload,
            writer_id=SERVER_WRITER,
            extent=sealed.extent if session.shares_memory else None,
        )

    def _check_returned(self, session_id: str, session: Session | None, now: float) -> None:
        """Say of a lease that is not there whether it was returned or ended with its session."""
        if session is not None and not self._sessions.is_over(session, now=now):
            return
        raise SessionExpiredError(
            f"session {session_id[:128]!r} has ended, and its leases with it: nothing is left to "
            "return",
            facts={"session_id": session_id[:128]},
        )
