"""The scorer's thread: takes what waits, has room made for it, runs the engine, publishes.

    submit -> queue -> room in a slab -> a pass of the engine -> sealed and leased -> future

Passes run one at a time on this thread, or several at once elsewhere (``engines.passes``).

Promises: a job that was cancelled, or whose deadline came, gives its place back at once and
its room when the thread is next free. A job that finds no room waits for it till its deadline. A
job fails alone: where a pass of several fails, each is tried by itself. The engine's own
words go to the log. The thread outlives every ``Exception``; should it die all the same,
``healthy`` says so.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import DrainingError, EngineError, PoolFullError, TeacherLogitsError
from teacher_logits_server.batching import Batching
from teacher_logits_server.engines.answers import Asked, Part
from teacher_logits_server.engines.passes import Outcome, is_for, passes_of
from teacher_logits_server.scorer.at_exit import stop_at_exit
from teacher_logits_server.scorer.jobs import BadRows, ScoreJob, Work, plan_job
from teacher_logits_server.scorer.places import Places, Slabs, Stores
from teacher_logits_server.scorer.queue import JobQueue, too_late
from teacher_logits_server.scorer.watch import PassWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.terms import LeaseTerms
    from teacher_logits.views import QueueView
    from teacher_logits_server.engines.passes import ServedEngine
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.limits import ScorerLimits
    from teacher_logits_server.metrics.instruments import PassTimes

_LOG = logging.getLogger(__name__)


class Scorer:
    """One engine and its thread.

    Args:
        engine: used by the scorer's thread alone; whoever made it closes it.
        ledger, slabs: where payloads are entered, and where they are written.
        config: settings.
        clock: the clock of the jobs' deadlines.
        times: what its passes are measured in.
        stores: where the engine's payloads are handed out that stay where they are computed.
    """

    def __init__(
        self,
        *,
        engine: ServedEngine,
        ledger: Ledger,
        slabs: Slabs,
        config: ScorerLimits,
        clock: Clock,
        times: PassTimes | None = None,
        stores: Stores | None = None,
    ) -> None:
        self._passes = passes_of(engine)
        self._under_way: dict[Part, Work] = {}
        self._ledger = ledger
        self._places = Places(
            ledger=ledger, slabs=slabs, promise=self._passes.promise_room, stores=stores
        )
        self._config = config
        self._clock = clock
        batching = Batching(
            max_batch_tokens=config.max_batch_tokens,
            max_waiting_requests=config.max_waiting_requests,
            max_session_requests=config.max_session_requests,
            held=self._places.room_held,
        )
        self._queue = JobQueue(batching=batching, clock=clock)
        self._watch = PassWatch(times, max_batch_tokens=config.max_batch_tokens)
        self._thread = threading.Thread(target=self._live, name="scorer", daemon=True)
        ledger.on_room_freed(self._queue.room_freed)
        self._passes.on_change(self._queue.wake)

    # For the rim

    @property
    def healthy(self) -> bool:
        """Whether the thread lives: it was started, and neither stopped nor died."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()
        stop_at_exit(self)

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
            LimitReachedError: too many jobs wait, or too many are its session's.
            SessionExpiredError, EpochChangedError: the session has ended.
            DrainingError, EngineError: the scorer takes no more jobs, or none at present.
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
        if (why := self._passes.refusal) is not None:
            raise why
        self._queue.check_room(job.session_id)
        plan = plan_job(
            job,
            ledger=self._ledger,
            max_request_tokens=self._config.max_request_tokens,
            may_stay=self._passes.may_stay,
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
        turn = self._queue.next_turn(lambda: self._passes.room > 0)
        for work, error in turn.ended:
            self._end(work, error)
        seated = [
            (work, Part(answer=answer, first_row=piece.first_row, row_count=piece.row_count))
            for work, piece in turn.rows
            if (answer := self._seat(work)) is not None
        ]
        if seated:
            self._start(seated)
        while outcomes := self._passes.outcomes():
            for each in outcomes:
                with self._watch.settling(each):
                    self._settle(each)
        if (why := self._passes.refusal) is not None:
            for work in self._queue.works():
                self._end(work, why)
        return not turn.closing

    def _seat(self, work: Work) -> Asked | None:
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

    def _start(self, parts: Sequence[tuple[Work, Part]]) -> None:
        """Have some rows computed in one pass."""

        def wanted() -> bool:
            return any(self._queue.is_wanted(work) for work, _ in parts)

        self._under_way.update({part: work for work, part in parts})
        self._watch.started(parts, now=self._clock.now())
        self._passes.start(
            [part for _, part in parts],
            wanted=wanted,
            deadline=max(work.job.deadline for work, _ in parts),
        )

    def _settle(self, outcome: Outcome) -> None:
        """Write what a pass came to, and publish what is complete with it."""
        parts = [(self._under_way.pop(part), part) for part in outcome.parts]
        if outcome.unwanted:
            return
        if outcome.error is not None:
            self._recover([each for each in parts if is_for(each[0].answer, each[1])], outcome)
            return
        for at, (work, part) in enumerate(parts):
            if not is_for(work.answer, part):  # its room was given back meanwhile
                if outcome.scores:
                    outcome.scores[at].drop()
                continue
            try:
                if outcome.scores:
                    outcome.scores[at].copy_to(part)
            except Exception as error:
                self._recover([(work, part)], Outcome(parts=(part,), error=error))
                continue
            work.rows_done += part.row_count
            if work.rows_done == work.plan.request.row_count:
                self._publish(work)

    def _recover(self, parts: Sequence[tuple[Work, Part]], outcome: Outcome) -> None:
        """Find out which jobs of a failed pass the engine fails on."""
        error = outcome.error
        if len(parts) > 1 and not outcome.final:
            _LOG.warning(
                "a pass of %d requests failed; each is tried alone", len(parts), exc_info=error
            )
            for each in parts:
                self._start([each])
            return
        for work, part in parts:
            _LOG.error(
                "the teacher failed on request %s of session %s",
                *reversed(work.key),
                exc_info=error,
            )
            if outcome.final and isinstance(error, TeacherLogitsError):
                self._end(work, error)
            else:
                self._end(work, _failed_on(part))

    def _publish(self, work: Work) -> None:
        now, job = self._clock.now(), work.job
        if not self._queue.is_wanted(work) or work.answer is None:
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


def _failed_on(part: Part) -> EngineError:
    return EngineError(
        f"the teacher failed on these {part.row_count} rows; the server's log says how",
        facts={"rows": part.row_count, "first_row": part.first_row},
    )
