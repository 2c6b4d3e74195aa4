"""The error tree: four branches, stable names, and nothing lost on the way to another process."""

from __future__ import annotations

import copy
import pickle
import re
from datetime import timedelta

import pytest

from teacher_logits import errors
from teacher_logits.errors import (
    ContractViolation,
    GridMismatchError,
    NotAvailable,
    NotNodeLocalError,
    SessionRefusedError,
    StaleReference,
    TeacherLogitsError,
    TransportFailure,
    Violation,
)

BRANCHES = (ContractViolation, StaleReference, NotAvailable, TransportFailure)
TREE = [
    kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TeacherLogitsError) and not name.startswith("_")
]
RULE_ERRORS = [SessionRefusedError, GridMismatchError, NotNodeLocalError]


def example(kind: type[TeacherLogitsError]) -> TeacherLogitsError:
    """An error of the kind, with everything on it."""
    error: TeacherLogitsError
    if kind in RULE_ERRORS:
        error = kind(
            [
                Violation(rule="one", message="too small", facts={"size": 1}),
                Violation(rule="two", message="too large", facts={"other": 0.5}),
            ]
        )
    else:
        error = kind("it failed", facts={"size": 1, "name": "x", "share": 0.5})
    error.retry_after = timedelta(seconds=2)
    return error


def test_the_module_says_all_there_is() -> None:
    tree = (errors.__doc__ or "").partition("─")[2]

    assert [kind.__name__ for kind in TREE if not re.search(rf"\b{kind.__name__}\b", tree)] == [
        "TeacherLogitsError"
    ]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
class TestEveryError:
    def test_has_one_of_the_four_branches(self, kind: type[TeacherLogitsError]) -> None:
        branches = [branch for branch in BRANCHES if issubclass(kind, branch)]

        assert len(branches) == (0 if kind is TeacherLogitsError else 1)

    def test_has_a_reason_of_its_own(self, kind: type[TeacherLogitsError]) -> None:
        assert [other for other in TREE if other.reason == kind.reason] == [kind]
        assert kind.reason == kind.reason.upper()

    @pytest.mark.parametrize("way", ["pickle", "copy"])
    def test_crosses_to_another_process_whole(
        self, kind: type[TeacherLogitsError], way: str
    ) -> None:
        error = example(kind)

        other = pickle.loads(pickle.dumps(error)) if way == "pickle" else copy.copy(error)

        assert type(other) is kind
        assert str(other) == str(error) == error.message
        assert vars(other) == vars(error)

    def test_can_be_raised_and_says_its_message(self, kind: type[TeacherLogitsError]) -> None:
        error = example(kind)

        with pytest.raises(kind) as caught:
            raise error

        assert str(caught.value) == error.message


def test_facts_are_the_errors_own() -> None:
    facts = {"size": 1}
    error = TeacherLogitsError("x", facts=facts)
    facts["size"] = 2

    assert error.facts == {"size": 1}


@pytest.mark.parametrize("kind", RULE_ERRORS)
class TestRefusals:
    def test_name_every_broken_rule(self, kind: type[SessionRefusedError]) -> None:
        error = example(kind)

        assert isinstance(error, errors._RuleError)
        assert str(error) == "one: too small; two: too large"
        assert [violation.rule for violation in error.violations] == ["one", "two"]

    def test_gather_all_numbers_the_first_rules_first(
        self, kind: type[SessionRefusedError]
    ) -> None:
        error = kind(
            [
                Violation(rule="one", message="", facts={"size": 1}),
                Violation(rule="two", message="", facts={"size": 2, "other": 3}),
            ]
        )

        assert list(error.facts.items()) == [("size", 1), ("other", 3)]

    def test_need_something_to_refuse(self, kind: type[SessionRefusedError]) -> None:
        with pytest.raises(ValueError, match="at least one"):
            kind([])


@pytest.mark.parametrize("kind", [GridMismatchError, NotNodeLocalError])
def test_the_rules_of_nemo_rl_still_raise_assertion_errors(
    kind: type[TeacherLogitsError],
) -> None:
    assert issubclass(kind, AssertionError)
