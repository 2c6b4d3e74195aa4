"""The scoring service where calls end at awkward moments: with a scorer that obeys the test."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import pytest
from tests.some_payload import some_payload

from teacher_logits.clock import ManualClock
from teacher_logits.errors import (
    DeadlinePassedError,
    DrainingError,
    NotAllowedError,
    PayloadInvalidError,
    RequestInvalidError,
    SessionExpiredError,
)
from teacher_logits.layout import ColumnKind, ElementType, lay_out
from teacher_logits.profiles import TeacherProfile
from teacher_logits.terms import LeaseTerms
from teacher_logits.v1 import scoring_service_pb2
from teacher_logits_server.requests import Requests
from teacher_logits_server.services.score_requests import read_job
from teacher_logits_server.services.scoring import ScoringService

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.scorer import ScoreJob, Scorer
    from teacher_logits_server.services.scoring import Context

T = TypeVar("T")
TEACHER = TeacherProfile(
    teacher_id="teacher", vocabulary_size=2, head_rows=2, top_k=1, max_row_tokens=64
)
COLUMNS, SIZE = lay_out([(ColumnKind.ROW_STATUS, ElementType.UINT8, (1,))])
LEASE = LeaseTerms(
    lease_id="l-1",
    payload=some_payload(
        vocabulary_size=2,
        columns=COLUMNS,
        size_bytes=SIZE,
    ),
    writer_id="server",
    extent=None,
)
REQUEST = scoring_service_pb2.ScoreRequest(
    session_id="s-1", request_id="r-1", bad_rows=scoring_service_pb2.BAD_ROW_POLICY_REJECT
)


@dataclass
class ObedientScorer:
    """Takes every job; its futures are the test's to settle."""

    jobs: list[ScoreJob] = field(default_factory=list)
    futures: list[Future[LeaseTerms]] = field(default_factory=list)
    on_submit: Callable[[Future[LeaseTerms]], object] = lambda future: None

    def submit(self, job: ScoreJob) -> Future[LeaseTerms]:
        future: Future[LeaseTerms] = Future()
        self.jobs.append(job)
        self.futures.append(future)
        self.on_submit(future)
        return future


@dataclass
class Shelf:
    """A ledger of which the service needs little: what it gave back is noted."""

    draining: bool = False
    known: LeaseTerms | None = None
    released: list[str] = field(default_factory=list)
    has_ended: bool = False
    max_request_tokens: int = 4096
    requests: Requests = field(default_factory=Requests)
    #: Whom the sessions read.
    teacher_id: str = TEACHER.teacher_id

    def describe(self, session_id: str) -> dict[str, str | int]:
        return {"teacher_id": self.teacher_id}

    def terms(self, session_id: str) -> None:
        """The session is there."""

    def note_request(self, session_id: str, request_id: str, digest: bytes) -> None:
        self.requests.note(request_id, digest)

    def find_request(self, session_id: str, request_id: str, digest: bytes) -> LeaseTerms | None:
        return self.known

    def release(self, session_id: str, lease_id: str) -> None:
        self.released.append(lease_id)
        if self.has_ended:
            raise SessionExpiredError("it has ended")


@dataclass(frozen=True)
class Deadline:
    """A call of which nothing but its deadline is looked at."""

    seconds: float = 30.0

    def time_remaining(self) -> float:
        return self.seconds


class Desk:
    """A service with its scorer and shelf, and calls to it."""

    def __init__(self, *, longest_wait: float = 20.0, has_engine: bool = True) -> None:
        self.scorer, self.shelf = ObedientScorer(), Shelf()
        scorer = cast("Scorer", self.scorer)
        self.service = ScoringService(
            scorers={TEACHER.teacher_id: scorer} if has_engine else {},
            ledger=cast("Ledger", self.shelf),
            clock=ManualClock(100.0),
            longest_wait=timedelta(seconds=longest_wait),
        )

    def call(self, deadline: float = 30.0) -> asyncio.Task[scoring_service_pb2.ScoreResponse]:
        """Start a call."""
        context = cast("Context", Deadline(deadline))
        return asyncio.create_task(self.service.Score(REQUEST, context))

    async def submitted(self, count: int = 1) -> None:
        """Wait until so many jobs came."""
        while len(self.scorer.futures) < count:
            await asyncio.sleep(0)


def run(scenario: Coroutine[object, object, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 30))


