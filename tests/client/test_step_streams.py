"""Steps whose bytes are streamed, ahead of who asks for them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.client.shards import shard_of, shards_of
from tests.client.step_rig import IDS, RANK_1, expected, rank, rank_1
from tests.client.step_servers import (
    LONG,
    SOON,
    a_grant,
    streamed,
    streamed_session,
)

import teacher_logits_client as tl
from teacher_logits.errors import (
    DeadlinePassedError,
    ProducerLostError,
    SessionExpiredError,
)


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

    def test_that_are_late_end_with_the_deadline_and_are_there_later(self) -> None:
        with streamed_session(profile=rank(1)) as (session, calls):
            calls.grant(a_grant(7, streamed(calls, [shard_of(IDS)], RANK_1), real_rows=8))
            with session.acquire(step=7, timeout=LONG):
                pass
            calls.gate.clear()
            leases = streamed(calls, [shard_of(IDS, step=8)], RANK_1)
            calls.grant(a_grant(8, leases, real_rows=8))
            with pytest.raises(DeadlinePassedError, match="for step 8, and it is not complete"):
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
