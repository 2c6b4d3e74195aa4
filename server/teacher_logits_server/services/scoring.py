"""The service that runs the server's own teachers: one call, one job, one lease.

Sessions of a published teacher are told so: nobody here can score its rows.

Promises: a call waits as long as its deadline allows and ``default_wait`` at most; a caller
that is gone gives up its place, and a lease that nobody will hear of is taken back. A retry
with the same request id joins the call under way, or gets the lease that it got.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    DrainingError,
    NotAllowedError,
    TeacherLogitsError,
)
from teacher_logits.v1 import scoring_service_pb2 as messages
from teacher_logits.v1 import scoring_service_pb2_grpc as stubs
from teacher_logits.wire.payloads import lease_to_wire
from teacher_logits_server.services.score_requests import digest_of, is_short, read_job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from datetime import timedelta
    from typing import TypeAlias

    from grpc.aio import ServicerContext

    from teacher_logits.clock import Clock
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.scorer import ScoreJob, Scorer
    from teacher_logits_server.services.score_requests import Asked

    Context = ServicerContext[messages.ScoreRequest, messages.ScoreResponse]
    IdsContext = ServicerContext[messages.ScoredIdsRequest, messages.ScoredIdsResponse]
    _Submitted: TypeAlias = tuple[ScoreJob, Future[LeaseTerms]]


#: An answer, an error too, leaves this long before the caller's deadline: one that arrives
#: with it is lost, and the caller hears of a deadline and not of what it waited for.
_ANSWER_MARGIN_SECONDS = 0.25


@dataclass(kw_only=True)
class _Calls:
    """The calls of one request id: how many wait, and whether one has been answered."""

    waiting: int = 0
    answered: bool = False


class ScoringService(stubs.ScoringServiceServicer):
    """Turns calls into jobs of the scorer that runs their session's teacher.

    Args:
        scorers: by the id of the teacher that each runs; none where the server has no engine.
        longest_wait: what a call waits at most, whatever its own deadline.
    """

    def __init__(
        self,
        *,
        scorers: Mapping[str, Scorer],
        ledger: Ledger,
        clock: Clock,
        longest_wait: timedelta,
    ) -> None:
        self._scorers = scorers
        self._ledger = ledger
        self._clock = clock
        self._longest_wait = longest_wait.total_seconds()
        self._calls: dict[tuple[str, str], _Calls] = {}
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Tell those who wait that the server stops, whatever the teacher is at."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    async def Score(
        self, request: messages.ScoreRequest, context: Context
    ) -> messages.ScoreResponse:
        """Run the teacher over some rows and lease the payload."""
        lease = await self._answer(request, context.time_remaining())
        return messages.ScoreResponse(lease=lease_to_wire(lease))

    async def ScoredIds(
        self, request: messages.ScoredIdsRequest, context: IdsContext
    ) -> messages.ScoredIdsResponse:
        """Run the teacher over some rows and lease what it says of the client's own ids."""
        lease = await self._answer(request, context.time_remaining())
        return messages.ScoredIdsResponse(lease=lease_to_wire(lease))

    async def _answer(self, asked: Asked, remaining: float) -> LeaseTerms:
        scorer = self._scorer_of(asked.session_id)
        self._check_draining(asked)
        margin = min(_ANSWER_MARGIN_SECONDS, remaining / 10)
        wait = min(remaining - margin, self._longest_wait)
        # The job gives up first: it knows whether it waited for room or for the teacher.
        deadline = self._clock.now() + wait - min(margin, wait / 10)
        key = asked.session_id, asked.request_id
        calls = self._calls.setdefault(key, _Calls())
        calls.waiting += 1
        try:
            submit = partial(self._submit, scorer, asked, deadline)
            if is_short(asked):
                job, future = submit()
            else:
                job, future = await self._in_thread(submit, key, calls)
            return await self._scored(job, future, wait, calls)
        finally:
            self._leave(key, calls)

    def _scorer_of(self, session_id: str) -> Scorer:
        """Return what scores for a session; an unknown one is the ledger's to refuse."""
        teacher_id = str(self._ledger.describe(session_id).get("teacher_id", ""))
        scorer = self._scorers.get(teacher_id)
        if scorer is not None:
            return scorer
        self._ledger.terms(session_id)
        raise NotAllowedError(
            f"teacher {teacher_id!r} is published, and no engine here can score its rows: "
            "acquire its steps",
            facts={"session_id": session_id, "teacher_id": teacher_id},
        )

    def _submit(self, scorer: Scorer, asked: Asked, deadline: float) -> _Submitted:
        job = read_job(asked, deadline=deadline, max_tokens=self._ledger.max_request_tokens)
        self._ledger.note_request(job.session_id, job.request_id, job.digest)
        return job, scorer.submit(job)

    def _leave(self, key: tuple[str, str], calls: _Calls) -> None:
        calls.waiting -= 1
        if not calls.waiting:
            self._calls.pop(key, None)

    async def _in_thread(
        self, submit: Callable[[], _Submitted], key: tuple[str, str], calls: _Calls
    ) -> _Submitted:
        """Submit where many rows would hold up the loop; a call that ends meanwhile gives up."""
        submitting = asyncio.ensure_future(asyncio.to_thread(submit))

        def give_up(done: asyncio.Future[_Submitted]) -> None:
            self._leave(key, calls)
            if not done.cancelled() and done.exception() is None and not calls.answered:
                self._give_up(*done.result(), others=calls.waiting)

        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            calls.waiting += 1  # until it is given up, so that a retry is one of the same calls
            submitting.add_done_callback(give_up)
            raise

    async def _scored(
        self, job: ScoreJob, future: Future[LeaseTerms], wait: float, calls: _Calls
    ) -> LeaseTerms:
        waiter = asyncio.wrap_future(future)
        try:
            # `wait` cancels nothing of its own accord, as `wait_for` would.
            either: list[asyncio.Future[LeaseTerms] | asyncio.Future[None]]
            either = [waiter, self._stopping]
            await asyncio.wait(either, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if not waiter.done():
                raise _draining() if self._stopping.done() else self._too_late(wait)
            try:
                lease = waiter.result()
            except DeadlinePassedError:
                if wait < self._longest_wait:
                    raise
                raise self._too_late(wait) from None  # the server's own limit, not the caller's
            calls.answered = True
            return lease
        finally:
            if not calls.answered:
                waiter.cancel()
                self._give_up(job, future, others=calls.waiting - 1)

    def _give_up(self, job: ScoreJob, future: Future[LeaseTerms], *, others: int) -> None:
        """Cancel a job; where its lease came first, take that back if no other call wants it."""
        if future.cancel() or future.exception() is not None or others:
            return
        try:
            self._ledger.release(job.session_id, future.result().lease_id)
        except TeacherLogitsError:
            pass  # the session has ended, and its leases with it

    def _check_draining(self, asked: Asked) -> None:
        if not self._ledger.draining:
            return
        session_id, request_id = asked.session_id, asked.request_id
        if self._ledger.find_request(session_id, request_id, digest_of(asked)) is None:
            raise _draining()

    def _too_late(self, waited: float) -> DeadlinePassedError:
        return DeadlinePassedError(
            f"the teacher was not done after {span_text(waited)}, which is as long as the call "
            "may wait (the shorter of its deadline and --default-wait, "
            f"{span_text(self._longest_wait)}): send fewer rows a call, or allow more",
            facts={"waited_seconds": waited, "longest_wait_seconds": self._longest_wait},
        )


def _draining() -> DrainingError:
    return DrainingError(
        "the server is shutting down and scores no more: return your leases, and open a session "
        "with another server, or with this one once it is back"
    )
