"""TRL's server distillation, with our server as the teacher, at any ``beta``.

    config = ServerDistillationConfig(
        output_dir="out", teacher_server="unix:/run/teacher-logits/teacher.sock",
        loss_top_k=64, beta=0.5,
    )
    ServerDistillationTrainer(model=model, args=config, train_dataset=prompts, ...).train()

The student, its generation, its data and its logging are those of TRL's ``DistillationTrainer``;
names and meanings are those of its ``ServerDistillationTrainer``, which takes the sampled token
alone where ``beta`` is above 0, asks its server inside the loss and divides by each micro batch's
own count. Here K ids and the true mass outside them come at every ``beta``; the teacher is asked
as soon as the completions of a step are there, while the student computes; and the divisor is
the count of the whole step over all ranks. A run that is resumed behind its first epoch sees the
rows of that epoch, where TRL's goes through the first epoch's order again. The student's entropy,
which takes all of its logits, is not logged.

As in TRL the loss is not multiplied by temperature². Needs ``teacher-logits[trl]``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.errors import ConfigError
from teacher_logits_client.trainers import wrapping
from teacher_logits_client.trainers.batch_rows import check_text_alone, padded_rows
from teacher_logits_client.trainers.empty_steps import EmptySteps
from teacher_logits_client.trainers.epoch_order import EpochOrder
from teacher_logits_client.trainers.evaluation import Evaluation
from teacher_logits_client.trainers.extras import missing
from teacher_logits_client.trainers.served_teacher import Request, ServedTeacher
from teacher_logits_client.trainers.student_head import StudentHead, last_positions, logits_of
from teacher_logits_client.trainers.student_profile import profile_of
from teacher_logits_client.trainers.trl_config import ServerDistillationConfig
from teacher_logits_client.trainers.vocabulary import rows_of_head

try:
    from trl import DistillationTrainer
except ImportError as error:
    raise missing(error, trainer="trl", extra="trl") from error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.utils.data import Sampler

    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.losses import HeadLogits
    from teacher_logits_client.trainers.objective import Objective
    from teacher_logits_client.trainers.served_teacher import TeacherSettings

__all__ = ["ServerDistillationConfig", "ServerDistillationTrainer"]

_REQUEST = "teacher_request"


class ServerDistillationTrainer(DistillationTrainer):
    """TRL's on-policy distillation against a served teacher.

    ``teacher`` is the server's side; it is open inside ``train``, ``evaluate`` and ``predict``.

    Raises:
        ConfigError: ``args`` are others, or a teacher of one's own is given as well.
    """

    args: ServerDistillationConfig
    _name = "Server Distillation"

    def __init__(
        self,
        model: object = None,
        args: ServerDistillationConfig | None = None,
        **others: object,
    ) -> None:
        if not isinstance(args, ServerDistillationConfig):
            raise ConfigError(
                f"args is a {type(args).__name__}: give a ServerDistillationConfig of "
                "teacher_logits_client.trainers.trl, with teacher_server"
            )
        if others.get("teacher_model") is not None:
            raise ConfigError("teacher_model is given, and the teacher is served: leave it out")
        super().__init__(model=model, args=args, **others)
        self.teacher = ServedTeacher(
            self._settings, self._profile, lambda: rows_of_head(self.model)
        )
        self._empty = EmptySteps(
            cause="its completions have no token of the student's own",
            is_silent=args.process_index > 0,
        )
        self._evaluation = Evaluation(ranks=args.world_size)
        self._head: StudentHead | None = None

    @property
    def _objective(self) -> Objective:
        """The loss at the trainer's own ``beta`` and ``temperature``, which TRL's are, as set."""
        own = self.args.objective()
        return replace(own, beta=self.beta, temperature=self.temperature)

    def _settings(self) -> TeacherSettings:
        return replace(self.args.teacher_settings(), temperature=self.temperature)

    def _profile(self) -> StudentProfile:
        return profile_of(self, top_k=self.args.loss_top_k, objective=self._objective)

    def train(self, *args: object, **kwargs: object) -> object:
        """Train; see ``Trainer.train``."""
        wrapping.let_it_be_wrapped(self)
        # What an interrupted training has left in the middle of a step is none of this one's.
        self._step, self._buffered_inputs, self._head = 0, None, None
        with self.teacher:
            return super().train(*args, **kwargs)

    def _get_train_sampler(self, dataset: object = None) -> Sampler[int]:
        sampler = super()._get_train_sampler(dataset)
        return EpochOrder(sampler, lambda: int(self.state.epoch or 0))

    def evaluation_loop(
        self,
        dataloader: object,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> object:
        """Evaluate; the loss is the mean over all generated tokens, of all ranks."""
        self._head = None  # the model may be another one by now
        with self.teacher, self._evaluation.under_way():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            report = self._evaluation.finish()
        output.metrics[f"{metric_key_prefix}_loss"] = report.loss
        return output

    def _prepare_inputs(self, generation_batch: object) -> dict[str, object]:
        """Return one micro batch; of those just generated all are asked for, this one first."""
        inputs: dict[str, object] = super()._prepare_inputs(generation_batch)
        if _REQUEST not in inputs:
            buffered: Sequence[dict[str, object]] = self._buffered_inputs or ()
            others = buffered if self.model.training else ()
            for each in [inputs, *(other for other in others if other is not inputs)]:
                each[_REQUEST] = self._plan(each)
            self.teacher.send(cast("Request", inputs[_REQUEST]))
            whole = inputs.get("num_items_in_batch")
            if self.model.training and isinstance(whole, torch.Tensor):
                self._empty.note(what="training step", is_empty=not int(whole))
        return inputs

    def _plan(self, inputs: Mapping[str, object]) -> Request:
        check_text_alone(inputs)
        tensors = cast("Mapping[str, torch.Tensor]", inputs)
        ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], 1)
        attention = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], 1)
        learnt = tensors["completion_mask"]
        if "tool_mask" in inputs:
            learnt = learnt * tensors["tool_mask"]
        # Position s counts where the token s+1 is one to learn.
        mask = torch.zeros_like(attention, dtype=torch.bool)
        before = tensors["prompt_ids"].shape[1] - 1
        mask[:, before:-1] = learnt != 0
        rows = padded_rows(ids, attention, mask)
        if not self.model.training and self.accelerator.gradient_state.end_of_dataloader:
            rows = wrapping.without_repeats(self, rows)
        return self.teacher.plan(rows)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        """Return the loss of a micro batch as its share of the step's mean, whatever the cut."""
        outputs, logits = self._forward(model, inputs)
        request = cast("Request", inputs[_REQUEST])
        rows, skipped = request.rows, inputs["prompt_ids"].shape[1] - 1
        with self.teacher.targets(request) as targets:
            if targets.topk_ids.device != logits.device:
                targets = targets.to(logits.device)
            loss_sum, count = self._objective.sum_and_count(
                logits,
                rows.place(targets, skipped=skipped),
                rows.mask[:, skipped:-1].to(logits.device),
            )
        self._evaluation.note(loss_sum, count)
        loss = loss_sum / self._divisor(inputs, count)
        return (loss, outputs) if return_outputs else loss

    def _forward(
        self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[object, torch.Tensor | HeadLogits]:
        """Return the model's outputs, and its logits at the positions of the completions."""
        width = inputs["completion_ids"].shape[1]
        given: dict[str, object] = {
            "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            "use_cache": False,
        }
        if self.args.loss_from_hidden:
            self._head = self._head or StudentHead(self)
            outputs, logits = self._head.forward(model, given)
            return outputs, last_positions(logits, width)
        if "logits_to_keep" in self.model_kwarg_keys:
            given["logits_to_keep"] = width + 1
        outputs = model(**given)
        return outputs, last_positions(logits_of(outputs), width)

    def _divisor(self, inputs: Mapping[str, object], count: torch.Tensor) -> torch.Tensor:
        """Return the step's count over all ranks, for gradients that are averaged over them."""
        whole = inputs.get("num_items_in_batch")
        if self.model.training and isinstance(whole, torch.Tensor):
            ranks = int(self.accelerator.num_processes)
            return whole.clamp_min(1).float() / ranks
        return count.clamp_min(1)

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Log, with the seconds that the student has waited for its teacher since the last."""
        if "loss" in logs:
            logs["teacher_wait"] = self.teacher.waited_lately()
        super().log(logs, *args, **kwargs)
