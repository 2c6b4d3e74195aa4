"""`trainers.trl`: TRL's own distillation trained against a served teacher (reports R20, R23)."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client import trainer_rig as rig

from teacher_logits.errors import ConfigError, ServerUnreachableError, SessionRefusedError
from teacher_logits_client import testing

pytest.importorskip("trl")

from tests.client import trl_rig
from trl import DistillationConfig, DistillationTrainer

from teacher_logits_client.trainers.trl import (
    ServerDistillationConfig,
    ServerDistillationTrainer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from teacher_logits_client.trainers.served_teacher import Request

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


config_of: Callable[..., ServerDistillationConfig] = ServerDistillationConfig


@pytest.fixture(scope="module")
def teacher() -> Iterator[str]:
    """The address of a server whose teacher scores each row by itself, to the same bits."""
    with testing.serve() as server:
        yield server.address


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_r20_the_gradient_is_that_of_one_batch_however_it_is_cut(
    teacher: str, tmp_path: Path, micro_batch: int, accumulation: int
) -> None:
    loss, wanted = trl_rig.reference(teacher, beta=0.5)
    trainer = trl_rig.a_trainer(
        teacher,
        tmp_path,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
    )

    found = rig.step_of(trainer)

    rig.assert_same(found, wanted)
    assert rig.logged(trainer, "loss") == [pytest.approx(loss, abs=1e-6)]


def test_r23_served_at_any_beta_it_is_what_trl_computes_with_the_teacher_in_the_process(
    tmp_path: Path,
) -> None:
    """With K of the whole vocabulary, at another temperature too; the payload is fp16."""
    model = rig.a_student(torch.float32)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(tmp_path / "teacher")
    common = trl_rig.settings_of(
        tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2, temperature=0.8
    )
    with testing.serve(tmp_path / "teacher") as server:
        for beta in (0.0, 0.5, 1.0):
            trained = []
            for kind in (DistillationTrainer, ServerDistillationTrainer):
                if kind is DistillationTrainer:
                    own = {"teacher_model": model}
                    args = DistillationConfig(**common, beta=beta)
                else:
                    own = {}
                    args = config_of(
                        **common, beta=beta, teacher_server=server.address, loss_top_k=256
                    )
                trainer = kind(
                    model=rig.a_student(torch.float32),
                    args=args,
                    train_dataset=trl_rig.prompts(),
                    processing_class=trl_rig.a_tokenizer(),
                    **own,
                )
                trainer.train()
                trained.append(
                    (rig.logged(trainer, "loss")[0], rig.logged(trainer, "grad_norm")[0])
                )
            theirs, ours = trained
            assert ours == pytest.approx(theirs, rel=5e-3)
            assert theirs[0] > 0.01


def test_another_teacher_makes_another_loss(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = (trl_rig.a_trainer(teacher, tmp_path) for _ in range(2))
    right.train()
    place = wrong._objective.sum_and_count

    def of_others(logits: object, targets: object, mask: object) -> object:
        ids = (targets.topk_ids + 1) % rig.VOCABULARY_SIZE  # type: ignore[attr-defined]
        targets.topk_ids.copy_(ids)  # type: ignore[attr-defined]
        return place(logits, targets, mask)  # type: ignore[arg-type]

    monkeypatch.setattr(
        type(wrong._objective), "sum_and_count", lambda _, *given: of_others(*given)
    )
    wrong.train()

    assert abs(rig.logged(right, "loss")[0] - rig.logged(wrong, "loss")[0]) > 1e-4


def test_all_of_a_step_is_asked_for_before_the_students_first_forward(
    teacher: str, tmp_path: Path
) -> None:
    trainer = trl_rig.a_trainer(
        teacher, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    sent: list[int] = []
    sent_by_then: list[int] = []
    send = trainer.teacher._send

    def sending(request: Request) -> None:
        if request.future is None:
            sent.append(request.number)
        send(request)

    trainer.teacher._send = sending  # type: ignore[method-assign]
    # Generation runs the model as well, without training it.
    trainer.model.register_forward_pre_hook(
        lambda *_: sent_by_then.append(len(sent)) if torch.is_grad_enabled() else None
    )

    trainer.train()

    assert sent_by_then == [4, 4, 4, 4]


@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_is_the_mean_over_its_tokens_whatever_its_batches(
    teacher: str, tmp_path: Path, size: int
) -> None:
    loss, _ = trl_rig.reference(teacher, beta=0.5)
    trainer = trl_rig.a_trainer(teacher, tmp_path, per_device_eval_batch_size=size)

    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-6)


def test_a_teacher_of_ones_own_beside_the_served_one_is_refused(tmp_path: Path) -> None:
    args = config_of(**trl_rig.settings_of(tmp_path), teacher_server="unix:/x")

    with pytest.raises(ConfigError, match="teacher_model is given"):
        ServerDistillationTrainer(model=rig.a_student(), args=args, teacher_model=rig.a_student())
    with pytest.raises(ConfigError, match="give a ServerDistillationConfig"):
        ServerDistillationTrainer(model=rig.a_student())
    with pytest.raises(ConfigError, match="teacher_server is not given"):
        config_of(**trl_rig.settings_of(tmp_path))


def test_a_head_smaller_than_the_teachers_ids_is_refused_before_the_first_step(
    teacher: str, tmp_path: Path
) -> None:
    trainer = trl_rig.a_trainer(teacher, tmp_path)
    trainer.model.resize_token_embeddings(200)

    with pytest.raises(SessionRefusedError, match="200 rows, and the teacher has 256 ids"):
        trainer.train()


def test_the_ids_a_position_are_called_as_the_setting_is(teacher: str, tmp_path: Path) -> None:
    """``top_k`` is TRL's filter of the student's sampling."""
    trainer = trl_rig.a_trainer(teacher, tmp_path, loss_top_k=300)

    with pytest.raises(SessionRefusedError, match=r"top_k_too_large: loss_top_k is 300;"):
        trainer.train()
    with pytest.raises(ConfigError, match="loss_top_k is None"):
        config_of(**trl_rig.settings_of(tmp_path), teacher_server="unix:/x", loss_top_k=None)


def test_a_server_that_is_not_there_is_waited_for_no_longer_than_told(tmp_path: Path) -> None:
    trainer = trl_rig.a_trainer(f"unix:{tmp_path}/none", tmp_path, teacher_timeout=0.2)

    with pytest.raises(ServerUnreachableError, match=r"within 0\.2 s"):
        trainer.train()


def test_a_step_without_a_token_of_the_students_is_warned_of(
    teacher: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trl_rig.a_trainer(teacher, tmp_path)
    generated = trainer._generate_and_score_completions

    def none_counts(inputs: object) -> dict[str, object]:
        made: dict[str, torch.Tensor] = generated(inputs)
        none = torch.zeros_like(made["completion_mask"])
        return {**made, "tool_mask": none, "num_items_in_batch": none.sum()}

    trainer._generate_and_score_completions = none_counts

    with caplog.at_level(logging.WARNING, "teacher_logits_client"):
        trainer.train()

    assert [each for each in caplog.messages if "no position of a whole training step" in each]


@pytest.mark.slow
def test_r20_two_ranks_take_the_step_of_one(teacher: str, tmp_path: Path) -> None:
    loss, wanted = trl_rig.reference(teacher, beta=0.5)
    command = [sys.executable, "-m", "tests.client.trainer_ranks", teacher, str(tmp_path), "trl"]
    subprocess.run(command, check=True, timeout=160)

    for rank in range(2):
        for found in torch.load(tmp_path / f"rank-{rank}.pt").values():
            rig.assert_same(found["step"], wanted)
            assert found["loss"] == pytest.approx(loss, abs=1e-6)
