"""Steps that are there, come later, fail or never come."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from tests.client.losses.shards import shards_of
from tests.client.steps.step_rig import IDS, rank, ready
from tests.client.steps.step_servers import (
    LONG,
    SOON,
    a_grant,
    local_session,
)

from teacher_logits.errors import (
    DeadlinePassedError,
    DrainingError,
    ForkedClientError,
    ProducerLostError,
    RequestInvalidError,
    SessionExpiredError,
)
from teacher_logits.terms import StepFailure, StepGrant
from teacher_logits_client import line
from teacher_logits_client.steps.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from tests.client.steps.step_calls import StepCalls
    from tests.client.steps.step_servers import Broker

    from teacher_logits_client.payloads.batch import Batch
    from teacher_logits_client.steps.grants import OpenedGrant
    from teacher_logits_client.steps.line_steps import LineSteps
    from teacher_logits_client.student import Session


ANSWERED = 1.0
"""A wait that is in vain, and in which the broker has answered."""


def hold_up(session: "Session") -> "Callable[[], None]":
    """Keep the thread of the returns from what is put next, until the result is called."""
    may_go = threading.Event()

    def wait() -> None:
        may_go.wait(LONG)

    session._returner.later(wait)
    return may_go.set


class Opening:
    """The first opening of a step that was sent, which goes on when the test says so."""

    def __init__(self, session: "Session", monkeypatch: pytest.MonkeyPatch) -> None:
        self._session = session
        ahead = cast("LineSteps", session._steps._source)._ahead
        self._take = ahead.take
        self._has_begun, self._may_go = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        monkeypatch.setattr(ahead, "take", self._wait)

    def await_it(self, broker: "Broker") -> None:
        """Wait until it has begun, and its reader has asked for the steps behind it."""
        assert self._has_begun.wait(LONG)
        broker.wanted.get(timeout=LONG)

    def wait_beside_it(self, broker: "Broker", threads: ThreadPoolExecutor) -> "Future[Batch]":
        """Have another thread wait for the step, whom no word of the broker's wakes."""
        broker.deaf.set()
        waiting = threads.submit(self._session.acquire, step=7, timeout=10 * LONG)
        assert broker.wanted.get(timeout=LONG) == (7, 2)
        broker.deaf.clear()
        return waiting

    def go_on(self, failure: Exception | None = None) -> None:
        """Have it come to its end, or fail."""
        self._failure = failure
        self._may_go.set()

    def _wait(self, grant: StepGrant, *, until: float) -> "OpenedGrant":
        is_first = not self._has_begun.is_set()
        self._has_begun.set()
        assert self._may_go.wait(LONG)
        if is_first and self._failure is not None:
            raise self._failure
        return self._take(grant, until=until)


class TestClosing:
    def test_ends_the_wait_of_every_other_thread_at_once(self, tmp_path: Path) -> None:
        with (
            local_session(tmp_path, profile=rank(1)) as (session, broker),
            ThreadPoolExecutor() as threads,
        ):
            ready(broker, shards_of(IDS, (8,), step=5), step=5)
            with session.acquire(step=5, timeout=LONG):  # and so the line lasts
                while not broker.wanted.empty():
                    broker.wanted.get()
                waiting = [
                    threads.submit(session.acquire, step=n, timeout=10 * LONG) for n in (7, 9)
                ]
                for _ in waiting:
                    broker.wanted.get(timeout=LONG)
                broker.deaf.set()  # no word from it wakes them
                session.close()
                for each in waiting:
                    with pytest.raises(SessionExpiredError, match="closed by this client"):
                        each.result(LONG)
                broker.deaf.clear()


