"""What a step is held against before it is handed out."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from tests.client.losses.shards import K, shard_of, shards_of
from tests.client.steps.step_rig import IDS, rank, ready
from tests.client.steps.step_servers import (
    LONG,
    a_grant,
    local_session,
)

from teacher_logits.errors import (
    AlignmentError,
    PayloadInvalidError,
)
from teacher_logits.terms import Verdict

if TYPE_CHECKING:
    from tests.client.steps.step_calls import StepCalls


class TestChecks:
    def test_say_what_was_compared_and_what_could_not_be(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, [shard_of(IDS, bad_rows=[5])])
            with session.acquire(step=7) as batch:
                status, digests, lookup = batch.checks
                assert (status.verdict, status.detail) == (
                    Verdict.PASSED,
                    "1 of 4 rows are masked",
                )
                assert {digests.verdict, lookup.verdict} == {Verdict.UNCHECKED}
                starts = batch.targets.row_offsets.tolist()
                assert not batch.targets.valid[starts[1] : starts[2]].any()

    def test_name_a_row_with_other_tokens_by_its_global_number(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, shards_of(IDS, (5, 3)))
            wrong = [*IDS[4:6], [1, *IDS[6][1:]], IDS[7]]
            wrong[2][0] = (IDS[6][0] + 1) % 16
            with pytest.raises(
                AlignmentError, match=r"publisher registered other.* in 1 of 3 rows \(6\)"
            ) as caught:
                session.acquire(step=7, input_ids=wrong)
            assert caught.value.facts["row"] == 6
            for _ in range(2):
                broker.released.get(timeout=LONG)

    def test_that_fail_give_the_step_back_unread_to_be_asked_for_again(
        self, tmp_path: Path
    ) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            shards = shards_of(IDS, (5, 3))
            leases = ready(broker, shards)
            with pytest.raises(AlignmentError):
                session.acquire(step=7, input_ids=IDS[:4])
            returned = [broker.released.get(timeout=LONG) for _ in leases]
            assert sorted(broker.unread) == sorted(returned) == ["l-0", "l-1"]

            again = [broker.lease(each) for each in shards]
            cast("StepCalls", session._calls).grant(a_grant(7, again, real_rows=8))
            with session.acquire(step=7, input_ids=IDS[4:]) as batch:
                assert batch.real_row_count == 4
            assert {broker.released.get(timeout=LONG) for _ in again} == {"l-2", "l-3"}
            assert len(broker.unread) == 2

    def test_say_that_only_the_first_token_differs(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, [shard_of(IDS)])
            with pytest.raises(AlignmentError, match=r"without its first token .* begins with"):
                session.acquire(step=7, input_ids=[[9, *row] for row in IDS[4:]])

    def test_refuse_a_teacher_that_dropped_the_last_token(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, [shard_of([row[:-1] for row in IDS])])
            with pytest.raises(AlignmentError, match=r"without its last token \(\d+\) the row"):
                session.acquire(step=7, input_ids=IDS[4:])

    def test_refuse_other_windows_than_those_asked_for(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, [shard_of(IDS)])
            windows = [[0, len(IDS[4])], [1, 1], [0, 1], [0, 1]]
            with pytest.raises(
                AlignmentError, match=r"row 5 was registered at \d positions from 0"
            ):
                session.acquire(step=7, input_ids=IDS[4:], windows=windows)

    def test_refuse_fewer_entries_and_take_more(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, [shard_of(IDS, top_k=K + 2)])
            with session.acquire(step=7, input_ids=IDS[4:]) as batch:
                assert batch.targets.topk_ids.shape[1] == K + 2
            ready(broker, [shard_of(IDS, top_k=K - 1, step=8)], step=8)
            with pytest.raises(PayloadInvalidError, match=f"has K = {K - 1} .* K = {K} or more"):
                session.acquire(step=8)

    def test_refuse_a_payload_without_a_temperature_that_was_asked_for(
        self, tmp_path: Path
    ) -> None:
        with local_session(tmp_path, profile=rank(1, temperatures=(0.7,))) as (session, broker):
            ready(broker, [shard_of(IDS, temperatures=(1.0, 2.0))])
            with pytest.raises(PayloadInvalidError, match=r"temperatures \(1.0, 2.0\)"):
                session.acquire(step=7)
            ready(broker, [shard_of(IDS, step=8, temperatures=(1.0, 2.0, 0.7))], step=8)
            with session.acquire(step=8) as batch:
                assert batch.targets_at(0.7).temperature == pytest.approx(0.7)
                with pytest.raises(PayloadInvalidError, match="no temperature 3"):
                    batch.targets_at(3.0)
