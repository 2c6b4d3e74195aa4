"""The shard plan against NeMo RL's own: which part of which teacher rank's shard goes where."""

from typing import Any

from tests.cases.golden import PlanCase, each, plan_cases

from teacher_logits.shard_plan import ShardBox, plan_shards

CASES = plan_cases("shard_plan_cases.jsonl")


def box(shard: dict[str, Any]) -> ShardBox:
    start = shard["global_seq_start"]
    return ShardBox(
        rows=range(1),
        positions=(range(start, start + shard["actual_shape"][0]),),
        ids=range(shard["vocab_start_index"], shard["vocab_end_index"]),
        name=f"tp {shard['tp_rank']}, cp {shard['cp_rank']}",
    )


def slice_of(case: PlanCase) -> ShardBox:
    length, size, rank = case.full_seq_len, case.student_cp, case.student_cp_rank
    window = range(rank * length // size, (rank + 1) * length // size)
    return ShardBox(rows=range(1), positions=(window,), ids=range(case.full_vocab_size))


def span(run: range) -> list[int]:
    return [run.start, run.stop]


@each(CASES)
def test_a_students_slice_is_put_together_as_upstream_does(case: PlanCase) -> None:
    plan = plan_shards([box(shard) for shard in case.shards], slice_of(case))

    assert [
        {
            "tp_rank": case.shards[piece.shard]["tp_rank"],
            "cp_rank": case.shards[piece.shard]["cp_rank"],
            "src_seq": span(piece.source_positions),
            "src_vocab": span(piece.source_ids),
            "dest_seq": span(piece.positions),
            "dest_vocab": span(piece.ids),
        }
        for piece in plan.pieces
    ] == case.plan
    assert plan.is_view == (len(case.plan) == 1)
