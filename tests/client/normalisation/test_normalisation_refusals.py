"""What normalising over a step refuses by name, where Python or torch would say something else."""

from __future__ import annotations

import pytest
import torch

from teacher_logits.errors import ConfigError, PayloadInvalidError, RequestInvalidError
from teacher_logits_client.normalisation import (
    StepLoss,
    StepNormaliser,
    gradient_norms,
)


class TestSettings:
    @pytest.mark.parametrize("order", ["direct", None, 1])
    def test_of_an_order_that_is_none_name_those_there_are(self, order: object) -> None:
        with pytest.raises(ConfigError, match=r"order is .* RescaleOrder\.DIRECT"):
            StepNormaliser(order=order)  # type: ignore[arg-type]

    @pytest.mark.parametrize("reduction", ["world", object(), 2])
    def test_of_a_reduction_that_cannot_sum_name_one_that_can(self, reduction: object) -> None:
        with pytest.raises(ConfigError, match=r"which cannot sum; give GroupReduction\(group\)"):
            StepNormaliser(reduction=reduction)  # type: ignore[arg-type]

    @pytest.mark.parametrize("weights", [1.0, None, "ab", torch.tensor(1.0)])
    def test_of_bin_weights_that_are_not_several(self, weights: object) -> None:
        with pytest.raises(ConfigError, match=r"bin_weights is .* sequence"):
            StepLoss(bin_weights=weights)  # type: ignore[arg-type]

    @pytest.mark.parametrize("weight", ["1.0", None, [1.0], torch.ones(2)])
    def test_of_a_weight_that_is_no_number(self, weight: object) -> None:
        with pytest.raises(ConfigError, match=r"weight is .*; give a number"):
            StepLoss(weight=weight)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"one of bin_weights is .*; give a number"):
            StepLoss(bin_weights=[1.0, weight])  # type: ignore[list-item]

    def test_take_weights_that_are_a_tensor(self) -> None:
        loss = StepLoss(weight=torch.tensor(2.0), bin_weights=torch.tensor([1.0, 0.5]))  # type: ignore[arg-type]

        assert (loss.weight, loss.bin_weights) == (2.0, (1.0, 0.5))

    def test_of_gradients_of_several_ranks_without_their_counts(self) -> None:
        with pytest.raises(ConfigError, match=r"averaged_over is 2 .* give reduction="):
            StepNormaliser(gradients_averaged_over=2)

    def test_of_a_name_that_is_no_text(self) -> None:
        with pytest.raises(ConfigError, match="called 3, a int"):
            StepLoss(name=3)  # type: ignore[arg-type]


class TestSteps:
    @pytest.mark.parametrize("wrong", [None, "7", 1.5, -1, True])
    def test_of_other_numbers_are_refused(self, wrong: int) -> None:
        with pytest.raises(RequestInvalidError, match=r"step is .*; give a whole number"):
            StepNormaliser().begin(step=wrong)

    def test_of_other_attempts_are_refused(self) -> None:
        with pytest.raises(RequestInvalidError, match="attempt is 'x'"):
            StepNormaliser().begin(step=0, attempt="x")  # type: ignore[arg-type]


class TestMicroBatches:
    @pytest.mark.parametrize("number", [None, [0], 0.5, torch.zeros(1)])
    def test_without_a_number_or_a_name_are_refused(self, number: int) -> None:
        step = StepNormaliser().begin(step=0)
        with pytest.raises(RequestInvalidError, match="number it by a whole number or a name"):
            step.microbatch(number, torch.tensor(1.0), 1)

    @pytest.mark.parametrize("loss_sum", [1.0, None, (torch.tensor(1.0), 1)])
    def test_without_a_tensor_are_refused(self, loss_sum: object) -> None:
        step = StepNormaliser().begin(step=0)
        with pytest.raises(PayloadInvalidError, match="the tensor that the loss returned"):
            step.microbatch(0, loss_sum, 1)  # type: ignore[arg-type]

    @pytest.mark.parametrize("count", ["4", None, {}, [1, None], torch.ones(1) * 1j])
    def test_without_counts_are_refused(self, count: object) -> None:
        step = StepNormaliser().begin(step=0)
        with pytest.raises(PayloadInvalidError, match=r"the count of micro batch 0 is .*"):
            step.microbatch(0, torch.tensor(1.0), count)  # type: ignore[arg-type]


class TestParameters:
    """A generator that was read before is empty: nothing would be divided."""

    def test_that_ran_out_are_refused_with_the_first_sum_that_needs_a_gradient(self) -> None:
        model = torch.nn.Linear(2, 1)
        parameters = model.parameters()
        torch.optim.SGD(parameters)
        step = StepNormaliser(StepLoss(parameters=parameters)).begin(step=0)
        step.microbatch(0, torch.tensor(1.0), 1)

        with pytest.raises(ConfigError, match=r"turned out to be none.*list\(model\.parameters"):
            step.microbatch(1, model.weight.sum(), 1)

        assert step.finish().losses["loss"].counts == (1.0,)

    @pytest.mark.parametrize("loss", [StepLoss(), StepLoss(parameters=())])
    def test_that_are_none_on_purpose_are_fine(self, loss: StepLoss) -> None:
        weight = torch.ones(2, requires_grad=True)
        with StepNormaliser(loss).begin(step=0) as step:
            step.microbatch(0, weight.sum(), 1)
            assert step.finish().loss == 2

    def test_of_a_generator_are_divided_in_every_step(self) -> None:
        model = torch.nn.Linear(2, 1, bias=False)
        normaliser = StepNormaliser(StepLoss(parameters=model.parameters()))
        for number in range(2):
            with normaliser.begin(step=number) as step:
                step.microbatch(0, model.weight.sum(), 4).backward()
                step.finish()
            assert model.weight.grad is not None
            assert model.weight.grad.tolist() == [[0.25, 0.25]]


class TestGradientNorms:
    @pytest.mark.parametrize("owned", [None, [torch.ones(1)], "policy"])
    def test_of_no_mapping_are_refused(self, owned: object) -> None:
        with pytest.raises(ConfigError, match="under each group's name"):
            gradient_norms(owned)  # type: ignore[arg-type]

    @pytest.mark.parametrize("parameters", [torch.ones(2), torch.nn.Linear(2, 2), None])
    def test_of_what_are_no_parameters_are_refused(self, parameters: object) -> None:
        with pytest.raises(ConfigError, match=r"'policy' is a .* model\.parameters\(\)"):
            gradient_norms({"policy": parameters})  # type: ignore[dict-item]

    def test_of_an_optimizers_groups_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="'policy' holds a dict"):
            gradient_norms({"policy": [{"params": []}]})  # type: ignore[list-item]
