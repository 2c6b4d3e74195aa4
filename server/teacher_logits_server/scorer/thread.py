"""The scorer's thread: takes what waits, has room made for it, runs the engine, publishes.

    submit -> queue -> room in a slab -> one pass of the engine -> sealed and leased -> future

Promises: a job that was cancelled, or whose deadline came, gives its place back at once and
its room when the pass under way ends. A job that finds no room waits for it till its deadline.
A job fails alone: where a pass of several fails, each is tried by itself. The engine's own
words go to the log. The thread outlives every ``Exception``; should it die all the same,
``healthy`` says so. At the end of a program that has not stopped its server, a thread inside
torch would take the process with it: it is stopped first, behind the pass under way.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from teacher_logits import keys
from teacher_logits.errors import DrainingError, EngineError, PoolFullError, TeacherLogitsError
from teacher_logits_server.batching import Batching
from teacher_logits_server.engines.answers import Answer, Part, fill
from teacher_logits_server.scorer.jobs import BadRows, ScoreJob, Work, plan_job
from teacher_logits_server.scorer.places import Places, Slabs
from teacher_logits_server.scorer.queue import JobQueue, too_late

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.terms import LeaseTerms
    from teacher_logits.views import QueueView
    from teacher_logits_server.engines import Engine
    from teacher_logits_server.ledger import Ledger

_LOG = logging.getLogger(__name__)
_LAST_PASS_SECONDS = 30.0


class Limits(Protocol):
    """What the scorer needs of a server's settings; ``config.ServerConfig`` has it."""

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one request, prefixes included."""

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one pass, padding included."""

    @property
    def max_waiting_requests(self) -> int:
        """Most requests that wait."""


