"""Leases come back: one by one, or all that a request was granted, under the ledger's lock.

A base of ``ledger.Ledger``, over ``reclaiming``. Promises: to return a lease twice is fine, and so
is to return what a call was granted that never heard of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import SessionExpiredError
from teacher_logits_server.ledger.reclaiming import Reclaiming

if TYPE_CHECKING:
    from teacher_logits_server.lending.leases import Lease
    from teacher_logits_server.sessions.session import Session


class Returning(Reclaiming):
    """Leases that come back. For its arguments see ``Handshake``."""

    def release(self, session_id: str, lease_id: str, *, unread: bool = False) -> bool:
        """Take a lease back; once more is fine, and so is one whose session was closed.

        Returns whether anything is left of the session. With ``unread`` nobody has read what was
        leased: its step still waits for this reader, who may ask for it again.

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
                return True
            self._sessions.note(session, now=now)
            self._take_back(lease, returned=not unread)
            self._drop_if_done(session)
            return self._sessions.find(session_id) is not None

    def release_request(self, session_id: str, request_id: str) -> None:
        """Take back what a request was granted, and grant it nothing any more; twice is fine.

        For a client whose call ended before its lease, or its step, was in hand: what is given
        back so was not read.

        Raises:
            SessionExpiredError: the session has ended, and its leases with it.
            RequestInvalidError: the id is no name.
        """
        with self._step() as now:
            keys.check_epoch(session_id, self.epoch, what="session")
            keys.check_name(request_id, what="request id")
            leases = self._granted(session_id, request_id)
            session = self._sessions.find(session_id)
            if session is None or (not leases and self._sessions.is_over(session, now=now)):
                self._check_returned(session_id, session, now)
                return
            self._sessions.note(session, now=now)
            session.requests.give_up(request_id)
            grant = self._grants.of_request(session_id, request_id)
            if grant is not None:
                session.untold |= {each.writer_id for each in grant.terms.settlements}
            for lease in leases:
                self._take_back(lease, returned=False)
            if leases:
                self._drop_if_done(session)

    def _granted(self, session_id: str, request_id: str) -> list[Lease]:
        """Return the leases that a request was granted and that are out."""
        leases = self._lending.leases
        lease = leases.of_request(session_id, request_id)
        grant = self._grants.of_request(session_id, request_id)
        if grant is None:
            return [] if lease is None else [lease]
        return [leases.get(session_id, lease_id) for lease_id in sorted(grant.open_leases)]

    def _check_returned(self, session_id: str, session: Session | None, now: float) -> None:
        """Say of a lease that is not there whether it was returned or ended with its session."""
        if session is not None and not self._sessions.is_over(session, now=now):
            return
        raise SessionExpiredError(
            f"session {session_id[:128]!r} has ended, and its leases with it: nothing is left to "
            "return",
            facts={"session_id": session_id[:128]},
        )
