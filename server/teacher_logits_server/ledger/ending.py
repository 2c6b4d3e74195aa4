"""How sessions end, under the ledger's lock, and what becomes of their leases.

A base of ``ledger.Ledger``, over ``stepping``; the clients' own close is in ``handshake``. What
becomes of room depends on what is known of the readers:

    streamed                          freed; a stream under way keeps its room till it stops
    shares memory, process died and
      its line ended                  freed: nobody who inherited its mappings is left
    shares memory, process died and
      a child holds its line          kept, until the line ends; steps wait for it no more
    shares memory, line ended while
      it lives                        quarantined, until it is returned or the process ends
    shares memory, its TTL passed     quarantined, until it is returned after all
    shares memory, session closed     kept, until it is returned or the line ends: a client ends
                                        that once it has no view left, and so it is freed then;
                                        the same where the server closed it (``dismissal``)
    in the slab of a publisher that
      is gone                         never quarantined: nobody will write there again

A publisher that dies loses what nobody has leased; one that closes its session leaves it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_server.ledger.stepping import Stepping
from teacher_logits_server.lending.leases import Doubt
from teacher_logits_server.sessions import Sessions
from teacher_logits_server.sessions.crowd import Crowd
from teacher_logits_server.sessions.session import Phase
from teacher_logits_server.settlement.proofs import line_lost

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.transport import Transport
    from teacher_logits_server.lending import Slots
    from teacher_logits_server.limits import Limits
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.publishers.engines import EngineTeacher
    from teacher_logits_server.sessions.session import Session


class Ending(Stepping):
    """The ends of sessions. For its arguments see ``Handshake``."""

    def __init__(
        self,
        *,
        epoch: str,
        limits: Limits,
        engines: Sequence[EngineTeacher],
        clock: Clock,
        slots: Slots,
        offered: frozenset[Transport],
    ) -> None:
        super().__init__(
            epoch=epoch, limits=limits, engines=engines, clock=clock, slots=slots, offered=offered
        )
        self._limits = limits
        crowd = Crowd(
            max_sessions=limits.max_sessions,
            max_student_sessions=limits.max_student_sessions,
            max_publishers=limits.max_publishers,
        )
        self._sessions = Sessions(
            ttl=limits.session_ttl, opening_ttl=limits.opening_ttl, crowd=crowd
        )
        #: Sessions whose time has passed, since the last pass of the clockwork.
        self._lapsed: list[str] = []

    def _is_shared(self) -> bool:
        return self._sessions.has_several_readers()

    def _note_alone(self, was_shared: bool) -> None:
        """Have whoever waits for room look again where one session is left, which may have all."""
        if was_shared and not self._is_shared():
            self._lending.freed.note()

    def line_ended(self, session_id: str, *, process_alive: bool, is_cut: bool = False) -> bool:
        """Learn that the last holder of a session's line let go of it.

        Where readers share memory, the session ends. Its room is in quarantine while its process
        lives, unless the client has closed the session, and free otherwise. Returns whether some
        is: then the end of the process is of interest, see ``process_ended``.

        Args:
            is_cut: it was the server that hung up, and somebody may hold the other end.
        """
        with self._step():
            session = self._sessions.find(session_id)
            if session is None or session.line is None:
                return False
            session.line = None
            if session.phase is Phase.OPENING and not process_alive:
                self._end(session)
            elif session.phase is Phase.OPENING:
                session.line_refusal = line_lost()
                session.secret = ""  # its client may never have heard it
            elif session.shares_memory:
                was_closed = session.phase is Phase.CLOSED and not is_cut
                is_doubtful = process_alive and not was_closed
                self._end(session, doubt=Doubt.LINE_ENDED if is_doubtful else None)
                return bool(self._lending.leases.of_session(session_id))
            else:
                session.proof = session.proof.without_line()
            return False

    def process_died(self, session_id: str) -> bool:
        """Learn that the process behind a line died, while the line has not ended.

        A child that it forked holds the line, and may read what it was leased: that keeps its
        room until the line ends. It gets nothing new, and no step waits for it; a publisher is
        gone with its process. Returns whether some is kept.
        """
        with self._step():
            session = self._sessions.find(session_id)
            if session is None or session.line is None or not session.shares_memory:
                return False
            session.phase = Phase.DIED
            self._end_publisher(session, in_good_order=False)
            self._drop_if_done(session)
            return bool(self._lending.leases.of_session(session_id))

    def process_ended(self, session_id: str) -> None:
        """Learn that the process behind a line ended after the line's last holder let go of it.

        That is all the proof there is, and what was in quarantine for want of it is free.
        """
        with self._step():
            session = self._sessions.find(session_id)
            if session is None or session.phase is not Phase.ENDED:
                return
            for lease in self._lending.leases.of_session(session_id):
                if lease.doubt is Doubt.LINE_ENDED:
                    self._take_back(lease, returned=False)
            self._drop_if_done(session)

    def sweep(self) -> list[str]:
        """End the sessions whose time has passed; return those that ended so since the last pass.

        Steps go that a teacher has left which everybody left ``keep_deserted`` ago.
        """
        with self._step() as now:
            for session in self._sessions.lapse(now=now):
                self._lapse(session)
            keep_seconds = self._limits.keep_deserted.total_seconds()
            for published in self._publishers.left_over(since=now - keep_seconds):
                self._clear_away(published)
            lapsed, self._lapsed = self._lapsed, []
            return lapsed

    def _lapse_over(self, session_ids: Iterable[str], now: float) -> bool:
        """End those of some sessions whose time has passed; return whether there are any."""
        sessions = [s for s in map(self._sessions.find, session_ids) if s is not None]
        over = [session for session in sessions if self._sessions.is_over(session, now=now)]
        for session in over:
            self._lapse(session)
        return bool(over)

    def _lapse(self, session: Session) -> None:
        self._lapsed.append(session.session_id)
        self._end(session, doubt=Doubt.TTL_PASSED if session.shares_memory else None)

    def _end(self, session: Session, *, doubt: Doubt | None = None) -> None:
        """End a session and each of its leases; readers in doubt keep their room."""
        was_shared = self._is_shared()
        session.phase = Phase.ENDED
        self._note_alone(was_shared)
        self._announced.forget(session.session_id)
        self._end_publisher(session, in_good_order=False)
        for lease in self._lending.leases.of_session(session.session_id):
            if doubt is not None and not lease.streams:
                if not lease.quarantined:
                    self._doubt(lease, doubt)
            else:
                self._take_back(lease, returned=False)
        self._drop_if_done(session)

    def _end_publisher(self, session: Session, *, in_good_order: bool) -> None:
        """Learn that a publisher is gone; what was in quarantine in its slabs is free."""
        super()._end_publisher(session, in_good_order=in_good_order)
        if not session.is_publisher:
            return
        for lease in self._lending.leases.in_quarantine():
            if self._lending.sealed(lease).owner == session.session_id:
                self._take_back(lease, returned=False)
                reader = self._sessions.find(lease.session_id)
                if reader is not None:
                    self._drop_if_done(reader)

    def _drop_if_done(self, session: Session) -> None:
        """Forget a session that nothing can happen to any more."""
        # What was announced may be read by now, until the line ends: its seal is on its way then.
        holds_some = bool(
            self._lending.leases.of_session(session.session_id)
            or self._announced.steps_of(session.session_id)
        )
        is_closed = session.phase is Phase.CLOSED and not holds_some
        if is_closed or session.phase in (Phase.DIED, Phase.ENDED):
            self._end_reader(session)
        if holds_some:
            return
        if session.phase is Phase.DIED or (session.phase is Phase.CLOSED and session.line is None):
            session.phase = Phase.ENDED
        if session.phase is Phase.ENDED:
            self._mail.forget(session.session_id)
            self._lending.forget_reader(session.session_id)
            self._sessions.drop(session)
            # Whoever still has the session, an error's traceback say, keeps no page mapped.
            session.line = session.last_line = None

    def _close_reader(self, session: Session) -> None:
        """Learn that a student's session gets no step but those that it has."""
        published = self._publishers.find(session.teacher_id)
        if published is not None and not session.is_publisher:
            self._news.teachers_changed |= session.is_contested
            session_id = session.session_id
            has = self._grants.steps_of(session_id) | self._announced.steps_of(session_id)
            published.steps.close(session_id, has)
            self._carry_out(published)

    def _end_reader(self, session: Session) -> None:
        """Learn that a student's session reads no step any more."""
        published = self._publishers.find(session.teacher_id)
        self._news.teachers_changed |= session.is_contested
        if published is not None and not session.is_publisher:
            published.steps.leave(session.session_id)
            self._carry_out(published)
            self._publishers.note_left(session.teacher_id, now=self._clock.now())

    def _clear_away(self, published: Published) -> None:
        """Retire all that is left of a teacher that everybody has left."""
        published.steps.retire_all()
        self._carry_out(published)
        self._publishers.forget_if_over(published.profile.teacher_id)
