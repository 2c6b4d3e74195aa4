"""Before the teacher computes: which way a step takes, and by which rule it takes no shorter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import GridMismatchError
from teacher_logits_client.ray.agreement import Path, Side, StepPlan, agree
from teacher_logits_client.ray.driver import require_deferred
from teacher_logits_client.ray.row_orders import DynamicBatching, SequencePacking

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = Side(data_parallel_size=2, global_batch_size=8)
PACKED = replace(SIDE, batching=SequencePacking(max_tokens_per_micro_batch=64))
SORTED = replace(SIDE, batching=DynamicBatching(max_tokens_per_micro_batch=64))
LENGTHS = [8, 3, 5, 9, 2, 7, 4, 6]


def plan(*, student: Side = SIDE, teacher: Side = SIDE, **more: object) -> StepPlan:
    given_ = {"row_count": 8, "lengths": LENGTHS, **more}
    return StepPlan(student=student, teacher=teacher, **given_)  # type: ignore[arg-type]


def test_two_like_sides_take_the_deferred_way() -> None:
    agreed = agree(plan())

    assert (agreed.path, agreed.reason) == (Path.DEFERRED, None)
    assert agreed.student_rows == agreed.teacher_rows == ((0, 1, 2, 3), (4, 5, 6, 7))
    require_deferred(agreed)


def test_two_sides_that_pack_alike_take_the_deferred_way() -> None:
    agreed = agree(plan(student=PACKED, teacher=PACKED))

    assert agreed.path is Path.DEFERRED
    assert agreed.student_rows == agreed.teacher_rows != ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("given_", "rule", "facts"),
    [
        (plan(teacher=replace(SIDE, is_plain_policy=False)), "not_plain_policy", "teacher"),
        (plan(is_direct_packed=True), "direct_packed", None),
        (plan(row_count=4, lengths=LENGTHS[:4]), "partial_batch", 4),
        (plan(row_count=16, lengths=LENGTHS * 2), "partial_batch", 16),
        (plan(teacher=replace(SIDE, data_parallel_size=4)), "dp_mismatch", 4),
        (plan(teacher=SORTED), "dynamic_batching", "teacher"),
        (plan(student=SORTED), "dynamic_batching", "student"),
        (plan(student=SORTED, teacher=SORTED), "dynamic_batching", "student"),
        (plan(student=PACKED), "packing_one_sided", "student"),
        (plan(teacher=PACKED), "packing_one_sided", "teacher"),
        (
            plan(
                student=PACKED,
                teacher=replace(PACKED, batching=SequencePacking(max_tokens_per_micro_batch=48)),
            ),
            "packing_mismatch",
            48,
        ),
        (
            plan(teacher=replace(SIDE, rows=((0, 1, 2, 3), (4, 5, 7, 6)))),
            "row_order_mismatch",
            2,
        ),
    ],
)
def test_the_first_rule_that_fails_is_the_reason(
    given_: StepPlan, rule: str, facts: object
) -> None:
    agreed = agree(given_)

    assert agreed.path is Path.MATERIALISED
    assert agreed.reason is not None
    assert agreed.reason.rule == rule
    assert facts is None or facts in agreed.reason.facts.values()
    with pytest.raises(GridMismatchError, match=rule):
        require_deferred(agreed)


def test_the_rules_are_asked_in_their_order() -> None:
    """A plan that breaks them all, mended one by one."""
    student = replace(SORTED, is_plain_policy=False)
    teacher = replace(SIDE, data_parallel_size=4)
    given_ = plan(row_count=16, lengths=LENGTHS * 2, is_direct_packed=True, student=student,
                  teacher=teacher)  # fmt: skip
    rules = []
    mends: list[Callable[[StepPlan], StepPlan]] = [
        lambda p: replace(p, student=SORTED),
        lambda p: replace(p, is_direct_packed=False),
        lambda p: replace(p, row_count=8, lengths=LENGTHS),
        lambda p: replace(p, teacher=SIDE),
        lambda p: replace(p, student=PACKED),
        lambda p: replace(p, teacher=replace(PACKED, micro_batch_tokens=48)),
        lambda p: replace(p, teacher=replace(PACKED, rows=((7, 1, 2, 3), (4, 5, 6, 0)))),
    ]
    for mend in mends:
        reason = agree(given_).reason
        rules.append(None if reason is None else reason.rule)
        given_ = mend(given_)

    assert rules == [
        "not_plain_policy", "direct_packed", "partial_batch", "dp_mismatch", "dynamic_batching",
        "packing_one_sided", "packing_mismatch",
    ]  # fmt: skip
    assert str(agree(given_).reason).startswith("Violation(rule='row_order_mismatch'")


def test_an_override_of_the_packed_micro_batch_stands_in_for_the_sides_own() -> None:
    wide = replace(PACKED, batching=SequencePacking(max_tokens_per_micro_batch=999))

    assert agree(plan(student=PACKED, teacher=replace(wide, micro_batch_tokens=64))).reason is None
    apart = agree(plan(student=PACKED, teacher=replace(PACKED, micro_batch_tokens=32)))
    assert apart.reason is not None
    assert apart.reason.facts == {
        "student_max_tokens_per_micro_batch": 64,
        "teacher_max_tokens_per_micro_batch": 32,
    }


@pytest.mark.parametrize(
    ("side", "rule"),
    [
        (replace(PACKED, micro_batch_tokens=0), "not_positive"),
        (replace(PACKED, micro_batch_tokens=-64), "not_positive"),
        (replace(PACKED, micro_batch_tokens=True), "not_positive"),
        (replace(SIDE, micro_batch_tokens=64), "override_unused"),
        (replace(PACKED, micro_batch_tokens=8), "row_too_long"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused_before_the_teacher_computes(
    side: Side, rule: str
) -> None:
    for given_ in (plan(student=side, teacher=PACKED), plan(student=PACKED, teacher=side)):
        with pytest.raises(GridMismatchError) as refusal:
            agree(given_)
        assert refusal.value.violations[0].rule == rule


@pytest.mark.parametrize(
    "rows",
    [((0, 1, 2, 3),), ((0, 1, 2, 3), (4, 5, 6)), ((0, 1, 2, 3), (3, 4, 5, 6))],
    ids=["a rank too few", "a row too few", "a row twice"],
)
def test_rows_that_do_not_tile_the_step_are_refused(rows: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(GridMismatchError, match="rows_not_tiled"):
        agree(plan(teacher=replace(SIDE, rows=rows)))


def test_what_is_expected_of_payloads_is_a_size() -> None:
    with pytest.raises(GridMismatchError, match="top_k is 0"):
        agree(plan(top_k=0))


def test_direct_packed_rows_are_dealt_out_in_turn() -> None:
    assert agree(plan(is_direct_packed=True)).student_rows == ((0, 2, 4, 6), (1, 3, 5, 7))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_the_deferred_way_is_taken_only_where_rows_are_the_same(
    student: int, teacher: int, chunks: int
) -> None:
    size = student * teacher
    agreed = agree(
        StepPlan(
            row_count=size * chunks,
            student=Side(data_parallel_size=student, global_batch_size=size),
            teacher=Side(data_parallel_size=teacher, global_batch_size=size * chunks),
        )
    )

    assert (agreed.path is Path.DEFERRED) == (student == teacher and chunks == 1)
    assert agreed.path is Path.MATERIALISED or agreed.student_rows == agreed.teacher_rows
    for rows in (agreed.student_rows, agreed.teacher_rows):
        assert sorted(row for each in rows for row in each) == list(range(size * chunks))


def test_lengths_may_be_a_tensor() -> None:
    packed = plan(student=PACKED, teacher=PACKED)

    assert agree(replace(packed, lengths=torch.tensor(LENGTHS))) == agree(packed)  # type: ignore[arg-type]


def test_a_row_without_tokens_is_a_row_where_none_is_batched_by_length() -> None:
    assert agree(plan(lengths=[0] * 8)).reason is None
    with pytest.raises(GridMismatchError, match="not_positive"):
        agree(plan(lengths=[0] * 8, student=PACKED, teacher=PACKED))


@pytest.mark.parametrize("lengths", [[], [1] * 7, [1] * 9])
def test_lengths_are_one_a_row(lengths: list[int]) -> None:
    with pytest.raises(GridMismatchError, match="lengths_missing"):
        agree(plan(lengths=lengths))


def test_no_row_is_longer_than_the_batch_that_it_is_padded_in() -> None:
    assert agree(plan(sequence_length=max(LENGTHS))).reason is None
    with pytest.raises(GridMismatchError, match="row_too_long: row 3 has 9 tokens and the batch 8"):
        agree(plan(sequence_length=8))
