"""The batch-grid rules against NeMo RL's own answers; ours where theirs are defects."""

import pytest
from tests.cases.golden import RuleCase, each, rule_cases

from teacher_logits.errors import GridMismatchError
from teacher_logits.x_token import assert_teacher_student_batch_grid

CASES = rule_cases("grid_cases.jsonl")
SOUND = [case for case in CASES if not case.has_size_below_one]
BELOW_ONE = [case for case in CASES if case.has_size_below_one]


@each([case for case in SOUND if case.failing_rule is None])
def test_what_upstream_accepts_is_accepted(case: RuleCase) -> None:
    assert_teacher_student_batch_grid(**case.params)


@each([case for case in SOUND if case.failing_rule is not None])
def test_the_rule_upstream_stops_at_is_named_first(case: RuleCase) -> None:
    with pytest.raises(GridMismatchError) as refusal:
        assert_teacher_student_batch_grid(**case.params)

    assert refusal.value.violations[0].rule == case.failing_rule
    assert len({v.rule for v in refusal.value.violations}) == len(refusal.value.violations)


@each(BELOW_ONE)
def test_a_size_below_one_is_refused_whatever_upstream_says(case: RuleCase) -> None:
    """Upstream divides by it (ZeroDivisionError), or accepts it where the remainder is 0.

    Ours differs on purpose: no batch has fewer than one row, rank or row a micro batch.
    """
    with pytest.raises(GridMismatchError) as refusal:
        assert_teacher_student_batch_grid(**case.params)

    first = refusal.value.violations[0]
    assert first.rule == "not_positive"
    assert sorted(first.facts.values(), key=int) == sorted(
        size for size in case.params.values() if size < 1
    )
