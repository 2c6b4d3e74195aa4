"""Requests for steps: each has one owner, and none is lost that may have been granted."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import pytest
from tests.client.conftest import Service
from tests.client.losses.shards import shard_of
from tests.client.publishing.a_publisher import K, a_student, a_teacher, some_rows
from tests.client.steps import step_calls
from tests.client.steps.step_calls import StepCalls
from tests.client.steps.step_rig import IDS, RANK_1, rank, ready
from tests.client.steps.step_servers import (
    LONG,
    SOON,
    a_grant,
    local_session,
    streamed,
    streamed_session,
)

import teacher_logits_client as tl
from teacher_logits.errors import DeadlinePassedError, SessionExpiredError
from teacher_logits_client.steps.grants import StepRequests

if TYPE_CHECKING:
    from teacher_logits_client.steps.line_steps import LineSteps

Found = TypeVar("Found")


def elsewhere(call: Callable[[], Found]) -> Found:
    """Call on a thread that ends, while this one is there."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result(LONG)


def ask_in_vain(requests: StepRequests, step: int) -> str:
    request_id = requests.ask(step)
    requests.put_down(step)
    return request_id


def grant_step(calls: StepCalls, step: int) -> None:
    calls.grant(a_grant(step, streamed(calls, [shard_of(IDS, step=step)], RANK_1), real_rows=8))


class TestRequests:
    def test_are_in_the_hands_of_one_thread_each(self) -> None:
        requests = StepRequests(give_up=pytest.fail)
        mine = requests.ask(7)
        assert elsewhere(partial(requests.ask, 7)) != mine
        assert requests.ask_ahead(7) != mine

    def test_of_a_thread_that_was_interrupted_are_gone_on_with(self) -> None:
        requests = StepRequests(give_up=pytest.fail)
        mine = requests.ask(7)
        assert requests.ask(7) == mine
        assert requests.ask(8) != mine

    def test_that_are_left_behind_are_found_once(self) -> None:
        requests = StepRequests(give_up=pytest.fail)
        mine = requests.ask(7)
        assert requests.put_down(7)
        assert not requests.put_down(7)
        assert elsewhere(partial(requests.ask, 7)) == mine
        assert requests.ask(7) != mine

    def test_that_are_left_behind_are_gone_on_with_ahead(self) -> None:
        requests = StepRequests(give_up=pytest.fail)
        mine = requests.ask(7)
        requests.put_down(7)
        assert requests.ask_ahead(7) == mine

    def test_that_are_finished_are_over(self) -> None:
        requests = StepRequests(give_up=pytest.fail)
        mine = requests.ask(7)
        requests.finish(7)
        assert requests.ask(7) != mine

    def test_are_given_up_where_another_is_left_behind(self) -> None:
        given_up: list[str] = []
        requests = StepRequests(give_up=given_up.append)
        mine = requests.ask(7)
        other = elsewhere(partial(ask_in_vain, requests, 7))
        elsewhere(partial(ask_in_vain, requests, 8))
        assert given_up == []
        requests.put_down(7)
        assert given_up == [mine]
        assert requests.ask(7) == other

    def test_are_given_up_for_one_that_asked_ahead(self) -> None:
        given_up: list[str] = []
        requests = StepRequests(give_up=given_up.append)
        mine = requests.ask(7)
        requests.hand_over(7, "ahead")
        assert given_up == [mine]
        assert requests.ask(7) == "ahead"

    def test_go_back_with_their_session(self) -> None:
        requests = StepRequests(give_up=pytest.fail)
        requests.ask(7)
        elsewhere(partial(ask_in_vain, requests, 7))
        requests.close()
        assert requests.put_down(7)