@pytest.mark.parametrize(("deadline", "due"), [(5.0, 105.0), (3600.0, 120.0)])
def test_a_job_is_due_in_time_for_an_answer_before_the_call_s_deadline_or_the_longest_wait(
    deadline: float, due: float
) -> None:
    async def scenario() -> float:
        desk = Desk(longest_wait=20.0)
        desk.scorer.on_submit = lambda future: future.set_result(LEASE)
        await desk.call(deadline)
        return desk.scorer.jobs[0].deadline

    assert due - 1 <= run(scenario()) < due


def test_a_job_has_most_of_a_short_longest_wait() -> None:
    async def scenario() -> float:
        desk = Desk(longest_wait=0.1)
        desk.scorer.on_submit = lambda future: future.set_result(LEASE)
        await desk.call(30.0)
        return desk.scorer.jobs[0].deadline

    assert 100.05 < run(scenario()) < 100.1


@pytest.mark.parametrize("has_engine", [True, False])
def test_a_session_of_a_published_teacher_is_told_that_nobody_here_scores(has_engine: bool) -> None:
    async def scenario() -> ObedientScorer:
        desk = Desk(has_engine=has_engine)
        desk.shelf.teacher_id = "published"
        with pytest.raises(NotAllowedError, match=r"'published' is published.*acquire its steps"):
            await desk.call()
        return desk.scorer

    assert run(scenario()).jobs == []


def test_a_call_that_gives_up_cancels_its_job() -> None:
    async def scenario() -> tuple[bool, list[str]]:
        desk = Desk()
        call = desk.call()
        await desk.submitted()
        call.cancel()
        await asyncio.wait([call])
        return desk.scorer.futures[0].cancelled(), desk.shelf.released

    assert run(scenario()) == (True, [])


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_lease_that_comes_as_the_call_gives_up_is_taken_back(has_ended: bool) -> None:
    async def scenario() -> list[str]:
        desk = Desk()
        desk.shelf.has_ended = has_ended
        call = desk.call()
        await desk.submitted()
        desk.scorer.futures[0].set_result(LEASE)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        return desk.shelf.released

    assert run(scenario()) == ["l-1"]


def test_a_lease_that_another_call_waits_for_is_left_to_it() -> None:
    async def scenario() -> tuple[list[str], str]:
        desk = Desk()
        gone, stays = desk.call(), desk.call()
        await desk.submitted(2)
        for future in desk.scorer.futures:
            future.set_result(LEASE)
        gone.cancel()
        await asyncio.wait([gone])
        return desk.shelf.released, (await stays).lease.lease_id

    assert run(scenario()) == ([], "l-1")


def test_a_lease_that_another_call_has_brought_home_is_left_to_it() -> None:
    async def scenario() -> list[str]:
        desk = Desk()
        gone, answered = desk.call(), desk.call()
        await desk.submitted(2)
        desk.scorer.futures[1].set_result(LEASE)
        await answered
        desk.scorer.futures[0].set_result(LEASE)
        gone.cancel()
        await asyncio.wait([gone])
        return desk.shelf.released

    assert run(scenario()) == []


def test_a_job_that_fails_as_the_call_gives_up_is_no_surprise() -> None:
    async def scenario() -> list[str]:
        desk = Desk()
        call = desk.call()
        await desk.submitted()
        desk.scorer.futures[0].set_exception(DeadlinePassedError("too late"))
        call.cancel()
        await asyncio.wait([call])
        return desk.shelf.released

    assert run(scenario()) == []


def test_a_call_that_waited_long_enough_is_told_how_long() -> None:
    async def scenario() -> bool:
        desk = Desk(longest_wait=0.01)
        with pytest.raises(DeadlinePassedError, match=r"0\.01 s.*--default-wait, 0\.01 s"):
            await desk.call()
        return desk.scorer.futures[0].cancelled()

    assert run(scenario())


def test_a_stop_is_told_to_those_who_wait() -> None:
    async def scenario() -> bool:
        desk = Desk()
        call = desk.call()
        await desk.submitted()
        desk.service.stop()
        desk.service.stop()
        with pytest.raises(DrainingError):
            await call
        return desk.scorer.futures[0].cancelled()

    assert run(scenario())


