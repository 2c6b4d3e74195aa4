"""Sharding: what keeps a teacher's shards from being put together refuses its publishers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.client.publishing.sharded import ranks, whole_teacher

from teacher_logits.layout import ElementType
from teacher_logits.profiles import PROTOCOL_VERSION, SCORED_COLUMNS
from teacher_logits.selection_rules import Nucleus
from teacher_logits.shard_parts import ShardedBy, is_shard
from teacher_logits_server.admission.holders import Standing
from teacher_logits_server.publishers import Publishers, TeacherIncomplete
from teacher_logits_server.publishers.engines import EngineTeachers
from teacher_logits_server.publishers.promises import check_profile
from teacher_logits_server.publishers.sharding import shard_taken

GOOD = ranks(whole_teacher("teacher"), "zigzag", "vocabulary", tensor=2, context=2)


@pytest.mark.parametrize("profile", GOOD, ids=range(4))
def test_the_ranks_of_a_good_teacher_break_no_rule(profile: object) -> None:
    assert check_profile(profile, protocol_version=PROTOCOL_VERSION) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_grid": None}, "its ranks are what divides the rows"),
        ({"sharded_by": tuple(ShardedBy)}, "the sequence is cut in one way"),
        ({"value_type": ElementType.BFLOAT16}, "the profile has value_type bfloat16: give"),
        ({"columns": SCORED_COLUMNS}, "value_type float16 and lacks topk_logits: give"),
        ({"selection": Nucleus(mass=0.9)}, "which is one of the whole vocabulary"),
        ({"vocabulary_size": 16}, "columns are 16 to 31, and the ids end at 15"),
    ],
)
def test_shards_that_could_not_be_put_together_are_refused(
    changes: dict[str, object], message: str
) -> None:
    profile = replace(GOOD[3], **changes)  # type: ignore[arg-type]

    (violation,) = check_profile(profile, protocol_version=PROTOCOL_VERSION)

    assert violation.rule == "sharding_unavailable"
    assert message in violation.message


def test_a_rank_that_its_grid_does_not_have_is_told_of_the_grid_alone() -> None:
    assert GOOD[3].model_grid is not None
    beyond = replace(GOOD[3], model_grid=replace(GOOD[3].model_grid, tensor_parallel_rank=2))

    (violation,) = check_profile(beyond, protocol_version=PROTOCOL_VERSION)

    assert violation.rule == "rank_out_of_range"


def test_a_sequence_alone_is_divided_whatever_the_entries_are() -> None:
    (_, second) = ranks(whole_teacher("teacher"), "zigzag", context=2)
    profile = replace(
        second,
        columns=SCORED_COLUMNS,
        value_type=ElementType.BFLOAT16,
        selection=Nucleus(mass=0.9),
    )

    assert check_profile(profile, protocol_version=PROTOCOL_VERSION) == []


def test_students_wait_for_the_publisher_of_each_part() -> None:
    publishers = Publishers(engines=EngineTeachers(()), keep_steps=0)
    for number, profile in enumerate(GOOD):
        if number:
            with pytest.raises(TeacherIncomplete, match="have not come: shard") as refusal:
                publishers.choose("teacher")
            assert refusal.value.facts["missing"] == 4 - number
            assert "3 (data-parallel rank 0, context-parallel part 1, tensor-parallel part 1)" in (
                refusal.value.message
            )
        publishers.enter(f"s{number}", profile)
        member = publishers.member("teacher", f"s{number}")
        assert member is not None
        member.writer_id = f"w{number}"

    assert publishers.choose("teacher").sharded_by == GOOD[0].sharded_by


def test_a_rank_that_holds_a_copy_is_told_so_where_its_shard_is_published() -> None:
    (first, copy) = ranks(whole_teacher("teacher"), "zigzag", tensor=2)

    refused = shard_taken(copy, Standing(text="process 7", facts={}))

    assert not is_shard(copy)
    assert "this rank holds a copy, which is not published" in refused.message
    assert "holds a copy" not in shard_taken(first, Standing(text="process 7", facts={})).message