class Scorer:
    """One engine and its thread.

    Args:
        engine: used by the scorer's thread alone.
        ledger, slabs: where payloads are entered, and where they are written.
        config: settings.
        clock: the clock of the jobs' deadlines.
    """

    def __init__(
        self, *, engine: Engine, ledger: Ledger, slabs: Slabs, config: Limits, clock: Clock
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._places = Places(ledger=ledger, slabs=slabs)
        self._config = config
        self._clock = clock
        batching = Batching(
            max_batch_tokens=config.max_batch_tokens,
            max_waiting_requests=config.max_waiting_requests,
        )
        self._queue = JobQueue(batching=batching, clock=clock)
        self._thread = threading.Thread(target=self._live, name="scorer", daemon=True)
        ledger.on_room_freed(self._queue.room_freed)

    # For the rim

    @property
    def healthy(self) -> bool:
        """Whether the thread lives: it was started, and neither stopped nor died."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()
        _started[self] = os.getpid()

    def stop(self, *, patience_seconds: float | None = None) -> None:
        """End the thread after the pass under way, and fail what waits with ``DrainingError``."""
        self._queue.close(lambda: DrainingError("the server is stopping and scores no more"))
        if self._thread.ident is not None:
            self._thread.join(patience_seconds)

    def submit(self, job: ScoreJob) -> Future[LeaseTerms]:
        """Have a job scored; the future brings its lease, which is then the session's.

        A retry, with the session and request id of an earlier call, gets what that one gets.
        ``Future.cancel`` gives the job up. It can lose the race: whoever finds that the future
        has a result after all releases that lease.

        Raises:
            PayloadInvalidError: it can never be scored; nothing was computed.
            PoolFullError: no pool of this size can hold its payload, or too many jobs wait.
            SessionExpiredError, EpochChangedError: the session has ended.
            DrainingError, EngineError: the scorer takes no more jobs.
        """
        future = self._queue.join(job)
        if future is not None:
            return future
        lease = self._ledger.find_request(job.session_id, job.request_id, job.digest)
        if lease is not None:
            future = Future()
            future.set_result(lease)
            return future
        if self._ledger.draining:
            raise DrainingError("the server is draining and takes no new work: use another one")
        plan = plan_job(
            job, ledger=self._ledger, max_request_tokens=self._config.max_request_tokens
        )
        return self._queue.add(job, plan)

    def queue(self) -> QueueView:
        """Return how much waits, runs and is done."""
        return self._queue.view()

    # The thread

    def _live(self) -> None:
        try:
            while self._take_turn():
                pass
        except BaseException:
            _LOG.critical("the scorer's thread died", exc_info=True)
            self._queue.close(
                lambda: EngineError(
                    "the teacher's thread died: restart the server; its log says why"
                )
            )
        for work, error in self._queue.rest():
            self._end(work, error)

    def _take_turn(self) -> bool:
        turn = self._queue.next_turn()
        for work, error in turn.ended:
            self._end(work, error)
        self._compute(
            [
                (work, Part(answer=answer, first_row=piece.first_row, row_count=piece.row_count))
                for work, piece in turn.rows
                if (answer := self._seat(work)) is not None
            ]
        )
        return not turn.closing

    def _seat(self, work: Work) -> Answer | None:
        """Return a job's answer over its room; None where it has no room, or has failed."""
        if work.answer is not None:
            return work.answer
        if not self._queue.may_seat(work):
            return None
        freed_count = self._queue.freed_count()
        try:
            answer = self._places.take(work)
        except PoolFullError as error:
            work.room_error = error
            self._queue.park(work, freed_count=freed_count)
            return None
        except Exception as error:
            self._end(work, error)
            return None
        self._queue.seat(work)
        return answer

    def _compute(self, parts: Sequence[tuple[Work, Part]]) -> None:
        """Run one pass, and publish what is complete with it."""

        def wanted() -> bool:
            return any(self._queue.is_wanted(work) for work, _ in parts)

        try:
            while wanted() and not fill(self._engine, [part for _, part in parts], wanted=wanted):
                pass
        except Exception:
            self._recover(parts)
            return
        for work, part in parts:
            work.rows_done += part.row_count
            if work.rows_done == work.plan.request.row_count:
                self._publish(work)

    def _recover(self, parts: Sequence[tuple[Work, Part]]) -> None:
        """Find out which jobs of a failed pass the engine fails on. Called in the handler."""
        if len(parts) > 1:
            _LOG.warning(
                "a pass of %d requests failed; each is tried alone", len(parts), exc_info=True
            )
            for each in parts:
                self._compute([each])
            return
        [(work, part)] = parts
        _LOG.exception("the teacher failed on request %s of session %s", *reversed(work.key))
        self._end(
            work,
            EngineError(
                f"the teacher failed on these {part.row_count} rows; the server's log says how",
                facts={"rows": part.row_count, "first_row": part.first_row},
            ),
        )

    def _publish(self, work: Work) -> None:
        now, job = self._clock.now(), work.job
        if not self._queue.is_wanted(work) or work.answer is None or work.extent is None:
            return  # its room comes back with the next turn
        if now >= job.deadline:
            self._end(work, too_late(work, now, for_room=False))
            return
        try:
            mask = job.bad_rows is BadRows.MASK
            payload = work.plan.payload(
                payload_id=keys.new_id("p", self._ledger.epoch),
                bad_rows=self._places.finish(work.answer, mask=mask),
            )
            lease = self._places.hand_over(work, payload)
        except Exception as error:
            self._end(work, error)
            return
        if not self._queue.finish(work, lease):
            with suppress(TeacherLogitsError):  # the session may have ended, and the lease with it
                self._ledger.release(job.session_id, lease.lease_id)

    def _end(self, work: Work, error: Exception | None) -> None:
        """Give a job's room back, and tell those who wait for it why it came to nothing."""
        self._places.give_back(work)
        if error is None:
            return
        if not isinstance(error, TeacherLogitsError):
            _LOG.error("request %s of session %s failed", *reversed(work.key), exc_info=error)
        self._queue.fail(work, error)


#: With the process that has the thread: a forked child has none.
_started: weakref.WeakKeyDictionary[Scorer, int] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    for scorer, pid in list(_started.items()):
        if pid == os.getpid() and scorer.healthy:
            scorer.stop(patience_seconds=_LAST_PASS_SECONDS)
