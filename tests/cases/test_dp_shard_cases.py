"""How a batch is cut over data-parallel ranks, against NeMo RL's own answers."""

from __future__ import annotations

import pytest
from tests.cases.golden import DpShardCase, dp_shard_cases

from teacher_logits.errors import GridMismatchError
from teacher_logits_client.ray.row_orders import RowOrder, row_order

CASES = dp_shard_cases("dp_shard_cases.jsonl")
SOUND = [case for case in CASES if case.error is None]
REFUSED = [case for case in CASES if case.error not in (None, "zero_division")]
DIVIDED_BY_ZERO = [case for case in CASES if case.error == "zero_division"]


def each(cases: list[DpShardCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[f"{case.id}-{case.tag}" for case in cases])


def ordered(case: DpShardCase) -> RowOrder:
    return row_order(
        row_count=case.total,
        ranks=case.shards,
        batch_size=case.batch_size,
        lengths=case.input_lengths,
        batching=case.batching,
    )


@each(SOUND)
def test_every_rank_holds_the_rows_that_upstream_gives_it(case: DpShardCase) -> None:
    assert [list(rows) for rows in ordered(case).rows] == case.rows_per_shard


@each([case for case in SOUND if case.batching is not None])
def test_micro_batches_are_those_of_upstream(case: DpShardCase) -> None:
    made = ordered(case).micro_batches

    assert made is not None
    for rank, (chunks, places) in enumerate(zip(made, case.micro_batch_indices, strict=True)):
        rows = iter(case.rows_per_shard[rank])
        for batches, expected in zip(chunks, places, strict=True):
            wanted = [tuple(next(rows) for _ in range(end - start)) for start, end in expected]
            assert [batch.rows for batch in batches] == wanted
        assert [
            [batch.tokens for batch in batches] for batches in chunks
        ] == case.micro_batch_lengths[rank]


@each(REFUSED)
def test_what_upstream_refuses_is_refused_by_the_same_rule(case: DpShardCase) -> None:
    with pytest.raises(GridMismatchError) as refusal:
        ordered(case)

    assert refusal.value.violations[0].rule == case.error


@each(DIVIDED_BY_ZERO)
def test_a_batch_without_rows_is_refused_where_upstream_divides_by_it(case: DpShardCase) -> None:
    with pytest.raises(GridMismatchError) as refusal:
        ordered(case)

    assert refusal.value.violations[0].rule == "not_positive"
