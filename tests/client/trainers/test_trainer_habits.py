"""What people do with a `Trainer` beside: streams, models of their own, settings in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.client.trainers import trainer_rig as rig
from torch.utils.data import IterableDataset
from transformers import HfArgumentParser, Trainer

from teacher_logits.errors import ConfigError
from teacher_logits_client.trainers.on_policy import Coin
from teacher_logits_client.trainers.transformers import (
    PREFIXES,
    TeacherServerConfig,
    TeacherServerTrainer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Stream(IterableDataset[dict[str, list[int]]]):
    """Rows of which nobody knows how many there are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(rig.some_rows(self.count))


def test_a_stream_whose_last_step_is_short_takes_no_step_of_twice_the_weight(
    teacher: str, tmp_path: Path
) -> None:
    """Three micro batches an epoch, two a step: the third would add its own mean to the fourth's
    and the fifth's."""
    trainer = rig.a_trainer(
        teacher,
        tmp_path,
        max_steps=3,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
    )
    trainer.train_dataset = Stream(8)

    trainer.train()

    first, second, third = rig.logged(trainer, "loss")
    assert second < 1.2 * first
    assert third < 1.2 * first


def test_a_stream_that_is_shorter_than_a_step_is_refused(teacher: str, tmp_path: Path) -> None:
    trainer = rig.a_trainer(
        teacher, tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2
    )
    trainer.train_dataset = Stream(2)

    with pytest.raises(ConfigError, match="an epoch has 1 micro batches, and a step takes 2"):
        trainer.train()


class OfOnesOwn(torch.nn.Module):
    """A model whose forward takes no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.student = rig.a_student()
        self.config = self.student.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.student(input_ids=input_ids, attention_mask=attention_mask)


def test_a_model_that_takes_no_labels_is_trained_and_evaluated_alike(
    teacher: str, tmp_path: Path
) -> None:
    own = rig.a_trainer(teacher, tmp_path, model=OfOnesOwn())  # type: ignore[arg-type]
    usual = rig.a_trainer(teacher, tmp_path)

    assert own.evaluate()["eval_loss"] == pytest.approx(usual.evaluate()["eval_loss"], abs=1e-9)
    own.train()
    usual.train()
    assert rig.logged(own, "loss") == rig.logged(usual, "loss")


def test_a_model_that_answers_with_a_tuple_hands_out_its_logits_for_metrics(
    teacher: str, tmp_path: Path
) -> None:
    class Plain(OfOnesOwn):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return (super().forward(input_ids, attention_mask)["logits"],)

    usual = rig.a_trainer(teacher, tmp_path).evaluate()["eval_loss"]
    trainer = rig.a_trainer(teacher, tmp_path, model=Plain())  # type: ignore[arg-type]
    shown: Any = trainer
    shown.compute_metrics = lambda both: {"width": both.predictions.shape[-1]}

    metrics = trainer.evaluate()

    assert metrics["eval_width"] == rig.VOCABULARY_SIZE
    assert metrics["eval_loss"] == pytest.approx(usual, abs=1e-9)


def test_workers_that_load_the_batches_change_nothing(teacher: str, tmp_path: Path) -> None:
    """They are forked while leases are open, and outlive an epoch and an evaluation."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    usual = rig.a_trainer(teacher, tmp_path, **settings)
    usual.train()
    trainer = rig.a_trainer(
        teacher,
        tmp_path,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        **settings,
    )
    trainer.train()

    for name in ("loss", "eval_loss"):
        assert rig.logged(trainer, name) == rig.logged(usual, name)


def test_completions_are_samples_of_the_student_whatever_its_generation_config(
    teacher: str, tmp_path: Path
) -> None:
    """That of a chat model cuts the distribution and bends it; any may answer with other rows."""
    seen = []
    bent = {"top_p": 1e-6, "repetition_penalty": 9.0, "min_p": 0.9, "sequence_bias": [[[5], 9.0]]}
    other = {"num_return_sequences": 2, "return_dict_in_generate": True, "stop_strings": ["a"]}
    for settings in ({}, {**bent, **other}):
        student = rig.a_student()
        for name, value in settings.items():
            setattr(student.generation_config, name, value)
        rows: list[list[list[int]]] = []
        student.register_forward_pre_hook(
            lambda module, _, given, rows=rows: (
                rows.append(given["input_ids"].tolist()) if module.training else None
            ),
            with_kwargs=True,
        )
        rig.a_trainer(teacher, tmp_path, model=student, lmbda=1.0, max_new_tokens=5).train()
        seen.append(rows)
        assert all(getattr(student.generation_config, name) == settings[name] for name in settings)

    assert seen[0] == seen[1]


