"""The state of a step: what is refused, what an abort leaves, and what all ranks hear alike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.client.normalisation.ranks import Meeting, on_ranks

from teacher_logits.errors import (
    ConfigError,
    PayloadInvalidError,
    RequestInvalidError,
    TeacherLogitsError,
)
from teacher_logits_client.normalisation import (
    GroupReduction,
    OpenStep,
    RescaleOrder,
    StaleAttemptError,
    StepLoss,
    StepNormaliser,
    StepReport,
    gradient_norms,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def a_parameter(size: int = 2) -> torch.Tensor:
    return torch.ones(size, dtype=torch.float64, requires_grad=True)


def gradient_of(parameter: torch.Tensor) -> list[float]:
    assert parameter.grad is not None
    found: list[float] = parameter.grad.tolist()
    return found


def filled(parameter: torch.Tensor, value: float) -> torch.Tensor:
    parameter.grad = torch.full_like(parameter, value)
    return parameter


class TestBegin:
    def test_while_a_step_is_open_is_refused_and_leaves_it_open(self) -> None:
        normaliser = StepNormaliser()
        step = normaliser.begin(step=3)

        with pytest.raises(RequestInvalidError) as refused:
            normaliser.begin(step=4)

        assert refused.value.facts == {"step": 4, "open_step": 3, "open_attempt": 0}
        assert step.is_open

    def test_leaves_parameters_without_gradients(self) -> None:
        parameter = filled(a_parameter(), 5.0)

        StepNormaliser(StepLoss(parameters=[parameter])).begin(step=0)

        assert parameter.grad is None

    def test_counts_the_attempts_of_a_step(self) -> None:
        normaliser = StepNormaliser()
        attempts = []
        for number in (3, 3, 4, 3):
            attempts.append(normaliser.begin(step=number).attempt)
            normaliser.abort()

        assert attempts == [0, 1, 0, 0]

    def test_of_an_attempt_that_is_over_is_refused(self) -> None:
        normaliser = StepNormaliser()
        normaliser.begin(step=3, attempt=2).abort()

        with pytest.raises(StaleAttemptError) as refused:
            normaliser.begin(step=3, attempt=2)

        assert refused.value.facts == {"step": 3, "attempt": 2, "next_attempt": 3}
        assert normaliser.begin(step=3, attempt=5).attempt == 5


class TestMicrobatch:
    def test_returns_the_undivided_sum(self) -> None:
        loss_sum = a_parameter().sum()

        assert float(StepNormaliser().begin(step=0).microbatch(0, loss_sum, 4).detach()) == 2

    def test_returns_the_weighted_sum_of_bins(self) -> None:
        normaliser = StepNormaliser(StepLoss(weight=3.0, bin_weights=[1.0, 0.5, 0.0]))
        sums = torch.tensor([2.0, 4.0, math.nan])

        whole = normaliser.begin(step=0).microbatch(0, sums, torch.tensor([1, 2, 3]))

        assert float(whole) == 3 * (2 + 0.5 * 4)

    @pytest.mark.parametrize(
        ("loss_sum", "count"),
        [
            (torch.zeros(2), torch.zeros(2)),
            (torch.zeros(()), torch.zeros(2)),
            (torch.zeros(3), 4),
            (torch.zeros((), dtype=torch.int64), 4),
        ],
    )
    def test_of_another_shape_is_refused_and_not_counted(
        self, loss_sum: torch.Tensor, count: torch.Tensor | float
    ) -> None:
        with StepNormaliser().begin(step=0) as step:
            with pytest.raises(PayloadInvalidError):
                step.microbatch(0, loss_sum, count)
            step.microbatch(0, torch.tensor(8.0), 4)

            assert step.finish().loss == 2

    @pytest.mark.parametrize("name", [None, "other"])
    def test_names_its_loss_where_there_are_several(self, name: str | None) -> None:
        step = StepNormaliser(StepLoss(name="policy"), StepLoss(name="draft")).begin(step=0)

        with pytest.raises(RequestInvalidError, match="policy"):
            step.microbatch(0, torch.tensor(1.0), 1, loss=name)

    def test_after_finish_is_refused(self) -> None:
        step = StepNormaliser().begin(step=2)
        step.finish()

        with pytest.raises(StaleAttemptError) as refused:
            step.microbatch(0, torch.tensor(1.0), 1)

        assert refused.value.facts == {"step": 2, "attempt": 0, "state": "finished"}

    @pytest.mark.parametrize("end", [OpenStep.abort, OpenStep.finish])
    def test_whose_attempt_is_over_adds_no_gradient_to_the_next(
        self, end: Callable[[OpenStep], object]
    ) -> None:
        parameter = a_parameter()
        normaliser = StepNormaliser(StepLoss(parameters=[parameter]))
        step = normaliser.begin(step=3)
        late = step.microbatch(0, parameter.sum(), 2)
        end(step)
        again = normaliser.begin(step=3)

        with pytest.raises(StaleAttemptError, match="backward of micro batch 0 of attempt 0"):
            late.backward()

        again.microbatch(0, parameter.sum(), 2).backward()
        again.finish()
        assert gradient_of(parameter) == [0.5, 0.5]

    def test_of_a_rank_that_divides_by_itself_goes_back_whenever_it_likes(self) -> None:
        parameter = a_parameter()
        step = StepNormaliser(StepLoss()).begin(step=3)
        late = step.microbatch(0, parameter.sum(), 2)

        (late / step.finish().losses["loss"].denominator).backward()

        assert gradient_of(parameter) == [0.5, 0.5]


class TestCounts:
    @given(start=st.integers(2**24 - 2, 2**40))
    def test_lose_no_token_however_many_there_are(self, start: int) -> None:
        with StepNormaliser().begin(step=0) as step:
            step.microbatch("first", torch.tensor(0.0), start)
            step.microbatch("second", torch.tensor(0.0), torch.tensor(1))

            assert step.finish().losses["loss"].counts == (float(start + 1),)

    @pytest.mark.parametrize("count", [2.0**24 + 1, 0.1])
    def test_are_the_float_that_was_given(self, count: float) -> None:
        with StepNormaliser().begin(step=0) as step:
            step.microbatch(0, torch.tensor(0.0), count)

            assert step.finish().losses["loss"].counts == (count,)

    @pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
    def test_that_are_none_are_refused_by_every_rank(self, bad: float) -> None:
        meeting = Meeting(2)
        parameters = [a_parameter(), a_parameter()]

        def story(rank: int) -> TeacherLogitsError:
            normaliser = StepNormaliser(
                StepLoss(parameters=[parameters[rank]]), reduction=meeting.of(rank)
            )
            step = normaliser.begin(step=0)
            step.microbatch(0, parameters[rank].sum(), bad if rank else 3.0).backward()
            with pytest.raises(PayloadInvalidError) as refused:
                step.finish()
            assert not step.is_open
            return refused.value

        assert [each.facts["bad_counts"] for each in on_ranks(2, story)] == [1, 1]
        assert [each.grad for each in parameters] == [None, None]


class TestFinish:
    def test_empties_nothing_but_divides_in_place(self) -> None:
        parameter = a_parameter()
        with StepNormaliser(StepLoss(parameters=[parameter])).begin(step=0) as step:
            step.microbatch(0, parameter.sum() * 6, 4).backward()
            held = parameter.grad
            step.finish()

        assert parameter.grad is held
        assert gradient_of(parameter) == [1.5, 1.5]

    def test_divides_a_parameter_that_is_named_twice_once(self) -> None:
        parameter = a_parameter()
        with StepNormaliser(StepLoss(parameters=[parameter, parameter])).begin(step=0) as step:
            step.microbatch(0, parameter.sum() * 6, 4).backward()
            step.finish()

        assert gradient_of(parameter) == [1.5, 1.5]

    def test_divides_what_a_framework_accumulates_beside_the_gradient(self) -> None:
        parameter = a_parameter()
        parameter.main_grad = torch.full((2,), 9.0)  # type: ignore[attr-defined]
        normaliser = StepNormaliser(StepLoss(parameters=[parameter]))
        with normaliser.begin(step=0) as step:
            emptied = parameter.main_grad.clone()  # type: ignore[attr-defined]
            parameter.main_grad.add_(6)  # type: ignore[attr-defined]
            step.microbatch(0, torch.tensor(12.0), 4)
            step.finish()

        assert emptied.tolist() == [0, 0]
        assert parameter.main_grad.tolist() == [1.5, 1.5]  # type: ignore[attr-defined]

    def test_weighs_a_loss_in_the_whole_and_not_in_its_own_mean(self) -> None:
        parameter = a_parameter(1)
        normaliser = StepNormaliser(
            StepLoss(name="policy"), StepLoss(name="draft", parameters=[parameter], weight=0.5)
        )
        with normaliser.begin(step=0) as step:
            step.microbatch(0, torch.tensor(9.0), 3, loss="policy")
            step.microbatch(0, parameter.sum() * 8, 4, loss="draft").backward()
            report = step.finish()

        assert report.losses["draft"].mean == 2
        assert report.loss == 3 + 0.5 * 2
        assert gradient_of(parameter) == [0.5 * 8 / 4]

    def test_refuses_ranks_that_are_at_different_steps_on_all_of_them(self) -> None:
        meeting = Meeting(3)

        def story(rank: int) -> TeacherLogitsError:
            normaliser = StepNormaliser(reduction=meeting.of(rank))
            with pytest.raises(RequestInvalidError, match="abort") as refused:
                normaliser.begin(step=8 if rank == 2 else 7).finish()
            return refused.value

        assert [each.facts["ranks"] for each in on_ranks(3, story)] == [3, 3, 3]

    def test_refuses_ranks_that_are_at_different_attempts(self) -> None:
        meeting = Meeting(2)

        def story(rank: int) -> None:
            with pytest.raises(RequestInvalidError, match="attempt"):
                StepNormaliser(reduction=meeting.of(rank)).begin(step=7, attempt=rank).finish()

        on_ranks(2, story)

    def test_refuses_a_reduction_that_changes_the_length(self) -> None:
        class Short:
            def sum(self, values: torch.Tensor) -> torch.Tensor:
                return values[:-1]

        with pytest.raises(RequestInvalidError, match="as many as it is given"):
            StepNormaliser(reduction=Short()).begin(step=0).finish()

    def test_that_fails_in_the_reduction_has_aborted_the_step(self) -> None:
        class Broken:
            def sum(self, values: torch.Tensor) -> torch.Tensor:
                raise ConnectionError("a rank is gone")

        parameter = a_parameter()
        normaliser = StepNormaliser(StepLoss(parameters=[parameter]), reduction=Broken())
        step = normaliser.begin(step=0)
        step.microbatch(0, parameter.sum(), 1).backward()

        with pytest.raises(ConnectionError):
            step.finish()

        assert parameter.grad is None
        assert normaliser.begin(step=0).attempt == 1


class TestWhetherToStep:
    def finished(self, loss_sum: float, count: float, weight: float = 1.0) -> StepReport:
        with StepNormaliser(StepLoss(weight=weight), StepLoss(name="other")).begin(step=0) as step:
            step.microbatch(0, torch.tensor(loss_sum), count, loss="loss")
            step.microbatch(0, torch.tensor(2.0), count, loss="other")
            return step.finish()

    def test_is_yes_without_a_reason_where_something_counted(self) -> None:
        report = self.finished(1.0, 2)

        assert (report.should_step, report.reason) == (True, None)

    def test_is_no_where_nothing_counted(self) -> None:
        report = self.finished(1.0, 0)

        assert (report.should_step, report.reason) == (False, "no loss counted anything")

    def test_is_no_where_only_what_weighs_nothing_counted(self) -> None:
        with StepNormaliser(StepLoss(), StepLoss(name="watched", weight=0.0)).begin(step=0) as step:
            step.microbatch(0, torch.tensor(2.0), 2, loss="watched")
            report = step.finish()

        assert (report.should_step, report.reason) == (
            False,
            "no loss counted anything but those that weigh 0",
        )

    def test_is_no_where_a_loss_is_nan_and_names_it(self) -> None:
        report = self.finished(math.nan, 2)

        assert (report.should_step, report.reason) == (False, "the loss 'loss' is NaN")

    def test_does_not_depend_on_a_loss_that_weighs_nothing(self) -> None:
        report = self.finished(math.nan, 2, weight=0.0)

        assert (report.should_step, report.loss) == (True, 1.0)

    @pytest.mark.parametrize("order", RescaleOrder)
    def test_of_a_loss_that_weighs_nothing_trains_nothing(self, order: RescaleOrder) -> None:
        parameter = a_parameter()
        losses = StepLoss(), StepLoss(name="watched", parameters=[parameter], weight=0.0)
        with StepNormaliser(*losses, order=order).begin(step=0) as step:
            step.microbatch(0, torch.tensor(1.0), 2, loss="loss")
            step.microbatch(0, (parameter * math.nan).sum(), 2, loss="watched").backward()
            report = step.finish()

        assert report.should_step
        assert gradient_of(parameter) == [0.0, 0.0]

    def test_is_yes_where_a_loss_is_infinite_and_its_gradient_is_not(self) -> None:
        assert self.finished(math.inf, 2).should_step

    @pytest.mark.parametrize("bad", [0, 1])
    def test_is_no_on_every_rank_where_one_has_a_nan(self, bad: int) -> None:
        meeting = Meeting(2)

        def story(rank: int) -> bool:
            step = StepNormaliser(reduction=meeting.of(rank)).begin(step=0)
            step.microbatch(0, torch.tensor(math.nan if rank == bad else 1.0), 2)
            return step.finish().should_step

        assert on_ranks(2, story) == [False, False]


class TestLeaving:
    def test_by_an_error_aborts_and_empties_the_gradients(self) -> None:
        parameter = a_parameter()
        normaliser = StepNormaliser(StepLoss(parameters=[parameter]))

        step = normaliser.begin(step=0)
        step.microbatch(0, parameter.sum(), 1).backward()
        with pytest.raises(ZeroDivisionError), step:
            _ = 1 / 0

        assert not step.is_open
        assert parameter.grad is None

    def test_without_finish_is_refused(self) -> None:
        with pytest.raises(RequestInvalidError, match="finish"), StepNormaliser().begin(step=0):
            pass

    def test_after_an_abort_is_fine(self) -> None:
        with StepNormaliser().begin(step=0) as step:
            step.abort()

    def test_a_finished_step_keeps_its_gradients_through_a_late_abort(self) -> None:
        parameter = a_parameter()
        normaliser = StepNormaliser(StepLoss(parameters=[parameter]))
        with normaliser.begin(step=0) as step:
            step.microbatch(0, parameter.sum(), 1).backward()
            step.finish()
        normaliser.abort()

        assert gradient_of(parameter) == [1, 1]


class TestEvaluation:
    def test_is_the_same_loop_without_parameters_or_gradients(self) -> None:
        with torch.no_grad(), StepNormaliser().begin(step=0) as step:
            step.microbatch(0, torch.tensor(6.0), 2)
            step.microbatch(1, torch.tensor(1.5), 1)
            report = step.finish()

        assert report.loss == 2.5
        assert report.losses["loss"].sums == (7.5,)

    def test_leaves_gradients_that_are_not_its_own(self) -> None:
        parameter = filled(a_parameter(), 5.0)

        StepNormaliser().begin(step=0).finish()

        assert gradient_of(parameter) == [5, 5]


class TestSettings:
    def test_refuse_two_losses_of_one_name(self) -> None:
        with pytest.raises(ConfigError, match="'draft'"):
            StepNormaliser(StepLoss(name="draft"), StepLoss(name="draft"))

    def test_refuse_a_parameter_of_two_losses(self) -> None:
        parameter = a_parameter()

        with pytest.raises(ConfigError, match="one denominator"):
            StepNormaliser(
                StepLoss(name="policy", parameters=[parameter]),
                StepLoss(name="draft", parameters=[parameter]),
            )

    @pytest.mark.parametrize("weights", [(), (0.0,), (1.0, -0.5), (math.nan,), (math.inf,)])
    def test_refuse_bin_weights_that_no_mean_can_be_made_of(
        self, weights: tuple[float, ...]
    ) -> None:
        with pytest.raises(ConfigError):
            StepLoss(bin_weights=weights)

    def test_refuse_a_weight_that_is_not_finite(self) -> None:
        with pytest.raises(ConfigError):
            StepLoss(weight=math.nan)

    @pytest.mark.parametrize("ranks", [0, 1.5, math.nan, "2", None])
    def test_refuse_an_average_over_no_rank(self, ranks: int) -> None:
        with pytest.raises(ConfigError, match="gradients_averaged_over"):
            StepNormaliser(gradients_averaged_over=ranks)

    def test_refuse_parameters_that_would_never_be_divided(self) -> None:
        """A tensor alone is its rows, which have no gradients of their own."""
        module = torch.nn.Linear(2, 2)
        given: list[object] = [
            module.weight,
            module,
            None,
            module.named_parameters(),
            [{"params": [module.weight]}],
        ]
        for parameters in given:
            with pytest.raises(ConfigError, match=r"model\.parameters"):
                StepLoss(parameters=parameters)  # type: ignore[arg-type]

    def test_refuse_losses_that_are_none(self) -> None:
        for losses in (a_parameter(), [StepLoss()]):
            with pytest.raises(ConfigError, match="StepLoss"):
                StepNormaliser(losses)  # type: ignore[arg-type]

    def test_refuse_a_group_where_there_is_none(self) -> None:
        with pytest.raises(ConfigError, match="init_process_group"):
            StepNormaliser(reduction=GroupReduction()).begin(step=0).finish()


class TestUpstreamsOrder:
    """NeMo RL scales all by the policy's count, then corrects the draft: for parity alone."""

    def run(self, policy_count: float, draft_count: float, order: RescaleOrder) -> list[float]:
        policy, draft = a_parameter(1), a_parameter(1)
        normaliser = StepNormaliser(
            StepLoss(name="policy", parameters=[policy]),
            StepLoss(name="draft", parameters=[draft]),
            order=order,
        )
        with normaliser.begin(step=0) as step:
            step.microbatch(0, policy.sum() * 48, policy_count, loss="policy").backward()
            step.microbatch(0, draft.sum() * 48, draft_count, loss="draft").backward()
            step.finish()
        return [*gradient_of(policy), *gradient_of(draft)]

    def test_comes_to_the_same_where_both_count(self) -> None:
        assert self.run(16, 8, RescaleOrder.SCALE_THEN_CORRECT) == [3, 6]
        assert self.run(16, 8, RescaleOrder.DIRECT) == [3, 6]

    def test_leaves_the_draft_no_gradient_where_the_policy_counts_nothing(self) -> None:
        assert self.run(0, 8, RescaleOrder.SCALE_THEN_CORRECT) == [0, 0]
        assert self.run(0, 8, RescaleOrder.DIRECT) == [0, 6]

    def test_leaves_a_draft_that_counts_nothing_no_gradient(self) -> None:
        assert self.run(16, 0, RescaleOrder.SCALE_THEN_CORRECT) == [3, 0]


class TestGradientNorms:
    def test_are_those_of_each_group(self) -> None:
        policy, draft = filled(a_parameter(4), 2.0), filled(a_parameter(9), 1.0)

        norms = gradient_norms({"policy": [policy, a_parameter()], "draft": [draft]})

        assert norms == {"policy": 4.0, "draft": 3.0}

    def test_are_told_to_ranks_that_own_nothing(self) -> None:
        meeting = Meeting(3)

        def story(rank: int) -> dict[str, float]:
            owned = [[filled(a_parameter(1), 3.0)], [filled(a_parameter(1), 4.0)], []][rank]
            return gradient_norms({"draft": owned}, meeting.of(rank))

        assert on_ranks(3, story) == [{"draft": 5.0}] * 3

    def test_of_other_groups_on_another_rank_are_refused(self) -> None:
        meeting = Meeting(2)

        def story(rank: int) -> None:
            with pytest.raises(RequestInvalidError, match="gradient norms"):
                gradient_norms({["policy", "draft"][rank]: []}, meeting.of(rank))

        on_ranks(2, story)
