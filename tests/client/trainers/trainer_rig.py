"""What the tests of trainers share: a student small enough to check by hand, rows, a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import teacher_logits_client as tl
from teacher_logits_client import losses

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import Trainer

    from teacher_logits_client.trainers.transformers import TeacherServerTrainer

VOCABULARY_SIZE, ROWS, K = 256, 8, 16
IGNORED = -100


def a_student(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """A Llama of one layer, the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    student: LlamaForCausalLM = LlamaForCausalLM(config)
    return student.double() if dtype == torch.float64 else student.float()


def some_rows(count: int = ROWS) -> list[dict[str, list[int]]]:
    """Rows of 3 to 11 tokens; the first two of each are a prompt, which is not learnt."""
    chance = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 12, (count,), generator=chance).tolist()
    ids = [torch.randint(1, VOCABULARY_SIZE, (n,), generator=chance).tolist() for n in lengths]
    return [{"input_ids": row, "labels": [IGNORED, IGNORED, *row[2:]]} for row in ids]


def collated(rows: list[dict[str, list[int]]], *, left: bool = False) -> dict[str, torch.Tensor]:
    """A batch padded on the right, or on the left."""
    sides: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        sides["input_ids"].append(torch.tensor(row["input_ids"]))
        sides["labels"].append(torch.tensor(row["labels"]))
        sides["attention_mask"].append(torch.ones(len(row["labels"]), dtype=torch.int64))
    side = "left" if left else "right"
    return {
        name: pad_sequence(
            each,
            batch_first=True,
            padding_value=IGNORED if name == "labels" else 0,
            padding_side=side,
        )
        for name, each in sides.items()
    }


def packed(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch of one line, the rows one behind the other."""
    return {
        "input_ids": torch.tensor([[each for row in rows for each in row["input_ids"]]]),
        "labels": torch.tensor([[each for row in rows for each in row["labels"]]]),
        "position_ids": torch.tensor([[at for row in rows for at in range(len(row["labels"]))]]),
    }


def on_the_left(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch padded on the left."""
    return collated(rows, left=True)


def reference(address: str, beta: float = 0.0) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one batch of all rows, over the payload that is served."""
    student, batch = a_student(), collated(some_rows())
    grid = tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=ROWS)
    profile = tl.StudentProfile(batch_grid=grid, top_k=K)
    ids, tokens = batch["input_ids"], batch["attention_mask"]
    with tl.connect(address) as client, client.open_session(profile) as session:
        with session.score(ids, attention_mask=tokens).result() as payload:
            logits = student(input_ids=ids, attention_mask=tokens).logits
            mask = tl.labels_mask(batch["labels"])
            loss_sum, count = losses.generalised_jsd(logits, payload.targets, mask, beta=beta)
    loss = loss_sum / count
    loss.backward()
    return float(loss.detach()), gradients_of(student)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by name."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def a_trainer(
    address: str,
    folder: Path,
    *,
    model: LlamaForCausalLM | None = None,
    descent: torch.optim.Optimizer | None = None,
    **settings: object,
) -> TeacherServerTrainer:
    """A trainer that takes one step of plain descent over all rows, in float64.

    ``model`` and ``descent`` are the student and its optimizer, where they are to be others.
    """
    from teacher_logits_client.trainers.transformers import (
        TeacherServerConfig,
        TeacherServerTrainer,
    )

    student = model or a_student()
    descent = descent or torch.optim.SGD(student.parameters(), lr=1.0)
    make: Callable[..., TeacherServerConfig] = TeacherServerConfig
    usual: dict[str, object] = {
        "output_dir": str(folder),
        "teacher_server": address,
        "top_k": K,
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": ROWS,
    }
    return TeacherServerTrainer(
        model=student,
        args=make(**{**usual, **settings}),
        train_dataset=some_rows(),
        eval_dataset=some_rows(5),
        data_collator=collated,
        optimizers=(descent, torch.optim.lr_scheduler.LambdaLR(descent, lambda step: 1.0)),
    )


def step_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Train one step, and return how far each parameter went: the gradient, at a rate of 1."""
    model = trainer.model
    assert model is not None
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trainer.train()
    return {name: before[name] - each.detach() for name, each in model.named_parameters()}


def logged(trainer: Trainer, name: str) -> list[float]:
    """What was logged under a name, in order."""
    return [float(line[name]) for line in trainer.state.log_history if name in line]


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Each gradient is the wanted one, to 1e-6 of the largest of them."""
    largest = max(float(each.abs().max()) for each in wanted.values())
    assert found.keys() >= wanted.keys()
    for name, each in wanted.items():
        worst = float((found[name] - each).abs().max())
        assert worst <= 1e-6 * largest, f"{name} differs by {worst}, the largest is {largest}"
