"""The scorer's queue: jobs between the threads that bring them and the one that works them off.

``Batching`` decides; here are its lock, the futures, and who is told what. Jobs are looked up
by session and request id, so that a retry joins the job that is under way instead of a second
one; a job is dropped when nobody waits for it any more. Futures are settled outside the lock,
since whoever waits for one may call back.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, PoolFullError, TeacherLogitsError
from teacher_logits.terms import LeaseTerms
from teacher_logits.views import QueueView
from teacher_logits_server.requests import check_same
from teacher_logits_server.scorer.jobs import ScoreJob, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.clock import Clock
    from teacher_logits_server.batching import Batching, Piece
    from teacher_logits_server.scorer.jobs import Plan

LeaseFuture = Future[LeaseTerms]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the scorer's thread does next.

    ``ended`` are jobs to be failed and cleared of their room: with an error, or with None
    where nobody waits for them. ``rows`` are the rows of a pass.
    """

    ended: tuple[tuple[Work, TeacherLogitsError | None], ...]
    rows: tuple[tuple[Work, Piece], ...]
    closing: bool


class JobQueue:
    """Jobs that wait or are worked on. Methods may be called from any thread."""

    def __init__(self, *, batching: Batching, clock: Clock) -> None:
        self._batching = batching
        self._clock = clock
        self._tickets = count()
        self._changed = threading.Condition()
        self._works: dict[int, Work] = {}
        self._by_key: dict[tuple[str, str], Work] = {}
        self._abandoned: list[Work] = []
        self._scored_requests = 0
        self._scored_tokens = 0
        self._closed: Callable[[], TeacherLogitsError] | None = None
        self._woken = False

    # For those who bring jobs

    def join(self, job: ScoreJob) -> LeaseFuture | None:
        """Wait for the job of this session and request id that is here already, if one is.

        Raises:
            RequestInvalidError: that is another request under the same id.
            TeacherLogitsError: the queue is closed, saying why.
        """
        with self._changed:
            if self._closed is not None:
                raise self._closed()
            work = self._by_key.get((job.session_id, job.request_id))
            if work is None:
                return None
            check_same(job.request_id, work.job.digest, job.digest)
            return self._future(work)

    def check_room(self, session_id: str) -> None:
        """Refuse another job of a session before it is planned (``LimitReachedError``)."""
        with self._changed:
            self._batching.check_room(session_id)

    def add(self, job: ScoreJob, plan: Plan) -> LeaseFuture:
        """Let a job wait for its turn.

        Raises:
            LimitReachedError: too many wait, or too many are this session's.
            TeacherLogitsError: the queue is closed, saying why.
        """
        with self._changed:
            if self._closed is not None:
                raise self._closed()
            ticket = next(self._tickets)
            tokens = plan.request.computed_tokens()
            self._batching.add(
                ticket,
                tokens,
                deadline=job.deadline,
                session_id=job.session_id,
                size_bytes=plan.size_bytes,
                pool=plan.pool,
            )
            work = Work(ticket=ticket, job=job, plan=plan, submitted_at=self._clock.now())
            self._works[ticket] = self._by_key[work.key] = work
            self._changed.notify()
            return self._future(work)

    def room_freed(self) -> None:
        """Let those that wait for room try again."""
        with self._changed:
            self._batching.room_freed()
            self._changed.notify()

    def wake(self) -> None:
        """Let the thread have a turn: passes have ended, or there is room for more."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self, why: Callable[[], TeacherLogitsError]) -> None:
        """Take no more jobs, and have the thread come to its end."""
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify()

    def view(self) -> QueueView:
        """Return how much waits, runs and is done."""
        with self._changed:
            return QueueView(
                waiting_requests=self._batching.waiting_requests,
                waiting_tokens=self._batching.waiting_tokens,
                running_requests=self._batching.running_requests,
                scored_requests=self._scored_requests,
                scored_tokens=self._scored_tokens,
            )

    # For the scorer's thread

    def next_turn(self, may_start: Callable[[], bool]) -> Turn:
        """Wait until there is something to do, and return it: rows only where a pass may start."""
        with self._changed:
            while True:
                now = self._clock.now()
                ended: list[tuple[Work, TeacherLogitsError | None]] = [
                    (work, None) for work in self._abandoned
                ]
                self._abandoned.clear()
                for late in self._batching.expire(now):
                    work = self._works[late.ticket]
                    self._forget(work)
                    ended.append((work, too_late(work, now, for_room=late.waited_for_room)))
                closing = self._closed is not None
                pieces = self._batching.take() if not closing and may_start() else []
                if pieces or ended or closing or self._woken:
                    self._woken = False
                    rows = tuple((self._works[piece.ticket], piece) for piece in pieces)
                    return Turn(ended=tuple(ended), rows=rows, closing=closing)
                deadline = self._batching.next_deadline
                patience = threading.TIMEOUT_MAX if deadline is None else deadline - now
                self._changed.wait(min(max(patience, 0.0), threading.TIMEOUT_MAX))

    def works(self) -> list[Work]:
        """Return the jobs that wait or are worked on."""
        with self._changed:
            return list(self._works.values())

    def freed_count(self) -> int:
        """How often room came free so far; for ``park``."""
        with self._changed:
            return self._batching.freed_count

    def is_wanted(self, work: Work) -> bool:
        """Whether anybody still waits for a job. Once nobody does it is out, for good."""
        with self._changed:
            if not all(future.done() for future in work.futures):
                return True
            if work.ticket in self._works:
                self._forget(work)
                self._abandoned.append(work)
                self._changed.notify()
            return False

    def may_seat(self, work: Work) -> bool:
        """Whether a job may have room; if not, it waits behind who came before it."""
        with self._changed:
            return self._batching.may_seat(work.ticket)

    def seat(self, work: Work) -> None:
        """Note that a job has its room."""
        with self._changed:
            self._batching.seat(work.ticket)

    def park(self, work: Work, *, freed_count: int) -> None:
        """Put a job back until room comes free."""
        with self._changed:
            self._batching.park(work.ticket, freed_count=freed_count)

    def finish(self, work: Work, lease: LeaseTerms) -> bool:
        """Answer those who wait for a job; return whether anybody did."""
        with self._changed:
            self._forget(work)
            self._scored_requests += 1
            self._scored_tokens += work.plan.request.token_count
            futures = tuple(work.futures)
        waiting = [future for future in futures if future.set_running_or_notify_cancel()]
        for future in waiting:
            future.set_result(lease)
        return bool(waiting)

    def fail(self, work: Work, error: Exception) -> None:
        """Tell those who wait for a job why it came to nothing."""
        with self._changed:
            self._forget(work)
            futures = tuple(work.futures)
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def rest(self) -> list[tuple[Work, TeacherLogitsError | None]]:
        """Return all jobs that are still here, when the thread ends, with what to tell them."""
        with self._changed:
            why = self._closed
            rest = [(work, None) for work in self._abandoned]
            return [*rest, *((work, why and why()) for work in self._works.values())]

    # Within

    def _future(self, work: Work) -> LeaseFuture:
        future: LeaseFuture = Future()
        work.futures.append(future)
        future.add_done_callback(lambda done: self._on_done(work, done))
        return future

    def _on_done(self, work: Work, future: LeaseFuture) -> None:
        if future.cancelled():
            self.is_wanted(work)

    def _forget(self, work: Work) -> None:
        self._batching.drop(work.ticket)
        self._works.pop(work.ticket, None)
        if self._by_key.get(work.key) is work:
            del self._by_key[work.key]


def too_late(work: Work, now: float, *, for_room: bool) -> TeacherLogitsError:
    """Return the error of a job whose deadline has come."""
    waited = now - work.submitted_at
    full = work.room_error
    if for_room and full is not None:
        return PoolFullError(
            f"after {span_text(waited)} of waiting for room: {full.message}",
            facts={**full.facts, "waited_seconds": waited},
            retry_after=full.retry_after,
        )
    return DeadlinePassedError(
        f"the teacher had not scored {work.plan.request.token_count} tokens after "
        f"{span_text(waited)}, when the call's deadline came: allow more time, send fewer rows a "
        "call, or look with `teacher-logits inspect` at what it is busy with",
        facts={"waited_seconds": waited, "tokens": work.plan.request.token_count},
    )
