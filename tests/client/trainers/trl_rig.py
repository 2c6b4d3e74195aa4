"""What the tests of the TRL trainer share: a tokenizer of bytes, prompts, and a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from tests.client.trainers import trainer_rig as rig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import teacher_logits_client as tl
from teacher_logits_client import losses
from teacher_logits_client.trainers.trl import ServerDistillationConfig, ServerDistillationTrainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPTS = ["a", "some longer prompt", "two", "three words of"]
COMPLETION = 5
END = "!"


def a_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 ids, a byte each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token=END, pad_token=END, padding_side="left"
    )


def settings_of(folder: Path, **settings: object) -> dict[str, object]:
    """One step of plain descent over all prompts, each continued by its likeliest bytes."""
    usual: dict[str, object] = {
        "output_dir": str(folder),
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": len(PROMPTS),
        "max_completion_length": COMPLETION,
        "generation_kwargs": {"do_sample": False},
    }
    return {**usual, **settings}


def a_trainer(address: str, folder: Path, **settings: object) -> ServerDistillationTrainer:
    """A trainer whose one step is the gradient."""
    student = rig.a_student()
    descent = torch.optim.SGD(student.parameters(), lr=1.0)
    make: Callable[..., ServerDistillationConfig] = ServerDistillationConfig
    own = {"teacher_server": address, "loss_top_k": rig.K, "beta": 0.5}
    return ServerDistillationTrainer(
        model=student,
        args=make(**settings_of(folder, **{**own, **settings})),
        train_dataset=prompts(),
        eval_dataset=prompts(),
        processing_class=a_tokenizer(),
        optimizers=(descent, torch.optim.lr_scheduler.LambdaLR(descent, lambda step: 1.0)),
    )


def prompts(count: int = len(PROMPTS)) -> Dataset:
    """The prompts as TRL takes them, or the first of them."""
    return Dataset.from_list([{"prompt": each} for each in PROMPTS[:count]])


def reference(address: str, *, beta: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of all prompts' completions, one row after the other, without padding."""
    student, tokenizer = rig.a_student(), a_tokenizer()
    rows, starts = [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = student.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COMPLETION,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        rows.append(made[0])
        starts.append(ids.shape[1])
    grid = tl.BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=4)
    logits = torch.cat([student(input_ids=row[None]).logits[0] for row in rows])
    mask = torch.cat([torch.arange(len(r)) >= s - 1 for r, s in zip(rows, starts, strict=True)])
    with (
        tl.connect(address) as client,
        client.open_session(tl.StudentProfile(batch_grid=grid, top_k=rig.K)) as session,
        session.score(rows).result() as payload,
    ):
        loss_sum, count = losses.generalised_jsd(logits, payload.targets, mask, beta=beta)
    loss = loss_sum / count
    loss.backward()
    return float(loss.detach()), rig.gradients_of(student)