def test_what_is_set_after_the_trainer_was_made_holds(teacher: str, tmp_path: Path) -> None:
    """As a search over hyperparameters sets them, and whoever has a server at another address."""
    trainer = rig.a_trainer("unix:/x", tmp_path, max_new_tokens=3)
    later: dict[str, Any] = {
        "teacher_server": teacher,
        "beta": 1.0,
        "temperature": 2.0,
        "lmbda": 1.0,
    }
    for name, value in later.items():
        setattr(trainer.args, name, value)
    trainer.train()
    wanted = rig.a_trainer(teacher, tmp_path, max_new_tokens=3, **later)
    wanted.train()

    assert rig.logged(trainer, "loss") == rig.logged(wanted, "loss")


def test_what_makes_no_sense_is_refused_though_it_was_set_later(tmp_path: Path) -> None:
    trainer = rig.a_trainer("unix:/x", tmp_path)
    trainer.args.lmbda = 1.5

    with pytest.raises(ConfigError, match=r"lmbda is 1\.5"):
        trainer.train()


def test_a_compute_loss_of_ones_own_need_not_hand_on_the_count(
    teacher: str, tmp_path: Path
) -> None:
    class Own(TeacherServerTrainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **others: Any) -> Any:
            return super().compute_loss(model, inputs)

    trainer = rig.a_trainer(
        teacher, tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=3
    )
    trainer.__class__ = Own

    rig.assert_same(rig.step_of(trainer), rig.reference(teacher)[1])


def test_metrics_of_ones_own_may_predict_on_other_rows(teacher: str, tmp_path: Path) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, per_device_eval_batch_size=2)
    wanted = trainer.evaluate()["eval_loss"]
    others: list[float] = []

    def metrics(_: object) -> dict[str, float]:
        if not others:
            others.append(0.0)
            others.append(trainer.predict(rig.some_rows(3)).metrics["test_loss"])  # type: ignore[index,arg-type]
        return {}

    trainer.compute_metrics = metrics

    assert trainer.evaluate()["eval_loss"] == wanted
    trainer.compute_metrics = None
    trainer.eval_dataset = rig.some_rows(3)
    assert trainer.evaluate()["eval_loss"] == others[1]


def test_a_step_is_divided_by_its_count_to_the_last_position(tmp_path: Path) -> None:
    """Whatever floats torch makes of whole numbers: bfloat16 has no 257."""
    trainer = rig.a_trainer("unix:/x", tmp_path)
    loss_sum, count = torch.tensor(514.0), torch.tensor(257)
    torch.set_default_dtype(torch.bfloat16)
    try:
        divisor = trainer._divisor(loss_sum, torch.tensor(100), count)
    finally:
        torch.set_default_dtype(torch.float32)

    assert float(loss_sum / divisor) == 2.0


def test_a_run_begun_again_with_smaller_batches_counts_them_from_the_first(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto_find_batch_size` does so inside of one `train`."""
    trainer = rig.a_trainer(
        teacher, tmp_path, per_device_train_batch_size=4, auto_find_batch_size=True, lmbda=1e-9
    )
    tosses: list[int] = []
    steps: list[int] = []

    def toss(_: Coin, number: int) -> bool:
        tosses.append(number)
        return False

    def take_step(self: Any, *given: Any) -> Any:
        steps.append(len(given[1]["input_ids"]))
        if len(steps) == 1:
            tosses.clear()
            raise RuntimeError("CUDA out of memory.")
        return Trainer.training_step(self, *given)

    monkeypatch.setattr(Coin, "toss", toss)
    monkeypatch.setattr(TeacherServerTrainer, "training_step", take_step, raising=False)

    trainer.train()

    assert steps == [4, 3]
    assert tosses[0] == 0


def test_a_column_of_prompts_that_only_the_teacher_sees_is_no_unused_one(tmp_path: Path) -> None:
    rows = [{**row, PREFIXES: [7, 8], "title": "a"} for row in rig.some_rows()]
    trainer = rig.a_trainer("unix:/x", tmp_path)
    trainer.train_dataset = rows
    seen: set[str] = set()

    def noted(some: list[Any]) -> Any:
        seen.update(*some)
        return rig.collated(some)

    trainer.data_collator = noted

    next(iter(trainer.get_train_dataloader()))

    assert seen == {"input_ids", "labels", PREFIXES}


def test_settings_go_to_files_and_come_from_the_command_line(tmp_path: Path) -> None:
    parse: Any = HfArgumentParser(TeacherServerConfig)  # type: ignore[arg-type]
    words = "--teacher_server unix:/x --top_k 8 --beta 1 --add_tail false --teacher_timeout 5"

    (config,) = parse.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *words.split()])
    (tmp_path / "config.json").write_text(config.to_json_string())
    (again,) = parse.parse_json_file(str(tmp_path / "config.json"))

    assert (config.top_k, config.beta, config.add_tail, config.teacher_timeout) == (8, 1, False, 5)
    assert again.to_dict() == config.to_dict()
