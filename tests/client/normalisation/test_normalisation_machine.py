"""A step in any order of calls, right and wrong, held against what a list of micro batches says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits_client.normalisation import (
    OpenStep,
    RepeatedMicroBatchError,
    StaleAttemptError,
    StepLoss,
    StepNormaliser,
)

numbers = st.integers(0, 3)


class Steps(RuleBasedStateMachine):
    """One parameter w; a micro batch of x and c is the loss w x over c tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        self.normaliser = StepNormaliser(StepLoss(parameters=[self.weight]))
        self.open: OpenStep | None = None
        self.over: list[OpenStep] = []
        self.batches: dict[int, tuple[float, int]] = {}
        self.attempts: dict[int, int] = {}
        self.gradient: float | None = None

    @rule(step=numbers)
    def begin(self, step: int) -> None:
        if self.open is not None:
            with pytest.raises(RequestInvalidError, match="finish or abort"):
                self.normaliser.begin(step)
            return
        last = self.over[-1] if self.over else None
        self.open = self.normaliser.begin(step)
        again = last is not None and last.step == step
        assert self.open.attempt == (last.attempt + 1 if last is not None and again else 0)
        self.batches, self.gradient = {}, None

    @rule(number=numbers, x=st.integers(-4, 4), count=st.integers(0, 3))
    def microbatch(self, number: int, x: int, count: int) -> None:
        if self.open is None:
            return
        loss_sum = (self.weight * x).sum()
        if number in self.batches:
            with pytest.raises(RepeatedMicroBatchError):
                self.open.microbatch(number, loss_sum, count)
            return
        self.open.microbatch(number, loss_sum, count).backward()
        self.batches[number] = (float(x), count)
        self.gradient = sum(each for each, _ in self.batches.values())

    @rule(number=numbers)
    def a_micro_batch_that_fails_is_not_counted(self, number: int) -> None:
        if self.open is None or number in self.batches:
            return
        with pytest.raises(ValueError, match="in the loss"):
            self.open.microbatch(number, self._failing(), 1)

    def _failing(self) -> torch.Tensor:
        raise ValueError("in the loss")

    @precondition(lambda self: self.open is not None)
    @rule()
    def finish(self) -> None:
        assert self.open is not None
        report = self.open.finish()
        total = sum(each for each, _ in self.batches.values())
        count = sum(each for _, each in self.batches.values())
        (loss,) = report.losses.values()
        assert (loss.denominator, report.should_step) == (count, count > 0)
        assert loss.mean == pytest.approx(total / count if count else 0.0)
        if self.gradient is not None:
            self.gradient = total / count if count else 0.0
        self._is_over()

    @precondition(lambda self: self.open is not None)
    @rule(by=st.sampled_from(["step", "normaliser", "error", "leaving"]))
    def abort(self, by: str) -> None:
        assert self.open is not None
        if by == "error":
            with pytest.raises(ZeroDivisionError), self.open:
                raise ZeroDivisionError
        elif by == "leaving":
            with pytest.raises(RequestInvalidError, match="without finish"), self.open:
                pass
        else:
            (self.open if by == "step" else self.normaliser).abort()
        self.gradient = None
        self._is_over()

    def _is_over(self) -> None:
        assert self.open is not None
        self.over.append(self.open)
        self.open = None

    @precondition(lambda self: self.over)
    @rule(number=numbers)
    def what_is_over_takes_nothing_and_changes_nothing(self, number: int) -> None:
        for old in self.over:
            with pytest.raises(StaleAttemptError):
                old.microbatch(number, self.weight.sum(), 1)
            with pytest.raises(StaleAttemptError):
                old.finish()
            old.abort()

    @invariant()
    def the_gradient_is_that_of_the_open_step_alone(self) -> None:
        found = self.weight.grad
        if self.gradient is None:
            assert found is None
        else:
            assert found is not None
            assert float(found) == pytest.approx(self.gradient)


Steps.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSteps = Steps.TestCase


def test_gradients_of_another_model_are_not_left_undivided() -> None:
    trained, named = (torch.ones(2, requires_grad=True) for _ in range(2))
    step = StepNormaliser(StepLoss(parameters=[named])).begin(step=0)
    step.microbatch(0, trained.sum(), 2).backward()

    with pytest.raises(ConfigError, match="none of the 1 parameters that it was given has one"):
        step.finish()

    assert not step.is_open


def test_nor_are_those_of_a_normaliser_without_losses() -> None:
    trained = torch.ones(2, requires_grad=True)
    step = StepNormaliser().begin(step=0)
    step.microbatch(0, trained.sum(), 2).backward()

    with pytest.raises(ConfigError, match=r"no loss was given; give StepLoss\(parameters=list"):
        step.finish()


def test_whoever_divides_by_himself_says_so_by_no_parameters() -> None:
    trained = torch.ones(2, requires_grad=True)
    step = StepNormaliser(StepLoss(parameters=())).begin(step=0)
    step.microbatch(0, trained.sum(), 2).backward()

    assert step.finish().losses["loss"].denominator == 2


def test_sums_that_nobody_calls_backward_on_are_an_evaluation() -> None:
    """Also where the gradient was not switched off."""
    trained = torch.ones(2, requires_grad=True)
    step = StepNormaliser().begin(step=0)
    step.microbatch(0, trained.sum(), 2)

    assert step.finish().loss == 1.0
