"""Batches of a ``Trainer`` with their requests: planned as they are read, or continued first.

A training batch has a number, from 0 on, in the order in which they are read. Whether the student
continues it, and the chance that it samples by, are functions of the seed and that number, and the
latter of the rank: so a run that was resumed continues the same batches in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from teacher_logits_client.trainers import wrapping
from teacher_logits_client.trainers.batch_rows import rows_of
from teacher_logits_client.trainers.on_policy import (
    Coin,
    continue_prompts,
    prompts_of,
    sampling_seed,
    special_ids,
)
from teacher_logits_client.trainers.served_teacher import Request
from teacher_logits_client.trainers.vocabulary import check_ids

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sized

    import torch
    from transformers import Trainer

    from teacher_logits_client.trainers.on_policy import Generates
    from teacher_logits_client.trainers.served_teacher import ServedTeacher
    from teacher_logits_client.trainers.server_config import TeacherServerConfig

    Inputs = MutableMapping[str, object]

PREFIXES = "teacher_prefix_ids"
"""Under this a batch may bring tokens that only the teacher sees, a list of ints for each row."""
REQUEST = "teacher_request"
"""Under this a batch has its request."""


class TeacherBatches:
    """What a trainer's batches are asked of its teacher."""

    def __init__(self, trainer: Trainer, args: TeacherServerConfig, teacher: ServedTeacher) -> None:
        self._trainer = trainer
        self._args = args
        self._teacher = teacher
        self._next = 0

    def begin(self) -> None:
        """Count from where the training is: from 0 on, or behind what it was resumed behind."""
        self._next = micro_batches_before(
            int(self._trainer.state.global_step),
            accumulation=self._args.gradient_accumulation_steps,
            an_epoch=self._an_epoch,
        )

    @property
    def are_a_stream(self) -> bool:
        """Whether nobody knows how many an epoch has."""
        return self._an_epoch is None

    @property
    def _an_epoch(self) -> int | None:
        loader = cast("Sized", self._trainer.callback_handler.train_dataloader)
        try:
            return len(loader)
        except (TypeError, NotImplementedError):  # of a stream
            return None

    def prepare_training(self, batch: Inputs) -> tuple[Inputs, int | None]:
        """Return a batch with its request; one that is to be continued has a number instead."""
        number, self._next = self._next, self._next + 1
        if Coin(self._args.lmbda, seed=self._args.seed).toss(number):
            return batch, number
        batch[REQUEST] = self._plan(batch)
        return batch, None

    def prepare_evaluation(self, batch: Inputs, is_last: bool) -> Inputs:
        """Return a batch with its request; rows that other ranks have as well count nowhere."""
        request = self._plan(batch)
        if is_last:
            request.rows = wrapping.without_repeats(self._trainer, request.rows)
        batch[REQUEST] = request
        return batch

    def request_of(self, batch: Inputs) -> Request:
        """Return a batch's request."""
        found = batch.get(REQUEST)
        return found if isinstance(found, Request) else self._plan(batch)

    def _plan(self, batch: Inputs) -> Request:
        rows = rows_of(batch)
        check_ids(cast("torch.Tensor", batch["input_ids"]), self._trainer.model)
        return self._teacher.plan(rows, cast("list[list[int]] | None", batch.get(PREFIXES)))

    def continued(self, batch: Inputs, number: int) -> Inputs:
        """Return a batch whose completions are the student's own, and have them scored."""
        trainer, args = self._trainer, self._args
        prompts = prompts_of(batch)
        check_ids(cast("torch.Tensor", batch["input_ids"]), trainer.model)
        model = trainer.accelerator.unwrap_model(trainer.model)
        ends, pad = special_ids(trainer.processing_class, model)
        made: Inputs = dict(
            continue_prompts(
                cast("Generates", model),
                prompts,
                device=args.device,
                pad_id=pad,
                end_ids=ends,
                seed=sampling_seed(args.seed, rank=wrapping.data_rank(trainer), number=number),
                settings={
                    "max_new_tokens": args.max_new_tokens,
                    "temperature": args.temperature,
                },
            )
        )
        if PREFIXES in batch:
            made[PREFIXES] = batch[PREFIXES]
        request = self._plan(made)
        self._teacher.send(request)  # it is scored while the next batch is generated
        made[REQUEST] = request
        return made


def micro_batches_before(step: int, *, accumulation: int, an_epoch: int | None) -> int:
    """Return how many micro batches the steps in front of ``step`` took.

    ``an_epoch`` has so many, and its last step those that are left; None where nobody knows.
    """
    if an_epoch is None:
        return step * accumulation
    epochs, steps = divmod(step, max(1, -(-an_epoch // accumulation)))
    return epochs * an_epoch + steps * accumulation