class TestWaiting:
    def test_finds_a_step_that_was_sent_ahead_and_moves_the_window_on(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1), prefetch=3) as (session, broker):
            ready(broker, shards_of(IDS, (8,)))
            with session.acquire(step=7, timeout=LONG):
                pass
            broker.released.get(timeout=LONG)
            broker.deaf.set()  # no word comes from it any more
            ready(broker, shards_of(IDS, (8,), step=8), step=8)
            with session.acquire(step=8, timeout=LONG) as batch:
                broker.deaf.clear()
                assert batch.step == 8
                assert [broker.wanted.get(timeout=LONG) for _ in range(2)] == [(7, 4), (7, 5)]

    def test_moves_on_with_the_most_steps_ahead_too(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1), prefetch=15) as (session, broker):
            for step in (7, 8):
                ready(broker, shards_of(IDS, (8,), step=step), step=step)
            with session.acquire(step=7, timeout=LONG):
                go_on = hold_up(session)
            with session.acquire(step=8, timeout=LONG):
                assert [broker.wanted.get(timeout=LONG) for _ in range(2)] == [(7, 16), (8, 16)]
                go_on()

    def test_far_ahead_is_not_forgotten_for_what_lies_behind_a_step_that_was_closed(
        self, tmp_path: Path
    ) -> None:
        with (
            local_session(tmp_path, profile=rank(1)) as (session, broker),
            ThreadPoolExecutor() as threads,
        ):
            ready(broker, shards_of(IDS, (8,)))
            with session.acquire(step=7, timeout=LONG):
                assert broker.wanted.get(timeout=LONG) == (7, 2)
                go_on = hold_up(session)
            waiting = threads.submit(session.acquire, step=50, timeout=LONG)
            assert broker.wanted.get(timeout=LONG) == (50, 2)
            go_on()
            assert session._returner.wait(LONG)
            broker.released.get(timeout=LONG)
            assert broker.wanted.empty()
            ready(broker, shards_of(IDS, (8,), step=50), step=50)
            with waiting.result(LONG) as batch:
                assert batch.step == 50

    def test_of_one_thread_is_not_forgotten_for_another_far_from_it(self, tmp_path: Path) -> None:
        with (
            local_session(tmp_path, profile=rank(1)) as (session, broker),
            ThreadPoolExecutor() as threads,
        ):
            waiting = threads.submit(session.acquire, step=50, timeout=LONG)
            assert broker.wanted.get(timeout=LONG) == (50, 2)
            with pytest.raises(DeadlinePassedError):  # it is asked for by a call
                session.acquire(step=7, timeout=ANSWERED)
            assert broker.wanted.empty()
            ready(broker, shards_of(IDS, (8,), step=50), step=50)
            with waiting.result(LONG) as batch:
                assert batch.step == 50

    def test_for_what_another_thread_opens_ends_when_it_has_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            local_session(tmp_path, profile=rank(1)) as (session, broker),
            ThreadPoolExecutor() as threads,
        ):
            leases = ready(broker, shards_of(IDS, (8,)))
            opening = Opening(session, monkeypatch)
            first = threads.submit(session.acquire, step=7, timeout=10 * LONG)
            opening.await_it(broker)
            second = opening.wait_beside_it(broker, threads)
            opening.go_on()
            calls = cast("StepCalls", session._calls)
            assert calls.asked.get(timeout=LONG)[0] == 7  # there it is no more
            calls.grant(a_grant(7, leases, real_rows=8))
            with first.result(LONG) as batch, second.result(LONG) as another:
                assert (batch.step, another.step) == (7, 7)

    def test_for_what_another_thread_cannot_open_ends_when_that_has_put_it_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            local_session(tmp_path, profile=rank(1)) as (session, broker),
            ThreadPoolExecutor() as threads,
        ):
            ready(broker, shards_of(IDS, (8,)))
            opening = Opening(session, monkeypatch)
            first = threads.submit(session.acquire, step=7, timeout=10 * LONG)
            opening.await_it(broker)
            second = opening.wait_beside_it(broker, threads)
            opening.go_on(DeadlinePassedError("its slab did not come in time"))
            with pytest.raises(DeadlinePassedError, match="its slab did not come"):
                first.result(LONG)
            with second.result(LONG) as batch:
                assert batch.step == 7

    def test_waits_for_a_step_that_is_not_there_yet(self, tmp_path: Path) -> None:
        with (
            local_session(tmp_path, profile=rank(1), prefetch=2) as (session, broker),
            ThreadPoolExecutor() as threads,
        ):
            waiting = threads.submit(session.acquire, step=7, timeout=LONG)
            assert broker.wanted.get(timeout=LONG) == (7, 3)
            ready(broker, shards_of(IDS, (8,)))
            with waiting.result(LONG) as batch:
                assert batch.step == 7

    def test_ends_with_the_deadline_and_says_what_was_waited_for(self, tmp_path: Path) -> None:
        with local_session(tmp_path) as (session, broker):
            with pytest.raises(DeadlinePassedError, match="for step 7, and it is not complete"):
                session.acquire(step=7, timeout=ANSWERED)
            broker.deaf.set()
            with pytest.raises(DeadlinePassedError, match=r"step 8, and the broker did not answer"):
                session.acquire(step=8, timeout=SOON)

    def test_that_was_in_vain_says_what_the_server_says_of_the_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(line, "SAY_WHY_SECONDS", LONG)
        with local_session(tmp_path) as (session, broker):
            broker.lacking = "nothing of it is reserved"
            with pytest.raises(
                DeadlinePassedError, match="it is not complete: nothing of it is reserved"
            ):
                session.acquire(step=7, timeout=ANSWERED)
            broker.lacking = ""
            with pytest.raises(DeadlinePassedError, match="have not sealed all of its rows"):
                session.acquire(step=7, timeout=ANSWERED)

    def test_what_comes_after_the_deadline_is_there_for_the_next_who_asks(
        self, tmp_path: Path
    ) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            with pytest.raises(DeadlinePassedError):
                session.acquire(step=7, timeout=SOON)
            ready(broker, shards_of(IDS, (8,)))

            with session.acquire(step=7, timeout=LONG) as batch:
                assert batch.step == 7

    def test_a_step_that_failed_is_told_each_time_it_is_asked_for(self, tmp_path: Path) -> None:
        with local_session(tmp_path) as (session, broker):
            for _ in range(2):
                broker.send(StepFailure(step=7, error=ProducerLostError("publisher died")))
                with pytest.raises(ProducerLostError, match="publisher died"):
                    session.acquire(step=7, timeout=LONG)

    def test_a_refusal_reaches_who_waits(self, tmp_path: Path) -> None:
        with local_session(tmp_path) as (session, broker):
            broker.refusal = DrainingError("draining")
            with pytest.raises(DrainingError, match="draining"):
                session.acquire(step=7, timeout=LONG)

    def test_the_end_of_the_line_ends_the_session(self, tmp_path: Path) -> None:
        with (
            local_session(tmp_path) as (session, broker),
            ThreadPoolExecutor() as threads,
        ):
            waiting = threads.submit(session.acquire, step=7, timeout=LONG)
            broker.wanted.get(timeout=LONG)
            broker.hang_up()
            with pytest.raises(SessionExpiredError, match="closed its broker line"):
                waiting.result(LONG)

    def test_a_step_that_was_taken_before_is_asked_for_by_a_call(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            leases = ready(broker, shards_of(IDS, (8,)))
            with session.acquire(step=7):
                pass
            calls = cast("StepCalls", session._calls)
            calls.grant(a_grant(7, leases, real_rows=8))
            with session.acquire(step=7) as batch:
                assert calls.asked.get(timeout=LONG)[0] == 7
                assert batch.step == 7

    @pytest.mark.parametrize("step", [-1, 1.5, "7", 2**62, 2**64])
    def test_what_is_no_step_is_refused(self, tmp_path: Path, step: object) -> None:
        with (
            local_session(tmp_path) as (session, _),
            pytest.raises(RequestInvalidError, match="whole numbers from 0 on"),
        ):
            session.acquire(step=step)  # type: ignore[call-overload]

    def test_a_step_and_a_payload_at_once_are_refused(self, tmp_path: Path) -> None:
        with local_session(tmp_path) as (session, _):
            with pytest.raises(RequestInvalidError, match="give one of them"):
                session.acquire(step=7, payload_id="p")  # type: ignore[call-overload]
            with pytest.raises(RequestInvalidError, match="give one of them"):
                session.acquire()  # type: ignore[call-overload]

    def test_a_forked_child_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with local_session(tmp_path) as (session, _):
            parent = os.getpid()
            with monkeypatch.context() as child:
                child.setattr(os, "getpid", lambda: parent + 1)
                with pytest.raises(ForkedClientError, match="is a fork"):
                    session.acquire(step=7)


@pytest.mark.parametrize("prefetch", [-1, 16, 1.0, True, "1"])
def test_steps_ahead_are_a_small_whole_number(prefetch: object) -> None:
    with pytest.raises(RequestInvalidError, match="0 to 15"):
        Mailbox(prefetch)  # type: ignore[arg-type]
