"""Sessions: which student ranks are admitted, how each one's end is learnt, and that it stays.

Publishers are sessions too. Pure: events and ``now`` (seconds of the ledger's clock) in. A
session's life:

    OPENING --settle--> LOCAL    shares memory; its broker line says when it ends
       |        `-----> REMOTE   lives by its TTL; streams, or shares memory in this process
       |                  |
       | opening_ttl*     | close      LOCAL, REMOTE with memory --close--> CLOSED: no new leases,
       v                  v                and its room stays until it is returned or the end
     ENDED <-- line ends, TTL passes   LOCAL, CLOSED --process dies, line does not end--> DIED:
                                           likewise, and it reads no step any more

Promises: an ended session never comes back, whoever renews it; a TTL counts from the moment
it passed and not from the sweep that finds it; a nonce is shown once; an open that is
repeated gets the same session. (*) Or as long as the call waits that would settle it.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    NotAllowedError,
    RequestInvalidError,
    SessionExpiredError,
)
from teacher_logits_server.sessions.session import Phase, Session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.transport import Settlement
    from teacher_logits_server.sessions.crowd import Crowd


class Sessions:
    """The table of sessions.

    Args:
        ttl, opening_ttl: see ``limits.Limits``.
        crowd: how many there may be.
    """

    def __init__(self, *, ttl: timedelta, opening_ttl: timedelta, crowd: Crowd) -> None:
        self._ttl = ttl.total_seconds()
        self._opening_ttl = opening_ttl.total_seconds()
        self._crowd = crowd
        self._sessions: dict[str, Session] = {}
        self._by_request: dict[str, str] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def opened(
        self,
        request_id: str,
        profile: StudentProfile | TeacherProfile,
        *,
        now: float,
        owner: str = "",
    ) -> Session | None:
        """Return the session that an earlier call with this request id opened, if it lives.

        Raises:
            NotAllowedError: another caller has used the id.
            RequestInvalidError: the id was used with another profile.
        """
        session = self._sessions.get(self._by_request.get(request_id, ""))
        if session is None or self.is_over(session, now=now):
            return None
        session.check_owner(owner)
        if session.profile != profile:
            raise RequestInvalidError(
                f"request id {request_id!r} has opened a session with another profile already; "
                "take a fresh id for each session",
                facts={"request_id": request_id},
            )
        return session

    def check_room(self, profile: StudentProfile | TeacherProfile) -> None:
        """Refuse one session too many.

        Raises:
            LimitReachedError: there are as many of its kind as the server takes.
        """
        self._crowd.check(self._sessions.values(), profile)

    def has_several_readers(self) -> bool:
        """Say whether there are several students' sessions that may work."""
        readers = (
            each
            for each in self._sessions.values()
            if each.phase in (Phase.LOCAL, Phase.REMOTE) and not each.is_publisher
        )
        return next(readers, None) is not None and next(readers, None) is not None

    def add(self, session: Session) -> None:
        """Take a new session in."""
        self._sessions[session.session_id] = session
        self._by_request[session.request_id] = session.session_id

    def find(self, session_id: str) -> Session | None:
        """Return a session in whatever phase, or None where nothing is left of it."""
        return self._sessions.get(session_id)

    def living(self, session_id: str, *, now: float) -> Session:
        """Return a session that has not ended, nor been closed.

        Raises:
            SessionExpiredError: it has, or was never there.
        """
        session = self._sessions.get(session_id)
        if session is None or session.phase.is_leaving or self.is_over(session, now=now):
            raise SessionExpiredError(
                f"session {session_id[:128]!r} has ended, and is never revived: open a new one",
                facts={"session_id": session_id[:128]},
            )
        return session

    def settled(self, session_id: str, *, now: float) -> Session:
        """Return a living session that may work.

        Raises:
            SessionExpiredError: it has ended.
            NotAllowedError: its transports are not settled yet.
        """
        session = self.living(session_id, now=now)
        if session.phase is Phase.OPENING:
            raise NotAllowedError(
                f"session {session_id} has not settled its transports: call ProveLocality first",
                facts={"session_id": session_id},
            )
        return session

    def hear(self, session_id: str, *, now: float) -> Session:
        """Note a sign of life of a settled session; refuses as ``settled`` does."""
        session = self.settled(session_id, now=now)
        session.heard_at = now
        return session

    def note(self, session: Session, *, now: float) -> None:
        """Note a sign of life of a session in whatever phase; it revives none."""
        if not session.phase.is_leaving and not self.is_over(session, now=now):
            session.heard_at = now

    def show_nonce(self, session_id: str, nonce: bytes, *, now: float) -> None:
        """Take a session's nonce, once; it makes its bearer the one who opened the session.

        Raises:
            SessionExpiredError: the session has ended.
            NotAllowedError: it is another nonce, was shown before, or comes too late.
        """
        session = self.living(session_id, now=now)
        if session.phase is not Phase.OPENING or session.nonce_shown:
            raise NotAllowedError(
                f"session {session_id} has had its broker line: a nonce is good for one, before "
                "ProveLocality; open a new session",
                facts={
                    "reason": "NONCE_SPENT",
                    "session_id": session_id,
                    "phase": session.phase.value,
                },
            )
        if not hmac.compare_digest(nonce, session.nonce):
            raise NotAllowedError(
                f"this is not the nonce of session {session_id}",
                facts={"reason": "NONCE_WRONG", "session_id": session_id},
            )
        session.nonce_shown = True

    def settle(self, session: Session, settlements: Sequence[Settlement], *, now: float) -> None:
        """Give an opening session its transports, and with them the way its end is learnt."""
        session.settlements = {each.writer_id: each for each in settlements}
        by_line = session.shares_memory and session.line is not None
        session.phase = Phase.LOCAL if by_line else Phase.REMOTE
        session.heard_at = now

    def close(self, session: Session) -> bool:
        """Take no new leases; say whether that ended it: not where readers may look into slabs."""
        if session.phase in (Phase.LOCAL, Phase.REMOTE) and session.shares_memory:
            session.phase = Phase.CLOSED
        elif not session.phase.is_leaving:
            session.phase = Phase.ENDED
        return session.phase is Phase.ENDED

    def lapse(self, *, now: float) -> list[Session]:
        """End every session whose time has passed; return them."""
        lapsed = [s for s in self if s.phase is not Phase.ENDED and self.is_over(s, now=now)]
        for session in lapsed:
            session.phase = Phase.ENDED
        return lapsed

    def unknown(self, known: Mapping[str, frozenset[str]]) -> list[Session]:
        """Return those that may work whose owner is not known, or not for their kind."""
        over = (Phase.CLOSED, Phase.DIED, Phase.ENDED)
        return [
            each
            for each in self._sessions.values()
            if each.phase not in over and each.kind not in known.get(each.owner, ())
        ]

    def drop(self, session: Session) -> None:
        """Forget an ended session."""
        if session.phase is not Phase.ENDED:
            raise ValueError(f"session {session.session_id} has not ended")
        del self._sessions[session.session_id]
        if self._by_request.get(session.request_id) == session.session_id:
            del self._by_request[session.request_id]

    def is_over(self, session: Session, *, now: float) -> bool:
        """Say whether a session has ended, swept or not."""
        left = self.seconds_left(session, now=now)
        return session.phase is Phase.ENDED or (left is not None and left <= 0)

    def seconds_left(self, session: Session, *, now: float) -> float | None:
        """Return when a session ends that is not heard of; None where its line tells of that."""
        if session.phase is Phase.OPENING:
            return max(session.opened_at + self._opening_ttl, session.awaited_until) - now
        return self._ttl - (now - session.heard_at) if session.liveness == "ttl" else None