def test_a_drain_lets_nothing_new_in() -> None:
    async def scenario() -> int:
        desk = Desk()
        desk.shelf.draining = True
        with pytest.raises(DrainingError):
            await desk.call()
        return len(desk.scorer.jobs)

    assert run(scenario()) == 0


def test_a_drain_answers_a_retry() -> None:
    async def scenario() -> str:
        desk = Desk()
        desk.shelf.draining, desk.shelf.known = True, LEASE
        desk.scorer.on_submit = lambda future: future.set_result(LEASE)
        return (await desk.call()).lease.lease_id

    assert run(scenario()) == "l-1"


def score_request(**given: object) -> scoring_service_pb2.ScoreRequest:
    return scoring_service_pb2.ScoreRequest(
        session_id="s-1",
        request_id="r-1",
        bad_rows=scoring_service_pb2.BAD_ROW_POLICY_REJECT,
        **given,  # type: ignore[arg-type]
    )


def test_an_id_that_was_used_for_other_rows_is_refused() -> None:
    async def scenario() -> list[ScoreJob]:
        desk = Desk()
        desk.scorer.on_submit = lambda future: future.set_result(LEASE)
        context = cast("Context", Deadline())
        for _ in range(2):
            await desk.service.Score(score_request(input_ids=b"\1\0\0\0", row_lengths=[1]), context)
        with pytest.raises(RequestInvalidError, match="other rows"):
            await desk.service.Score(score_request(input_ids=b"\2\0\0\0", row_lengths=[1]), context)
        return desk.scorer.jobs

    assert len(run(scenario())) == 2


@pytest.mark.parametrize(
    ("field", "per_row"), [("row_lengths", 1), ("prefix_lengths", 1), ("row_windows", 2)]
)
def test_more_rows_than_the_server_takes_tokens_are_refused_by_their_count(
    field: str, per_row: int
) -> None:
    read_job(score_request(**{field: [1] * per_row * 8}), deadline=1.0, max_tokens=8)

    with pytest.raises(PayloadInvalidError, match=field) as caught:
        read_job(score_request(**{field: [1] * per_row * 9}), deadline=1.0, max_tokens=8)

    assert (caught.value.facts["entries"], caught.value.facts["limit"]) == (9, 8)


MANY = score_request(row_lengths=[1] * 2000)


def test_many_rows_are_submitted_off_the_loop() -> None:
    async def scenario() -> set[bool]:
        desk, here, threads = Desk(), threading.get_ident(), set[bool]()

        def submitted(future: Future[LeaseTerms]) -> None:
            threads.add(threading.get_ident() == here)
            future.set_result(LEASE)

        desk.scorer.on_submit = submitted
        await desk.service.Score(MANY, cast("Context", Deadline()))
        return threads

    assert run(scenario()) == {False}


def test_a_call_that_ends_while_its_many_rows_are_read_gives_its_job_up() -> None:
    async def scenario() -> bool:
        desk, begun, go_on = Desk(), threading.Event(), threading.Event()

        def submitted(future: Future[LeaseTerms]) -> None:
            begun.set()
            go_on.wait(30)

        desk.scorer.on_submit = submitted
        call = asyncio.create_task(desk.service.Score(MANY, cast("Context", Deadline())))
        await asyncio.to_thread(begun.wait, 30)
        call.cancel()
        await asyncio.wait([call])
        go_on.set()
        while not desk.scorer.futures[0].done():
            await asyncio.sleep(0)
        return desk.scorer.futures[0].cancelled()

    assert run(scenario())


def test_a_lease_that_a_retry_brought_home_stays_though_the_first_call_ended_while_read() -> None:
    async def scenario() -> tuple[Desk, str]:
        desk, begun, go_on = Desk(), threading.Event(), threading.Event()

        def submitted(future: Future[LeaseTerms]) -> None:
            if not begun.is_set():
                begun.set()
                go_on.wait(30)
            future.set_result(LEASE)

        desk.scorer.on_submit = submitted
        first = asyncio.create_task(desk.service.Score(MANY, cast("Context", Deadline())))
        await asyncio.to_thread(begun.wait, 30)
        first.cancel()
        await asyncio.wait([first])
        answer = await desk.service.Score(MANY, cast("Context", Deadline()))
        go_on.set()
        while desk.service._calls:
            await asyncio.sleep(0)
        return desk, answer.lease.lease_id

    desk, lease_id = run(scenario())
    assert lease_id == LEASE.lease_id
    assert not desk.shelf.released