class TestThreadsThatTakeOneStep:
    def test_ask_for_themselves_and_leave_one_request_behind(self) -> None:
        with (
            streamed_session(profile=rank(1), prefetch=0) as (session, calls),
            ThreadPoolExecutor(3) as threads,
        ):
            taking = [threads.submit(session.acquire, step=7, timeout=LONG) for _ in range(3)]
            asked = {calls.asked.get(timeout=LONG)[1] for _ in range(3)}
            assert len(asked) == 3
            calls.fail(7, DeadlinePassedError("too late"))
            for each in taking:
                with pytest.raises(DeadlinePassedError):
                    each.result(LONG)
            given_up = {calls.given_up.get(timeout=LONG) for _ in range(2)}
            assert given_up < asked

            grant_step(calls, 7)
            with session.acquire(step=7, timeout=LONG):
                assert {calls.asked.get(timeout=LONG)[1]} == asked - given_up

    def test_have_it_as_it_was_asked_for_ahead_or_for_themselves(self) -> None:
        with streamed_session(profile=rank(1)) as (session, calls):
            for step in (7, 8, 9):
                grant_step(calls, step)
            with session.acquire(step=7, timeout=LONG):
                pass
            with session.acquire(step=8, timeout=LONG):
                elsewhere(partial(session.acquire, step=8, timeout=LONG)).close()
            asked = [calls.asked.get(timeout=LONG) for _ in range(4)]
            assert [step for step, _ in asked] == [7, 8, 9, 8]
            assert len({request for _, request in asked}) == 4

    def test_give_up_what_they_asked_for_ahead_and_passed_by(self) -> None:
        with streamed_session(profile=rank(1)) as (session, calls):
            for step in (7, 9):
                grant_step(calls, step)
            with session.acquire(step=7, timeout=LONG):
                assert calls.asked.get(timeout=LONG)[0] == 7
                step, ahead = calls.asked.get(timeout=LONG)
                assert step == 8
            with session.acquire(step=9, timeout=LONG):
                assert calls.given_up.get(timeout=LONG) == ahead

    def test_have_leases_of_their_own(self, service: Service) -> None:
        ids, lengths, logits = some_rows(0)
        with (
            tl.connect(service.address) as client,
            client.open_publisher(a_teacher("read-by-threads"), pool_size_bytes=1 << 20) as teacher,
            client.open_session(a_student("read-by-threads"), prefetch=0) as session,
            ThreadPoolExecutor(4) as threads,
        ):
            with teacher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits, out=draft)
            together = threading.Barrier(4)

            def take() -> tl.Batch:
                together.wait(LONG)
                return session.acquire(step=0, input_ids=ids, lengths=lengths, timeout=LONG)

            taken = [session.acquire(step=0, input_ids=ids, lengths=lengths, timeout=LONG)]
            taken += [each.result(LONG) for each in [threads.submit(take) for _ in range(4)]]
            leases = {each.lease_id for batch in taken for each in batch._payloads}
            assert len(leases) == 5
            kept = taken.pop()
            for batch in taken:
                batch.close()
            assert session._returner.wait(LONG)
            (left,) = [each for each in service.inspect().leases if each.lease_id in leases]
            assert left.lease_id == kept._payloads[0].lease_id
            assert kept.columns["topk_ids"].shape[-1] == K
            kept.close()


class TestARetry:
    def test_after_an_interrupt_is_the_same_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(pending: object, timeout: float) -> None:
            raise KeyboardInterrupt

        with streamed_session(profile=rank(1), prefetch=0) as (session, calls):
            grant_step(calls, 7)
            with monkeypatch.context() as patched:
                patched.setattr(step_calls._Pending, "result", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    session.acquire(step=7, timeout=LONG)
            elsewhere(partial(session.acquire, step=7, timeout=LONG)).close()
            first, retry = (calls.asked.get(timeout=LONG)[1] for _ in range(2))
            assert first == retry

    def test_for_what_could_not_be_opened_in_time_is_the_same_request(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            calls = cast("StepCalls", session._calls)
            ready(broker, [shard_of(IDS)])
            with session.acquire(step=7, timeout=LONG):
                pass
            lease = broker.lease(shard_of(IDS))
            assert lease.extent is not None
            unknown = replace(lease, extent=replace(lease.extent, slab_id="slab-2"))
            calls.grant(a_grant(7, [unknown], real_rows=8))
            broker.deaf.set()
            with pytest.raises(DeadlinePassedError, match="slab-2"):
                session.acquire(step=7, timeout=SOON)
            assert 7 not in cast("LineSteps", session._steps._source)._mailbox
            broker.deaf.clear()
            with session.acquire(step=7, timeout=LONG) as batch:
                assert batch.step == 7
            first, retry = (calls.asked.get(timeout=LONG)[1] for _ in range(2))
            assert first == retry


def test_a_wait_for_what_was_asked_for_ahead_ends_with_the_session() -> None:
    with streamed_session(profile=rank(1)) as (session, calls), ThreadPoolExecutor(1) as threads:
        grant_step(calls, 7)
        with session.acquire(step=7, timeout=LONG):
            pass
        waiting = threads.submit(session.acquire, step=8, timeout=10 * LONG)
        while calls.asked.get(timeout=LONG)[0] != 9:
            pass  # the thread is behind its claim on what was asked for ahead
        session.close()
        with pytest.raises(SessionExpiredError, match="closed by this client"):
            waiting.result(LONG)
