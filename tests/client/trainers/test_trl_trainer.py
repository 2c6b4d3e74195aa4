"""`trainers.trl`: TRL's own distillation trained against a served teacher (reports R20, R23)."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.trainers import trainer_rig as rig

from teacher_logits.errors import ConfigError, ServerUnreachableError, SessionRefusedError
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines.transformers import load_engine

pytest.importorskip("trl")

from tests.client.losses.losses_by_definition import normal
from tests.client.trainers import trl_rig
from transformers import TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDTrainer
from trl.trainer.utils import RepeatSampler

from teacher_logits_client.targets import ABSENT_LOGPROB, Targets
from teacher_logits_client.trainers.epoch_order import EpochOrder
from teacher_logits_client.trainers.trl import (
    ServerDistillationConfig,
    ServerDistillationTrainer,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from teacher_logits_client.trainers.served_teacher import Request

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


config_of: Callable[..., ServerDistillationConfig] = ServerDistillationConfig


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


def test_r23_served_it_is_what_trl_computes_with_the_teacher_in_the_process(
    tmp_path: Path,
) -> None:
    """With K of the whole vocabulary, at another temperature; the payload is fp16."""
    model = rig.a_student(torch.float32)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(tmp_path / "teacher")
    common = trl_rig.settings_of(
        tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2, temperature=0.8
    )
    engine = load_engine(str(tmp_path / "teacher"), device="cpu")
    with serve_in_thread(ServerConfig(listen=(f"unix:{tmp_path}/s",)), engine) as server:
        trained = []
        for kind in (DistillationTrainer, ServerDistillationTrainer):
            if kind is DistillationTrainer:
                own = {"teacher_model": model}
                args = DistillationConfig(**common, beta=0.5)
            else:
                own = {}
                args = config_of(**common, beta=0.5, teacher_server=server.address, loss_top_k=256)
            trainer = kind(
                model=rig.a_student(torch.float32),
                args=args,
                train_dataset=trl_rig.prompts(),
                processing_class=trl_rig.a_tokenizer(),
                **own,
            )
            trainer.train()
            trained.append((rig.logged(trainer, "loss")[0], rig.logged(trainer, "grad_norm")[0]))
    theirs, ours = trained
    assert ours == pytest.approx(theirs, rel=5e-3)
    assert theirs[0] > 0.01


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_r23_the_loss_and_its_gradient_are_those_of_trls_dense_one(
    beta: float, temperature: float
) -> None:
    """In float64, with K of the whole vocabulary."""
    teacher, student = (3 * normal(9, 40, seed=each) for each in (1, 2))
    counted = torch.arange(9) % 3 > 0
    theirs = student.clone().requires_grad_()
    GKDTrainer.generalized_jsd_loss(
        theirs[None],
        teacher[None],
        labels=torch.where(counted, 1, -100)[None],
        beta=beta,
        temperature=temperature,
    ).backward()
    wanted = GKDTrainer.generalized_jsd_loss(
        student[None, counted], teacher[None, counted], beta=beta, temperature=temperature
    )
    logprobs, ids = (teacher / temperature).log_softmax(-1).sort(-1, descending=True)
    targets = Targets(
        topk_ids=ids.int(),
        topk_logprobs=logprobs,
        log_tail=torch.full((9,), ABSENT_LOGPROB, dtype=torch.float64),
        actual_logprob=None,
        valid=torch.ones(9, dtype=torch.bool),
        temperature=temperature,
        row_offsets=torch.tensor([0, 9]),
    )
    config = config_of(output_dir="x", teacher_server="unix:/x", use_cpu=True, bf16=False)
    config.beta, config.temperature = beta, temperature

    ours = student.clone().requires_grad_()
    loss_sum, count = config.objective().sum_and_count(ours, targets, counted)
    (loss_sum / count).backward()

    # Theirs is a mean over rows where no label says how many tokens there are.
    assert float(loss_sum.detach()) == pytest.approx(float(wanted), rel=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_from_hidden_states_or_a_model_that_makes_all_logits_it_is_the_same_step(
    teacher: str, tmp_path: Path, beta: float
) -> None:
    wanted = rig.step_of(trl_rig.a_trainer(teacher, tmp_path, beta=beta))
    lean = trl_rig.a_trainer(teacher, tmp_path, beta=beta, loss_from_hidden=True)
    whole = trl_rig.a_trainer(teacher, tmp_path, beta=beta)
    whole.model_kwarg_keys = []  # so that nothing is said of the logits to keep
    made: dict[str, list[int]] = {"lean": [], "whole": []}
    for name, trainer in (("lean", lean), ("whole", whole)):
        trainer.model.lm_head.register_forward_hook(
            lambda module, given, out, at=made[name]: (
                at.append(out.shape[1]) if torch.is_grad_enabled() else None
            )
        )

        rig.assert_same(rig.step_of(trainer), wanted)

    assert made["lean"] == [1]
    assert made["whole"][0] > trl_rig.COMPLETION + 1


class Interrupts(TrainerCallback):
    """As a user does, in the middle of a step."""

    def on_substep_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: object,
    ) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_a_run_that_was_cut_in_its_second_epoch_is_resumed_as_if_it_had_not(
    teacher: str, tmp_path: Path
) -> None:
    """TRL's own begins the first epoch's order again; two steps are an epoch here."""
    settings = {
        "max_steps": 5,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "generation_kwargs": {},
    }
    whole = trl_rig.a_trainer(teacher, tmp_path / "whole", **settings)
    whole.train()
    cut = trl_rig.a_trainer(teacher, tmp_path, **settings)
    cut.add_callback(Interrupts)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    cut.remove_callback(Interrupts)
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "again" / "checkpoint-3")

    cut.train(resume_from_checkpoint=True)
    resumed = trl_rig.a_trainer(teacher, tmp_path / "again", **settings)
    resumed.train(resume_from_checkpoint=True)

    assert rig.logged(cut, "loss") == rig.logged(whole, "loss")
    assert rig.logged(resumed, "loss") == rig.logged(whole, "loss")


def test_the_order_of_an_epoch_is_that_of_trl_whichever_is_the_first() -> None:
    def sampler() -> RepeatSampler:
        return RepeatSampler(range(9), mini_repeat_count=1, batch_size=2, repeat_count=2, seed=7)

    theirs = sampler()
    orders = [list(theirs) for _ in range(3)]

    for epoch, order in enumerate(orders):
        ours = EpochOrder(sampler(), lambda epoch=epoch: epoch)  # type: ignore[misc]
        assert (list(ours), len(ours)) == (order, len(theirs))
    assert orders[0] != orders[1] != orders[2]


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


def test_a_step_is_divided_by_its_count_to_the_last_position(tmp_path: Path) -> None:
    """Whatever floats torch makes of whole numbers: bfloat16 has no 257."""
    trainer = trl_rig.a_trainer("unix:/x", tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        divisor = trainer._divisor({"num_items_in_batch": torch.tensor(257)}, torch.tensor(100))
    finally:
        torch.set_default_dtype(torch.float32)

    assert float(divisor) == 257


def test_what_is_set_after_the_trainer_was_made_holds(teacher: str, tmp_path: Path) -> None:
    """TRL's loss has the trainer's own beta."""
    trainer = trl_rig.a_trainer("unix:/x", tmp_path)
    trainer.args.teacher_server, trainer.beta = teacher, 0.0
    trainer.train()
    wanted = trl_rig.a_trainer(teacher, tmp_path, beta=0.0)
    wanted.train()

    assert rig.logged(trainer, "loss") == rig.logged(wanted, "loss")


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
    """The evaluation is of three prompts, of which one comes twice."""
    loss, wanted = trl_rig.reference(teacher, beta=0.5)
    command = [
        sys.executable,
        "-m",
        "tests.client.trainers.trainer_ranks",
        teacher,
        str(tmp_path),
        "trl",
    ]
    subprocess.run(command, check=True, timeout=160)

    alone = trl_rig.a_trainer(teacher, tmp_path)
    alone.eval_dataset = trl_rig.prompts(3)
    evaluated = alone.evaluate()["eval_loss"]

    for rank in range(2):
        for found in torch.load(tmp_path / f"rank-{rank}.pt").values():
            rig.assert_same(found["step"], wanted)
            assert found["loss"] == pytest.approx(loss, abs=1e-6)
            assert found["evaluated"] == pytest.approx(evaluated, abs=1e-6)
