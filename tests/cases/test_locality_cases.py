"""The node-locality rules against NeMo RL's own answers; ours where theirs are defects."""

import pytest
from tests.cases.golden import RuleCase, each, rule_cases

from teacher_logits.errors import NotNodeLocalError
from teacher_logits.x_token import assert_xtoken_ipc_node_local

CASES = rule_cases("locality_cases.jsonl")
SOUND = [case for case in CASES if not case.has_size_below_one]
BELOW_ONE = [case for case in CASES if case.has_size_below_one]


@each([case for case in SOUND if case.failing_rule is None])
def test_what_upstream_accepts_is_accepted_and_crosses_no_node(case: RuleCase) -> None:
    assert_xtoken_ipc_node_local(**case.params)

    assert case.node_local is not False


@each([case for case in SOUND if case.failing_rule is not None])
def test_the_rule_upstream_stops_at_is_named_first(case: RuleCase) -> None:
    with pytest.raises(NotNodeLocalError) as refusal:
        assert_xtoken_ipc_node_local(**case.params)

    assert refusal.value.violations[0].rule == case.failing_rule
    assert len({v.rule for v in refusal.value.violations}) == len(refusal.value.violations)


@each(BELOW_ONE)
def test_a_size_below_one_is_refused_whatever_upstream_says(case: RuleCase) -> None:
    """Upstream accepts 0 and -3 nodes as "one node", and divides by an empty group.

    Ours differs on purpose: a place to run has at least one node, and a group one process.
    With one node too: a size that cannot be is a mistake in the profile, wherever it lives.
    """
    with pytest.raises(NotNodeLocalError) as refusal:
        assert_xtoken_ipc_node_local(**case.params)

    first = refusal.value.violations[0]
    assert first.rule == "not_positive"
    assert {int(size) for size in first.facts.values()} == {
        size for size in case.params.values() if size < 1
    }
