"""A trainer's loss from hidden states: the same step, and no array of all logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.client.trainers import trainer_rig as rig
from transformers import Gemma2Config, Gemma2ForCausalLM

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def capped() -> Any:
    """A Gemma of one layer: its head is its embedding, and its logits are capped at 0.2."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=rig.VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Gemma2ForCausalLM(config).double()


def positions_made(trainer: Any) -> list[int]:
    """Of how many positions a row the head makes logits, each time that it does."""
    made: list[int] = []
    head = trainer.model.get_output_embeddings()
    head.register_forward_hook(lambda module, given, out: made.append(out.shape[1]))
    return made


class Adapter(torch.nn.Module):
    """What PEFT puts around a model: its layers are inside, and hidden in an attribute."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.model(*given, **named)


class Adapted(torch.nn.Module):
    """A student as PEFT wraps it, with a frozen head and something of its own to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Adapter(rig.a_student())
        self.config = self.base_model.model.config
        self.get_base_model().lm_head.weight.requires_grad_(False)

    def get_base_model(self) -> Any:
        return self.base_model.model

    def get_output_embeddings(self) -> Any:
        return self.get_base_model().get_output_embeddings()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **named: Any) -> Any:
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **named)


@pytest.mark.parametrize(
    ("student", "collate"),
    # torch has NaN in a Gemma's attention where a row begins with padding, whatever the loss.
    [
        (rig.a_student, rig.collated),
        (rig.a_student, rig.on_the_left),
        (rig.a_student, rig.packed),
        (capped, rig.collated),
        (capped, rig.packed),
        (Adapted, rig.collated),
    ],
)
def test_the_step_is_that_of_all_logits(
    teacher: str, tmp_path: Path, student: Callable[[], Any], collate: Callable[..., Any]
) -> None:
    usual = rig.a_trainer(teacher, tmp_path, model=student(), beta=0.5)
    lean = rig.a_trainer(teacher, tmp_path, model=student(), beta=0.5, loss_from_hidden=True)
    usual.data_collator = lean.data_collator = collate
    made = positions_made(lean)

    rig.assert_same(rig.step_of(lean), rig.step_of(usual))

    assert rig.logged(lean, "loss") == pytest.approx(rig.logged(usual, "loss"), abs=1e-6)
    assert made == [1]


def test_a_head_that_was_changed_between_evaluations_is_the_one_that_speaks(
    teacher: str, tmp_path: Path
) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, loss_from_hidden=True)
    trainer.evaluate()
    assert trainer.model is not None
    trainer.model.resize_token_embeddings(300, mean_resizing=False)  # type: ignore[operator]

    found = trainer.evaluate()["eval_loss"]

    trainer.args.loss_from_hidden = False
    assert found == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-9)


def test_an_evaluation_makes_logits_where_something_is_to_be_computed_of_them(
    teacher: str, tmp_path: Path
) -> None:
    usual = rig.a_trainer(teacher, tmp_path).evaluate()["eval_loss"]
    trainer = rig.a_trainer(teacher, tmp_path, loss_from_hidden=True, per_device_eval_batch_size=5)
    made = positions_made(trainer)

    assert trainer.evaluate()["eval_loss"] == pytest.approx(usual, abs=1e-6)
    shown: Any = trainer  # predictions are typed as more than what they are here
    shown.compute_metrics = lambda both: {"width": both.predictions.shape[-1]}
    metrics = trainer.evaluate()

    assert metrics["eval_loss"] == pytest.approx(usual, abs=1e-6)
    assert metrics["eval_width"] == rig.VOCABULARY_SIZE
    assert made[0] == 1
    assert made[1] > 1


class Scaled(torch.nn.Linear):
    """A head that does more than a linear one."""


def of_another_head() -> Any:
    student = rig.a_student()
    student.lm_head.__class__ = Scaled
    return student


def without_a_choice() -> Any:
    """Its forward makes all logits."""

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = rig.a_student()
            self.config = self.student.config
            self.base_model = self.student.base_model

        def get_output_embeddings(self) -> Any:
            return self.student.get_output_embeddings()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return self.student(input_ids=input_ids, attention_mask=attention_mask)

    return Whole()


def of_an_unknown_scale() -> Any:
    """What it hands its head is not what its body says."""
    student = rig.a_student()
    student.lm_head.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    return student


def scaled(name: str, value: float) -> Any:
    """A student whose config says what its logits are multiplied by, or divided."""
    student = rig.a_student()
    setattr(student.config, name, value)
    student.lm_head.register_forward_hook(lambda module, given, out: out * 3)
    return student


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_scale", 3.0), ("logits_scaling", 1 / 3), ("lm_head_multiplier", 3.0)],
)
def test_a_scale_of_the_logits_is_read_from_the_config(
    teacher: str, tmp_path: Path, name: str, value: float
) -> None:
    losses = []
    for lean in (False, True):
        student = scaled(name, value)
        trainer = rig.a_trainer(teacher, tmp_path, model=student, loss_from_hidden=lean)
        trainer.train()
        losses += rig.logged(trainer, "loss")

    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("lean", [False, True])
def test_under_autocast_the_step_is_that_of_fp32_but_for_its_products(
    teacher: str, tmp_path: Path, lean: bool
) -> None:
    def step(**settings: Any) -> dict[str, torch.Tensor]:
        student = rig.a_student(torch.float32)
        return rig.step_of(rig.a_trainer(teacher, tmp_path, model=student, **settings))

    wanted, found = step(), step(bf16=True, loss_from_hidden=lean)

    largest = max(float(each.abs().max()) for each in wanted.values())
    for name, each in found.items():
        assert each.dtype == torch.float32
        assert float((each - wanted[name]).abs().max()) < 0.02 * largest


@pytest.mark.parametrize("lean", [False, True])
def test_a_student_that_adds_tokens_of_its_own_is_refused(
    teacher: str, tmp_path: Path, lean: bool
) -> None:
    """As prompt tuning does: nobody knows where its positions are."""

    class Prompted(Adapted):
        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **named: Any
        ) -> Any:
            longer, mask = (
                torch.cat([each[:, :1], each], 1) for each in (input_ids, attention_mask)
            )
            return super().forward(longer, mask, **named)

    trainer = rig.a_trainer(teacher, tmp_path, model=Prompted(), loss_from_hidden=lean)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"adds tokens of its own, as prompt tuning does"):
        trainer.train()


@pytest.mark.parametrize(
    ("student", "says"),
    [
        (of_another_head, r"its head is a \S+\.Scaled, and no plain"),
        (without_a_choice, "takes no logits_to_keep"),
        (of_an_unknown_scale, "in a way that is not known here"),
    ],
)
def test_a_student_whose_logits_are_not_known_to_be_its_heads_is_refused(
    teacher: str, tmp_path: Path, student: Callable[[], Any], says: str
) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, model=student(), loss_from_hidden=True)

    with pytest.raises(ConfigError, match=says):
        trainer.train()

    assert trainer.state.global_step == 0
