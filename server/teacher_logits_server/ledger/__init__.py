"""The ledger: the server's tables behind one short lock, and the only thing the rim calls.

gRPC services, the broker's thread, the scorer's thread and the reaper share it. Its floors:

    Ledger      payloads and leases: publish, acquire, pin, inspect            (here)
    Returning   leases come back
    Reclaiming  what operators take back by force
    Reading     steps: students want and take them
    Sealing     seals: reservations become readable
    Publishing  publishers: reservations, room
    Relaying    publishers' own slabs, and who needs host copies of device memory
    Proving     sessions are settled by what they prove
    Admitting   students and publishers: open
    Handshake   sessions: line, renew, end
    Stepping    what becomes of payloads as steps go by                        (no calls)
    Settling    over which transport a session reads each writer               (no calls)
    Room        the lock, the pool, who is told of changes

Promises: a scored payload is leased in the step that seals it, and a registered one is held by
its step, so that no sealed payload is ever without a holder; a retry of a request gets the same
lease; returning a lease twice is fine; room is free once its last lease, pin, doubt and step
are gone, and then exactly once.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import NotAllowedError, TeacherLogitsError
from teacher_logits_server.admission.suiting import check_payload_suits
from teacher_logits_server.ledger.admitting import OpenedSession
from teacher_logits_server.ledger.returning import Returning
from teacher_logits_server.ledger.settling import check_can_come
from teacher_logits_server.lending.rooms import check_on_host, pinned
from teacher_logits_server.requests import check_same, reused
from teacher_logits_server.views import LedgerView, view_ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Extent, Payload
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_server.lending.leases import Lease
    from teacher_logits_server.lending.rooms import Pinned
    from teacher_logits_server.settlement.proofs import Line

__all__ = ["Ledger", "OpenedSession"]


class Ledger(Returning):
    """Sessions, room, steps and leases of one server. For its arguments see ``Handshake``."""

    def publish(
        self,
        *,
        session_id: str,
        request_id: str,
        payload: Payload,
        extent: Extent | None,
        digest: bytes = b"",
        host_copy: bool = False,
    ) -> LeaseTerms:
        """Seal a payload and lease it to the session that asked, in one step.

        Without an ``extent`` it stays where it was computed (``on_stored_freed``). The room is the
        ledger's from here on, whatever happens but ``HostCopyNeededError``.
        Where the request was answered meanwhile, that lease is returned. ``digest`` as for
        ``note_request``; ``host_copy``: what lies in device memory is in the slab's twin as well.

        Raises:
            HostCopyNeededError: the session cannot read device memory any more; its writer keeps
                the extent, copies, and tries again.
            SessionExpiredError: the session has ended meanwhile; the room is free again.
            RequestInvalidError: the request was given up meanwhile, or its id used for another;
                likewise.
        """
        with self._step() as now:
            sealed = self._sealed(payload, extent, host_copy=host_copy)
            try:
                session = self._sessions.settled(session_id, now=now)
                session.requests.check_wanted(request_id)
                lease = self._lending.leases.of_request(session_id, request_id)
                if lease is not None:
                    check_same(request_id, lease.digest, digest)
            except TeacherLogitsError:
                self._lending.discard(sealed)
                raise
            if lease is not None:
                self._lending.discard(sealed)
                return self._lease_terms(lease, self._lending.sealed(lease))
            self._reads_device(session, sealed)
            self._lending.seal(sealed)
            return self._lend(session, sealed, request_id=request_id, digest=digest, now=now)

    def note_request(self, session_id: str, request_id: str, digest: bytes) -> None:
        """Note what stands in a scoring request, so that its id is not used for another.

        Raises:
            RequestInvalidError: the id was used for another request, or is no name.
            SessionExpiredError, NotAllowedError: as for ``find_request``; or the session's
                teacher is published, and scores nothing.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            if session.is_publisher or self._publishers.find(session.teacher_id) is not None:
                raise NotAllowedError(
                    f"teacher {session.teacher_id!r} is published and scores nothing: acquire its "
                    "steps",
                    facts={"teacher_id": session.teacher_id},
                )
            keys.check_name(request_id, what="request id")
            if self._leased_to(session_id, request_id, digest) is None:
                self._check_leases(session_id)
            session.requests.note(request_id, digest)

    def find_request(
        self, session_id: str, request_id: str, digest: bytes = b""
    ) -> LeaseTerms | None:
        """Return the lease that an earlier call with this request id got, if it lasts.

        Raises:
            RequestInvalidError: the request was given up, its id is no name, or was used for
                another request than that of the ``digest``.
            SessionExpiredError: the session has ended.
            NotAllowedError: its transports are not settled.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            session.requests.check_wanted(keys.check_name(request_id, what="request id"))
            lease = self._leased_to(session_id, request_id, digest)
            if lease is None:
                return None
            return self._lease_terms(lease, self._lending.sealed(lease))

    def acquire(self, *, session_id: str, request_id: str, payload_id: str) -> LeaseTerms:
        """Lease a payload that a lease or a step keeps; a call repeated gets the same lease.

        The lease is on all of its rows.

        Raises:
            PayloadRetiredError: nothing keeps it, or it never was.
            NoCommonTransportError: it stays where it was computed, and cannot be streamed.
            PayloadInvalidError: it is not what this session settled, or is another teacher's.
            RequestInvalidError: the request id was used for another payload, or given up.
            SessionExpiredError, NotAllowedError: as for ``find_request``.
        """
        with self._step() as now:
            session = self._hear(session_id, now)
            keys.check_epoch(payload_id, self.epoch, what="payload")
            session.requests.check_wanted(keys.check_name(request_id, what="request id"))
            digest = b"payload " + payload_id.encode()
            lease = self._leased_to(session_id, request_id, digest)
            if lease is not None:
                return self._lease_terms(lease, self._lending.sealed(lease))
            self._check_leases(session_id)
            sealed = self._lending.open_payload(payload_id)
            check_payload_suits(
                session.student,
                sealed.payload,
                teacher_id=session.teacher_id,
                vocabulary_size=session.vocabulary_size,
                is_whole=True,
            )
            if sealed.writer_id not in session.settlements:
                session.settlements[sealed.writer_id] = self._settle(session, sealed.writer_id)
            check_can_come(session, sealed)
            return self._lend(session, sealed, request_id=request_id, digest=digest, now=now)

    @contextmanager
    def pin(self, session_id: str, lease_id: str) -> Iterator[Pinned]:
        """Read a leased payload; its room is not reused before the block is left.

        Raises:
            HostCopyNeededError: its columns over positions lie in device memory alone.
            LeaseLostError: the lease has ended, or never was.
            SessionExpiredError, NotAllowedError: as for ``find_request``; or the lease is
                another session's.
        """
        with self._step() as now:
            self._hear(session_id, now)
            keys.check_epoch(lease_id, self.epoch, what="lease")
            lease = self._lending.leases.get(session_id, lease_id)
            check_on_host(self._lending.sealed(lease))
            sealed = self._lending.pin(lease.payload_id)
            lent = pinned(sealed, self._cut(sealed, lease))
            encoding = self._encoding(lease, lent.payload)
            lent = replace(lent, encoding=encoding, as_object=lease.as_object)
        try:
            yield lent
        finally:
            with self._step():
                self._lending.unpin(sealed)

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
                publishers=self._publishers,
                draining=self._draining,
                renew_seconds=self._limits.renew_interval.total_seconds(),
                now=now,
            )

    def processes(self) -> dict[str, Line]:
        """Return who is, or was last, at the end of each session's line, by its id."""
        with self._step():
            return {s.session_id: s.last_line for s in self._sessions if s.last_line is not None}

    def _leased_to(self, session_id: str, request_id: str, digest: bytes) -> Lease | None:
        """Return what a request was granted; refuse its id for another request."""
        lease = self._lending.leases.of_request(session_id, request_id)
        if lease is not None:
            check_same(request_id, lease.digest, digest)
        if self._grants.of_request(session_id, request_id) is not None:
            raise reused(request_id)
        return lease
