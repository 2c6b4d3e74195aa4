"""`trainers.transformers`: real training against a real server (reports R20, R21, R23, R48)."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from tests import forked
from tests.client.conftest import serve
from tests.client.trainers import trainer_ranks
from tests.client.trainers import trainer_rig as rig

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError, RequestInvalidError, SessionRefusedError
from teacher_logits_client.trainers.transformers import TeacherServerConfig, TeacherServerTrainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import EvalPrediction

    from teacher_logits_client.trainers.served_teacher import Request


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(8, 1), (2, 4), (3, 3), (1, 8)])
def test_r20_the_gradient_is_that_of_one_batch_however_it_is_cut(
    teacher: str, tmp_path: Path, micro_batch: int, accumulation: int
) -> None:
    loss, wanted = rig.reference(teacher)
    trainer = rig.a_trainer(
        teacher,
        tmp_path,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
    )

    found = rig.step_of(trainer)

    rig.assert_same(found, wanted)
    assert rig.logged(trainer, "loss") == [pytest.approx(loss, abs=1e-6)]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_r23_a_student_learns_at_every_beta(teacher: str, tmp_path: Path, beta: float) -> None:
    student = rig.a_student()
    descent = torch.optim.Adam(student.parameters(), lr=0.02)
    trainer = rig.a_trainer(
        teacher, tmp_path, beta=beta, max_steps=12, model=student, descent=descent
    )

    trainer.train()

    first, *_, last = rig.logged(trainer, "loss")
    assert last < 0.8 * first


def test_r21_gradients_of_ragged_rows_are_finite_in_reverse_kl(
    teacher: str, tmp_path: Path
) -> None:
    found = rig.step_of(
        rig.a_trainer(teacher, tmp_path, beta=1.0, model=rig.a_student(torch.float32))
    )

    assert all(bool(each.isfinite().all()) for each in found.values())
    assert any(bool(each.any()) for each in found.values())


def test_another_teacher_makes_another_loss(teacher: str, tmp_path: Path) -> None:
    right = rig.a_trainer(teacher, tmp_path)
    right.train()

    with serve(tmp_path) as service:
        service.teacher.spoil = torch.neg
        wrong = rig.a_trainer(service.address, tmp_path)
        wrong.train()

    assert abs(rig.logged(right, "loss")[0] - rig.logged(wrong, "loss")[0]) > 0.01


@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_evaluation_is_the_mean_over_its_tokens_whatever_its_batches(
    teacher: str, tmp_path: Path, size: int
) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, per_device_eval_batch_size=size)
    trainer.train_dataset = rig.some_rows(5)  # one step over them is on the same scale

    before = trainer.evaluate()["eval_loss"]
    trainer.train()

    assert rig.logged(trainer, "loss")[0] == pytest.approx(before, abs=1e-6)


def test_the_evaluation_hands_out_logits_for_metrics_of_ones_own(
    teacher: str, tmp_path: Path
) -> None:
    seen: list[tuple[int, ...]] = []
    trainer = rig.a_trainer(teacher, tmp_path, per_device_eval_batch_size=2)

    def compute_metrics(both: EvalPrediction) -> dict[str, float]:
        assert not isinstance(both.predictions, tuple)
        seen.append(both.predictions.shape)
        return {"rows": 5.0}

    trainer.compute_metrics = compute_metrics

    metrics = trainer.evaluate()

    assert [(shape[0], shape[-1]) for shape in seen] == [(5, rig.VOCABULARY_SIZE)]
    assert metrics["eval_rows"] == 5.0


def test_scores_of_the_next_batches_are_asked_for_before_the_students_forward(
    teacher: str, tmp_path: Path
) -> None:
    trainer = rig.a_trainer(
        teacher,
        tmp_path,
        max_steps=4,
        per_device_train_batch_size=2,
        teacher_prefetch=2,
    )
    asked: list[int] = []
    asked_by_then: list[int] = []
    send = trainer.teacher._send

    def sending(request: Request) -> None:
        if request.future is None:
            asked.append(request.number)
        send(request)

    trainer.teacher._send = sending  # type: ignore[method-assign]
    assert trainer.model is not None
    trainer.model.register_forward_pre_hook(lambda *_: asked_by_then.append(len(asked)))

    trainer.train()

    assert asked_by_then == [3, 4, 4, 4]
    assert asked == [1, 2, 3, 4]


def test_on_policy_batches_are_the_students_own(teacher: str, tmp_path: Path) -> None:
    trainer = rig.a_trainer(
        teacher,
        tmp_path,
        lmbda=1.0,
        max_new_tokens=5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    seen: list[dict[str, torch.Tensor]] = []
    assert trainer.model is not None
    trainer.model.register_forward_pre_hook(
        lambda module, _, given: seen.append(given) if module.training else None, with_kwargs=True
    )

    trainer.train()

    prompts = {tuple(row["input_ids"][:2]) for row in rig.some_rows()}
    rows = [row for batch in seen for row in batch["input_ids"].tolist()]
    assert {tuple(row[:2]) for row in rows} == prompts
    assert all(len(row) <= 2 + 5 for row in rows)
    assert rig.logged(trainer, "loss")[0] > 0


def test_r48_a_prompt_that_only_the_teacher_sees_leaves_positions_where_they_are(
    teacher: str, tmp_path: Path
) -> None:
    """Its 17 tokens change what the teacher says, and none of the student's shapes."""
    plain = rig.a_trainer(teacher, tmp_path)
    plain.train()
    told = rig.a_trainer(teacher, tmp_path)
    told.data_collator = lambda rows: {
        **rig.collated(rows),
        "teacher_prefix_ids": [list(range(17)) for _ in rows],
    }

    told.train()

    assert rig.logged(told, "loss") != pytest.approx(rig.logged(plain, "loss"), abs=1e-3)


