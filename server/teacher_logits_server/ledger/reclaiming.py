"""What operators take back by force, under the ledger's lock.

A base of ``ledger.Ledger``, over ``reading``. It is the one way in which room can be reused under
a reader. So the reader is told first, where it looks at its exit check (``session_page``): what
was computed from a lease that was taken back counts as stale, whether its room was reused by then
or not. For the steps' table it was not read: a step waits for that rank, which acquires it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import (
    LeaseLostError,
    NotAllowedError,
    SessionExpiredError,
    UnknownTeacherError,
)
from teacher_logits.views import Reclaimed
from teacher_logits_server.ledger.reading import Reading
from teacher_logits_server.sessions.session import Phase

if TYPE_CHECKING:
    from teacher_logits_server.lending.leases import Lease
    from teacher_logits_server.sessions.session import Session


class Reclaiming(Reading):
    """What operators do. For its arguments see ``Handshake``."""

    def reclaim_session(self, session_id: str) -> Reclaimed:
        """End a session with all its leases, those in quarantine too.

        What a publisher wrote is lost with it, as if it had died, unless somebody has leased it.

        Raises:
            SessionExpiredError: nothing is left of the session.
        """
        with self._step():
            keys.check_epoch(session_id, self.epoch, what="session")
            session = self._sessions.find(session_id)
            if session is None:
                raise SessionExpiredError(
                    f"there is no session {session_id[:128]!r}: `teacher-logits inspect` shows "
                    "those that there are",
                    facts={"session_id": session_id[:128]},
                )
            before = self._lending.freed.total_bytes
            leases = self._lending.leases.of_session(session_id)
            was_there = session.phase is not Phase.ENDED
            for lease in leases:
                self._tell(session, lease)
            for lease_id in self._announced.leases_of(session_id):  # which it may read by now
                self._revoke(session, lease_id)
            self._end(session)
            return Reclaimed(
                freed_bytes=self._lending.freed.total_bytes - before,
                lease_count=len(leases),
                session_count=int(was_there),
            )

    def reclaim_lease(self, lease_id: str) -> Reclaimed:
        """End one lease.

        Raises:
            LeaseLostError: there is no such lease.
        """
        with self._step():
            keys.check_epoch(lease_id, self.epoch, what="lease")
            lease = self._lending.leases.by_id(lease_id)
            if lease is None:
                raise LeaseLostError(
                    f"there is no lease {lease_id[:128]!r}: `teacher-logits inspect` shows those "
                    "that there are",
                    facts={"lease_id": lease_id[:128]},
                )
            return self._reclaim([lease])

    def reclaim_teacher(self, teacher_id: str) -> Reclaimed:
        """Retire what is left of a published teacher that everybody has left.

        What is leased of it, or in quarantine, keeps its room until that ends.

        Raises:
            UnknownTeacherError: no teacher of that name is published.
            NotAllowedError: publishers or students of it are there.
        """
        with self._step():
            published = self._publishers.find(teacher_id)
            if published is None:
                raise UnknownTeacherError(
                    f"no teacher {teacher_id[:128]!r} is published here, or nothing is left of it",
                    facts={"teacher_id": teacher_id[:128]},
                )
            if not published.is_deserted:
                raise NotAllowedError(
                    f"teacher {teacher_id!r} has publishers or students: end their sessions first "
                    "(--reclaim s-...)",
                    facts={"teacher_id": teacher_id},
                )
            before = self._lending.freed.total_bytes
            self._clear_away(published)
            return Reclaimed(freed_bytes=self._lending.freed.total_bytes - before)

    def reclaim_quarantined(self) -> Reclaimed:
        """End every lease in quarantine."""
        with self._step():
            return self._reclaim(self._lending.leases.in_quarantine())

    def _reclaim(self, leases: list[Lease]) -> Reclaimed:
        before = self._lending.freed.total_bytes
        for lease in leases:
            session = self._sessions.find(lease.session_id)
            if session is not None:
                self._tell(session, lease)
            self._take_back(lease, returned=False)
            if session is not None:
                self._drop_if_done(session)
        freed = self._lending.freed.total_bytes - before
        return Reclaimed(freed_bytes=freed, lease_count=len(leases))

    def _tell(self, session: Session, lease: Lease) -> None:
        """Have the reader find out at its exit check. Comes before the room is anybody else's."""
        if not lease.streams:
            self._revoke(session, lease.lease_id)

    def _revoke(self, session: Session, lease_id: str) -> None:
        line = session.last_line
        if line is not None and line.page is not None:
            line.page.revoke(lease_id)
