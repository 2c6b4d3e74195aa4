"""Where a trainer's student, settings or server do not fit: told before it costs a run."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tests.client.conftest import serve
from tests.client.trainers import trainer_rig as rig
from transformers import TrainerCallback

import teacher_logits_client as tl
from teacher_logits.errors import (
    ConfigError,
    DeadlinePassedError,
    PayloadInvalidError,
    ServerUnreachableError,
    SessionExpiredError,
    SessionRefusedError,
)
from teacher_logits_client.trainers.objective import Objective
from teacher_logits_client.trainers.served_teacher import ServedTeacher, TeacherSettings
from teacher_logits_client.trainers.server_config import check_trainer
from teacher_logits_client.trainers.transformers import TeacherServerConfig

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import LlamaForCausalLM, TrainerControl, TrainerState, TrainingArguments

    from teacher_logits_client.targets import Targets


def a_student_of(ids: int) -> LlamaForCausalLM:
    student = rig.a_student()
    student.resize_token_embeddings(ids, mean_resizing=False)
    return student


# --- vocabulary


def test_a_head_smaller_than_the_teachers_ids_is_refused_before_the_first_step(
    teacher: str, tmp_path: Path
) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, model=a_student_of(200))

    with pytest.raises(SessionRefusedError, match=r"resize_token_embeddings\(256\)") as refused:
        trainer.train()

    assert refused.value.violations[0].rule == "vocab_mismatch"
    assert refused.value.facts == {"student_head_rows": 200, "teacher_vocabulary_size": 256}
    assert trainer.state.global_step == 0


def test_a_head_that_is_padded_trains(teacher: str, tmp_path: Path) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, model=a_student_of(300))

    trainer.train()

    assert rig.logged(trainer, "loss")[0] > 0


def test_truncated_the_teacher_says_no_id_that_the_student_has_not(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = rig.a_trainer(
        teacher, tmp_path, model=a_student_of(200), vocabulary_policy="truncate"
    )
    trainer.train_dataset = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [1, 2, 3, 4, 5, 6]} for _ in range(rig.ROWS)
    ]
    largest: list[int] = []

    class Watched(Objective):
        def sum_and_count(self, logits: Any, targets: Targets, mask: torch.Tensor) -> Any:
            largest.append(int(targets.topk_ids.max()))
            return super().sum_and_count(logits, targets, mask)

    monkeypatch.setattr(TeacherServerConfig, "objective", lambda _: Watched())

    trainer.train()

    assert 100 < max(largest) < 200
    assert rig.logged(trainer, "loss")[0] > 0


def test_a_tokenizer_of_another_size_is_refused_with_the_setting_that_lets_it_pass(
    teacher: str,
) -> None:
    grid = tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    served = ServedTeacher(
        lambda: TeacherSettings(address=teacher),
        lambda: tl.StudentProfile(batch_grid=grid, top_k=4, vocabulary_size=200),
    )

    with pytest.raises(SessionRefusedError, match="give vocabulary_policy='truncate'"):
        served.__enter__()


@pytest.mark.parametrize("lmbda", [0.0, 1.0])
def test_an_id_that_the_student_cannot_read_is_named_with_its_place(
    teacher: str, tmp_path: Path, lmbda: float
) -> None:
    """Padding too: a pad token that was added, and no row for it."""
    trainer = rig.a_trainer(teacher, tmp_path, lmbda=lmbda)

    def padded_beyond(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = rig.collated(rows)
        batch["input_ids"][batch["attention_mask"] == 0] = rig.VOCABULARY_SIZE
        return batch

    trainer.data_collator = padded_beyond

    with pytest.raises(PayloadInvalidError, match=r"id 256 in column .* has 256 rows") as refused:
        trainer.train()

    assert refused.value.facts["id"] == rig.VOCABULARY_SIZE


# --- steps that count nothing


def all_masked(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    batch = rig.collated(rows)
    batch["labels"].fill_(rig.IGNORED)
    return batch


def test_steps_without_a_label_are_warned_of_once(
    teacher: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, max_steps=3, per_device_train_batch_size=2)
    trainer.data_collator = all_masked

    with caplog.at_level(logging.WARNING, "teacher_logits_client"):
        trainer.train()
        trainer.evaluate()

    warned = [each for each in caplog.messages if "all labels are -100" in each]
    assert [each.split(" counts")[0] for each in warned] == [
        "no position of a whole training step",
        "no position of a whole evaluation",
    ]


def test_a_micro_batch_without_a_label_in_a_step_with_some_is_nothing_to_warn_of(
    teacher: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = rig.a_trainer(
        teacher, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    made: list[int] = []

    def masked_first(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        made.append(len(rows))
        return all_masked(rows) if len(made) == 1 else rig.collated(rows)

    trainer.data_collator = masked_first

    with caplog.at_level(logging.WARNING, "teacher_logits_client"):
        trainer.train()

    assert len(made) == 2
    assert not [each for each in caplog.messages if "counts" in each]


# --- settings


def test_generation_with_shards_of_the_weights_alone_is_refused(tmp_path: Path) -> None:
    trainer = rig.a_trainer("unix:/x", tmp_path, lmbda=0.1)
    trainer.is_fsdp_enabled = True

    with pytest.raises(ConfigError, match="lmbda above 0 where ranks have shards"):
        check_trainer(trainer, trainer.args)


def test_a_student_with_an_encoder_of_its_own_is_refused(tmp_path: Path) -> None:
    trainer = rig.a_trainer("unix:/x", tmp_path)
    trainer.model.config.is_encoder_decoder = True  # type: ignore[union-attr]

    with pytest.raises(ConfigError, match="an encoder and a decoder"):
        check_trainer(trainer, trainer.args)


def test_a_server_that_is_not_there_is_waited_for_no_longer_than_told(tmp_path: Path) -> None:
    trainer = rig.a_trainer(f"unix:{tmp_path}/none", tmp_path, teacher_timeout=0.2)

    with pytest.raises(ServerUnreachableError) as gone:
        trainer.train()

    assert gone.value.facts["deadline_seconds"] == 0.2


# --- the server goes


def test_a_teacher_that_does_not_answer_ends_the_run_by_its_deadline(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        service.teacher.gate.clear()
        trainer = rig.a_trainer(service.address, tmp_path)
        try:
            with trainer.teacher:  # which it had all the time to find
                trainer.args.teacher_timeout = 0.2
                with pytest.raises(DeadlinePassedError):
                    trainer.train()
        finally:
            service.teacher.gate.set()


class EndsTheTeacher(TrainerCallback):
    """Ends a server behind the third step, with what it was asked ahead."""

    def __init__(self, server: ExitStack) -> None:
        self.server = server

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: object,
    ) -> None:
        if state.global_step == 3:
            self.server.close()


def test_a_run_whose_server_went_is_resumed_as_if_it_had_not(teacher: str, tmp_path: Path) -> None:
    """Half of its batches are continued by the student; three of eight rows are a step, or two."""
    settings: dict[str, Any] = {
        "max_steps": 5,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "save_steps": 1,
        "lmbda": 0.5,
        "max_new_tokens": 3,
    }
    with ExitStack() as server:
        address = server.enter_context(serve(tmp_path)).address
        cut = rig.a_trainer(address, tmp_path, save_strategy="steps", **settings)
        cut.add_callback(EndsTheTeacher(server))
        with pytest.raises(SessionExpiredError, match="stopped or restarted"):
            cut.train()
    whole = rig.a_trainer(teacher, tmp_path / "whole", **settings)
    whole.train()

    resumed = rig.a_trainer(teacher, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)

    assert resumed.state.global_step == 5
    assert resumed.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], abs=1e-9)