@pytest.mark.parametrize("collate", [rig.packed, rig.on_the_left])
def test_packed_or_padded_on_the_left_they_are_the_same_rows(
    teacher: str, tmp_path: Path, collate: Callable[..., dict[str, torch.Tensor]]
) -> None:
    loss, wanted = rig.reference(teacher)
    trainer = rig.a_trainer(teacher, tmp_path)
    trainer.data_collator = collate

    found = rig.step_of(trainer)

    assert rig.logged(trainer, "loss") == [pytest.approx(loss, abs=1e-6)]
    rig.assert_same(found, wanted)


def test_nothing_of_the_teacher_is_left_open(teacher: str, tmp_path: Path) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, max_steps=2, per_device_train_batch_size=2)
    trainer.train()

    with pytest.raises(RequestInvalidError, match=r"with trainer\.teacher"):
        _ = trainer.teacher.session


def test_a_teacher_without_the_wanted_k_refuses_before_the_first_step(
    teacher: str, tmp_path: Path
) -> None:
    trainer = rig.a_trainer(teacher, tmp_path, top_k=1 << 20)

    with pytest.raises(SessionRefusedError, match="top_k"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"teacher_server": None}, "teacher_server is not given"),
        ({"beta": 1.5}, "beta is 1.5"),
        ({"lmbda": -0.1}, "lmbda is -0.1"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"teacher_prefetch": -1}, "teacher_prefetch is -1"),
        ({"top_k": None}, "top_k is None"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 16.0}, "top_k is 16.0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"vocabulary_policy": "cut"}, "vocabulary_policy is 'cut': give 'strict', or 'truncate'"),
        ({"teacher_timeout": -1.0}, "teacher_timeout has a timeout of -1.0 s"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(
    tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    usual: dict[str, object] = {"output_dir": str(tmp_path), "teacher_server": "unix:/x"}

    with pytest.raises(ConfigError, match=said):
        TeacherServerConfig(**{**usual, **settings})  # type: ignore[arg-type]


def test_another_loss_beside_the_teachers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="label_smoothing_factor"):
        rig.a_trainer("unix:/x", tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="give a TeacherServerConfig"):
        TeacherServerTrainer(model=rig.a_student())


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_a_package_that_is_not_here_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    room = "teacher_logits_client.trainers"
    for module in ("server_config", "transformers", "trl", "trl_config"):
        monkeypatch.delitem(sys.modules, f"{room}.{module}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match=rf"pip install 'teacher-logits\[{name}\]'"):
        importlib.import_module(f"{room}.{name}")


def test_r20_two_ranks_take_the_step_of_one(teacher: str, tmp_path: Path) -> None:
    """DistributedDataParallel over gloo, two cuts; the evaluation has a row that comes twice."""
    loss, wanted = rig.reference(teacher)
    command = [sys.executable, "-m", "tests.client.trainers.trainer_ranks", teacher, str(tmp_path)]
    done = forked.run(command, timeout=250)
    assert done.returncode == 0, done.stderr
    alone = rig.a_trainer(teacher, tmp_path).evaluate()["eval_loss"]

    for rank in range(2):
        results = torch.load(tmp_path / f"rank-{rank}.pt")
        for found in results.values():
            rig.assert_same(found["step"], wanted)
            assert found["loss"] == pytest.approx(loss, abs=1e-6)
            assert found["evaluated"] == pytest.approx(alone, abs=1e-6)
        assert len(results) == len(trainer_ranks.CUTS)


def test_a_session_is_that_of_the_trainers_grid(teacher: str, tmp_path: Path) -> None:
    trainer = rig.a_trainer(
        teacher, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )

    with trainer.teacher as served:
        grid = served.session.profile.batch_grid

    assert grid == tl.BatchGrid(global_batch_size=8, data_parallel_size=1, micro_batch_size=2)
