"""Handles of many workers in the order of the global batch, against NeMo RL's own answers."""

from __future__ import annotations

import pytest
from tests.cases.golden import HandleCase, handle_cases

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.ray.global_order import RankHandles, in_global_order

CASES = handle_cases("handle_aggregation_cases.jsonl")


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_rows_come_in_global_order_as_upstream_has_them(case: HandleCase) -> None:
    """Whatever order the workers answer in. Where upstream refuses, so do we; and where it closes
    the gap of a rank that is missing, since every later row would be trained on as another.
    """
    answers = [
        RankHandles(data_parallel_rank=rank, handles=tuple(handles))
        for rank, handles in case.worker_results
    ]
    ranks = {answer.data_parallel_rank for answer in answers}
    if case.expected is None or ranks != set(range(len(ranks))):
        with pytest.raises(PayloadInvalidError):
            in_global_order(answers)
    else:
        assert [list(row) for row in in_global_order(answers)] == case.expected
