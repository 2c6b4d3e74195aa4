"""Steps whose bytes are streamed, ahead of who asks for them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast
from weakref import WeakSet

import pytest
import torch
from tests.client.losses.shards import shard_of, shards_of
from tests.client.steps.step_calls import StepCalls
from tests.client.steps.step_rig import IDS, RANK_1, expected, rank, rank_1
from tests.client.steps.step_servers import (
    LONG,
    SOON,
    Broker,
    a_grant,
    local_session,
    streamed,
    streamed_session,
)

import teacher_logits_client as tl
from teacher_logits.errors import (
    DeadlinePassedError,
    ProducerLostError,
    SessionExpiredError,
)
from teacher_logits_client import exits
from teacher_logits_client.sessions.step_thread import StepThread

if TYPE_CHECKING:
    from teacher_logits_client.steps.line_steps import LineSteps


class TestStreams:
    def test_bring_the_ranks_rows_only_and_read_the_same(self, tmp_path: Path) -> None:
        shards = shards_of(IDS, (5, 3))
        with (
            streamed_session(profile=rank(1)) as (session, calls),
            rank_1(tmp_path, (5, 3)) as local,
        ):
            leases = streamed(calls, shards, RANK_1)
            calls.grant(a_grant(7, leases, real_rows=8, transport=tl.Transport.STREAM))
            with session.acquire(step=7, input_ids=IDS[4:], timeout=LONG) as batch:
                assert [lease.payload.row_count for lease in leases] == [1, 3]
                for name, column in local.columns.items():
                    assert torch.equal(batch.columns[name], column), name
                assert set(batch.transports.values()) == {tl.Transport.STREAM}
            assert [calls.asked.get(timeout=LONG)[0] for _ in range(2)] == [7, 8]

    def test_come_ahead_in_the_background_and_no_further_than_they_were_asked_for(self) -> None:
        with streamed_session(profile=rank(1), prefetch=2) as (session, calls):
            for step in (7, 8, 9, 10):
                leases = streamed(calls, shards_of(IDS, (8,), step=step), RANK_1)
                calls.grant(a_grant(step, leases, real_rows=8))
            with session.acquire(step=7, timeout=LONG):
                pass
            assert [calls.asked.get(timeout=LONG)[0] for _ in range(3)] == [7, 8, 9]
            with session.acquire(step=8, timeout=LONG):
                assert calls.asked.get(timeout=LONG)[0] == 10
            with session.acquire(step=9, timeout=LONG) as batch:
                assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))

            assert calls.streamed.count("l-p-8-0") == calls.streamed.count("l-p-9-0") == 1

    def test_of_a_step_that_is_not_complete_are_not_spoken_of(self) -> None:
        with streamed_session(profile=rank(1)) as (session, calls):
            calls.grant(a_grant(7, streamed(calls, [shard_of(IDS)], RANK_1), real_rows=8))
            with session.acquire(step=7, timeout=LONG):
                pass
            with pytest.raises(DeadlinePassedError, match="step 8 is not complete after"):
                session.acquire(step=8, timeout=0.05)

    def test_that_are_late_end_with_the_deadline_and_are_there_later(self) -> None:
        with streamed_session(profile=rank(1)) as (session, calls):
            calls.grant(a_grant(7, streamed(calls, [shard_of(IDS)], RANK_1), real_rows=8))
            with session.acquire(step=7, timeout=LONG):
                assert calls.begun.get(timeout=LONG) == "l-p-7-0"
            calls.gate.clear()
            leases = streamed(calls, [shard_of(IDS, step=8)], RANK_1)
            calls.grant(a_grant(8, leases, real_rows=8))
            assert calls.begun.get(timeout=LONG) == "l-p-8-0"
            with pytest.raises(DeadlinePassedError, match="step 8 is complete, and its bytes"):
                session.acquire(step=8, timeout=SOON)
            calls.gate.set()
            with session.acquire(step=8, timeout=LONG) as batch:
                assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))
            assert calls.streamed.count("l-p-8-0") == 1

    def test_a_retry_after_a_deadline_is_the_same_request(self) -> None:
        with streamed_session(profile=rank(1), prefetch=0) as (session, calls):
            with pytest.raises(DeadlinePassedError):
                session.acquire(step=7, timeout=SOON)
            leases = streamed(calls, [shard_of(IDS)], RANK_1)
            calls.grant(a_grant(7, leases, real_rows=8))
            with session.acquire(step=7, timeout=LONG):
                pass
            with session.acquire(step=7, timeout=LONG):
                pass
            first, retry, again = (calls.asked.get(timeout=LONG)[1] for _ in range(3))
            assert first == retry != again

    def test_what_failed_ahead_is_asked_for_anew(self) -> None:
        with streamed_session(profile=rank(1)) as (session, calls):
            calls.grant(a_grant(7, streamed(calls, [shard_of(IDS)], RANK_1), real_rows=8))
            with session.acquire(step=7, timeout=LONG):
                pass
            calls.fail(8, ProducerLostError("publisher died"))
            leases = streamed(calls, [shard_of(IDS, step=8)], RANK_1)
            calls.grant(a_grant(8, leases, real_rows=8))
            with session.acquire(step=8, timeout=LONG) as batch:
                assert batch.step == 8

    def test_there_was_no_memory_for_are_opened_by_who_asks_with_the_leases_that_they_have(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*leases: object, **more: object) -> None:
            monkeypatch.undo()
            raise MemoryError

        with streamed_session(profile=rank(1)) as (session, calls):
            for step in (7, 8, 9):
                leases = streamed(calls, [shard_of(IDS, step=step)], RANK_1)
                if step == 8:
                    monkeypatch.setattr(session._reader, "open_bytes", refuse)
                calls.grant(a_grant(step, leases, real_rows=8))
                with session.acquire(step=step, timeout=LONG) as batch:
                    assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))
            asked = [calls.asked.get(timeout=LONG) for _ in range(4)]
            assert sorted(step for step, _ in asked) == [7, 8, 8, 9]
            first, again = (request for step, request in asked if step == 8)
            assert first == again
            assert session._returner.wait(LONG)
            assert sorted(calls.released) == ["l-p-7-0", "l-p-8-0", "l-p-9-0"]

    def test_end_with_the_session(self) -> None:
        with streamed_session(profile=rank(1), prefetch=2) as (session, calls):
            calls.grant(a_grant(7, streamed(calls, [shard_of(IDS)], RANK_1), real_rows=8))
            leases = streamed(calls, [shard_of(IDS, step=8)], RANK_1)
            calls.grant(a_grant(8, leases, real_rows=8))
            with session.acquire(step=7, timeout=LONG):
                pass
            session.close()

            assert calls.ended.wait(LONG)
            assert calls.released == ["l-p-7-0"]

    def test_are_not_waited_for_once_the_session_is_closed(self) -> None:
        with (
            streamed_session(profile=rank(1)) as (session, calls),
            ThreadPoolExecutor() as threads,
        ):
            waiting = threads.submit(session.acquire, step=7, timeout=LONG)
            assert [calls.asked.get(timeout=LONG)[0] for _ in range(2)] == [7, 8]
            session.close()
            with pytest.raises(SessionExpiredError, match="closed by this client"):
                waiting.result(LONG)


@pytest.mark.parametrize("has_line", [True, False])
def test_the_thread_that_opens_streams_ends_before_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_line: bool
) -> None:
    monkeypatch.setattr(exits, "_watched", WeakSet())
    monkeypatch.setattr(exits, "_PATIENCE_SECONDS", LONG)
    with ExitStack() as stack:
        if has_line:
            session, broker = stack.enter_context(local_session(tmp_path, profile=rank(1)))
            streams(broker, cast("StepCalls", session._calls), 7)
        else:
            session, calls = stack.enter_context(streamed_session(profile=rank(1)))
            calls.grant(a_grant(7, streamed(calls, [shard_of(IDS)], RANK_1), real_rows=8))
        with session.acquire(step=7, timeout=LONG):
            pass
        (thread,) = [each for each in exits._watched if isinstance(each, StepThread)]
        exits.stop_all()
        assert not thread._thread.is_alive()


class TestStreamsOfASessionWithALine:
    """Its publishers are elsewhere, and the line brings grants without bytes."""

    def test_come_ahead_while_the_step_before_is_read(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1), prefetch=2) as (session, broker):
            calls = cast("StepCalls", session._calls)
            streams(broker, calls, 7)
            with session.acquire(step=7, timeout=LONG):
                streams(broker, calls, 8)
                streams(broker, calls, 9)
                assert [calls.begun.get(timeout=LONG) for _ in range(3)] == [
                    "l-p-7-0",
                    "l-p-8-0",
                    "l-p-9-0",
                ]
            for step in (8, 9):
                with session.acquire(step=step, input_ids=IDS[4:], timeout=LONG) as batch:
                    assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))
            assert len(calls.streamed) == 3

    def test_that_are_under_way_are_waited_for(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            calls = cast("StepCalls", session._calls)
            streams(broker, calls, 7)
            with session.acquire(step=7, timeout=LONG):
                calls.begun.get(timeout=LONG)
                calls.gate.clear()
                streams(broker, calls, 8)
                calls.begun.get(timeout=LONG)
            with pytest.raises(DeadlinePassedError, match="streams of step 8 had not come"):
                session.acquire(step=8, timeout=SOON)
            calls.gate.set()
            with session.acquire(step=8, timeout=LONG) as batch:
                assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))
            assert calls.streamed.count("l-p-8-0") == 1

    def test_that_are_under_way_are_there_for_who_asks_again_after_an_interrupt(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            calls = cast("StepCalls", session._calls)
            streams(broker, calls, 7)
            with session.acquire(step=7, timeout=LONG):
                calls.begun.get(timeout=LONG)
                calls.gate.clear()
                streams(broker, calls, 8)
                calls.begun.get(timeout=LONG)
            entry = cast("LineSteps", session._steps._source)._ahead._entries[8]
            with monkeypatch.context() as patched:
                patched.setattr(entry, "_opening", Interrupted(entry._opening))
                with pytest.raises(KeyboardInterrupt):
                    session.acquire(step=8, timeout=LONG)
            calls.gate.set()
            with session.acquire(step=8, timeout=LONG) as batch:
                assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))
            assert calls.streamed.count("l-p-8-0") == 1

    def test_that_nobody_took_are_let_go_of_with_the_session(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            calls = cast("StepCalls", session._calls)
            streams(broker, calls, 7)
            with session.acquire(step=7, timeout=LONG):
                calls.begun.get(timeout=LONG)
                calls.gate.clear()
                streams(broker, calls, 8)
                calls.begun.get(timeout=LONG)
            ahead = cast("LineSteps", session._steps._source)._ahead
            session.close()
            calls.gate.set()
            assert ahead._thread is not None
            ahead._thread.join(LONG)
            assert session._reader._out == set()
            assert session._reader.line is not None
            assert session._reader.line.has_ended


class Interrupted:
    """A lock that nobody gets: whoever waits for it is interrupted."""

    def __init__(self, lock: threading.Lock) -> None:
        self.release = lock.release

    def acquire(self, timeout: float) -> bool:
        raise KeyboardInterrupt


def streams(broker: Broker, calls: StepCalls, step: int) -> None:
    """Send a step whose bytes are to be streamed."""
    leases = streamed(calls, shards_of(IDS, (8,), step=step), RANK_1)
    broker.send(a_grant(step, leases, real_rows=8, transport=tl.Transport.STREAM))
