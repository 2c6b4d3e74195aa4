"""Registered steps as a student has them: its rows, in global order, and padding behind them."""

from pathlib import Path

import pytest
import torch
from tests.client.losses.shards import K, shards_of
from tests.client.steps.step_rig import IDS, RANK_1, expected, rank, rank_1, ready
from tests.client.steps.step_servers import (
    LONG,
    a_grant,
    local_session,
)

import teacher_logits_client as tl
from teacher_logits.errors import (
    PayloadInvalidError,
)
from teacher_logits.terms import Verdict


class TestRows:
    @pytest.mark.parametrize("sizes", [(8,), (4, 4), (6, 2), (2, 2, 2, 2), (5, 1, 2)], ids=str)
    def test_are_the_ranks_own_in_global_order_whatever_the_shards(
        self, tmp_path: Path, sizes: tuple[int, ...]
    ) -> None:
        with rank_1(tmp_path, sizes) as batch:
            assert (batch.step, batch.rows) == (7, RANK_1)
            assert (batch.row_count, batch.real_row_count) == (4, 4)
            assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))
            assert batch.targets.row_offsets.diff().tolist() == [len(row) for row in IDS[4:]]
            assert batch.targets is batch.targets
            pieces = torch.cat([each.targets.topk_ids for each in batch.micro_batches()])
            assert torch.equal(pieces, expected(IDS[4:]))
            assert [each.rows for each in batch.micro_batches()] == [range(4, 6), range(6, 8)]

    def test_in_one_shard_are_views_and_over_several_one_copy_that_says_so(
        self, tmp_path: Path
    ) -> None:
        with rank_1(tmp_path, (5, 3)) as batch:
            spans, views = batch.micro_batches()
            assert (batch.copied, spans.copied, views.copied) == (True, True, False)
            # A private map: what is written into one view shows in another of the same shard.
            views.columns["topk_ids"][0, 0] = -5
            again = list(batch.micro_batches())[1]
            assert int(again.columns["topk_ids"][0, 0]) == -5
            spans.columns["topk_ids"][0, 0] = -5
            assert int(next(iter(batch.micro_batches())).columns["topk_ids"][0, 0]) != -5

    def test_a_whole_rank_in_one_shard_is_not_copied(self, tmp_path: Path) -> None:
        with rank_1(tmp_path, (4, 4)) as batch:
            assert not batch.copied
            assert not any(each.copied for each in batch.micro_batches())

    def test_that_were_not_granted_each_once_are_refused_and_given_back(
        self, tmp_path: Path
    ) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            leases = [broker.lease(each) for each in shards_of(IDS, (4, 2, 2))]
            broker.send(a_grant(7, [leases[1]], real_rows=8))
            with pytest.raises(PayloadInvalidError, match="row 6 was due where 8 came"):
                session.acquire(step=7)

            assert broker.released.get(timeout=LONG) == leases[1].lease_id

    def test_the_whole_steps_count_comes_from_the_server(self, tmp_path: Path) -> None:
        with rank_1(tmp_path, global_count=31) as batch:
            assert batch.global_count == 31

    def test_a_loss_over_micro_batches_is_the_loss_over_the_batch(self, tmp_path: Path) -> None:
        with rank_1(tmp_path, (5, 3)) as batch:
            student = [torch.randn(len(row), 16) for row in IDS[4:]]
            whole, count = tl.losses.forward_kl(torch.cat(student), batch.targets)
            total, counted, at = torch.zeros(()), 0, 0
            for each in batch.micro_batches():
                logits = torch.cat(student[at : at + each.row_count])
                loss, positions = tl.losses.forward_kl(logits, each.targets)
                total, counted, at = total + loss, counted + int(positions), at + each.row_count

            assert counted == int(count) == sum(len(row) - 1 for row in IDS[4:])
            assert float(total) == pytest.approx(float(whole), rel=1e-5)


class TestPadding:
    def test_comes_last_has_no_positions_and_counts_for_nothing(self, tmp_path: Path) -> None:
        with rank_1(tmp_path, (5,), real_rows=5) as batch:
            first, second = batch.micro_batches()
            assert (batch.row_count, batch.real_row_count) == (4, 1)
            assert (first.row_count, first.real_row_count) == (2, 1)
            assert (second.row_count, second.real_row_count) == (2, 0)
            assert (first.index, second.index) == (slice(0, 1), slice(2, 2))
            assert first.targets.row_offsets.diff().tolist() == [len(IDS[4]), 0]
            assert not first.copied
            assert second.targets.topk_ids.shape == (0, K)

            logits = torch.randn(2, len(IDS[4]), 16, requires_grad=True)
            loss, count = tl.losses.forward_kl(logits, second.targets)
            loss.backward()
            assert (float(loss.detach()), int(count)) == (0.0, 0)
            assert logits.grad is not None
            assert not logits.grad.any()
            loss, count = tl.losses.forward_kl(logits, first.targets)
            assert int(count) == len(IDS[4]) - 1
            assert float(loss.detach()) > 0

    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    def test_of_a_whole_rank_needs_no_lease(self, tmp_path: Path, temperature: float) -> None:
        with local_session(tmp_path, profile=rank(1, temperatures=(2.0,))) as (session, broker):
            broker.send(a_grant(7, [], real_rows=3))
            with session.acquire(step=7, input_ids=IDS[4:]) as batch:
                targets = batch.targets_at(temperature)
                logits = torch.randn(4, 5, 16, requires_grad=True)
                loss, count = tl.losses.forward_kl(logits, targets)
                loss.backward()

                assert (batch.real_row_count, float(loss.detach()), int(count)) == (0, 0.0, 0)
                assert targets.topk_ids.shape == (0, K)
                assert targets.row_offsets.tolist() == [0] * 5

    @pytest.mark.parametrize("given", [1, 4], ids=["left out", "included"])
    def test_may_be_left_out_of_the_ids_or_not(self, tmp_path: Path, given: int) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, shards_of(IDS[:5], (5,)), real_rows=5)
            repeated = [IDS[4]] * given
            with session.acquire(step=7, input_ids=repeated) as batch:
                assert {check.verdict for check in batch.checks} == {Verdict.PASSED}

    def test_ids_of_another_number_of_rows_are_refused(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, shards_of(IDS[:5], (5,)), real_rows=5)
            with pytest.raises(PayloadInvalidError, match=r"input_ids has 2 rows.* rows 4 to 7"):
                session.acquire(step=7, input_ids=IDS[4:6])
