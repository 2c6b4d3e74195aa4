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
the count of the whole step over all ranks.

As in TRL the loss is not multiplied by temperature². Needs ``teacher-logits[trl]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.errors import ConfigError
from teacher_logits_client.normalisation import GroupReduction, StepNormaliser
from teacher_logits_client.trainers.batch_rows import padded_rows
from teacher_logits_client.trainers.empty_steps import EmptySteps
from teacher_logits_client.trainers.extras import missing
from teacher_logits_client.trainers.objective import Objective, check_count
from teacher_logits_client.trainers.served_teacher import Request, ServedTeacher, TeacherSettings
from teacher_logits_client.trainers.student_profile import profile_of
from teacher_logits_client.trainers.vocabulary import policy_of, rows_of_head
from teacher_logits_client.trainers.wrapping import let_it_be_wrapped

try:
    from trl import DistillationConfig, DistillationTrainer
except ImportError as error:
    raise missing(error, trainer="trl", extra="trl") from error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.normalisation import OpenStep

__all__ = ["ServerDistillationConfig", "ServerDistillationTrainer"]

_REQUEST = "teacher_request"


@dataclass
class ServerDistillationConfig(DistillationConfig):
    """TRL's ``DistillationConfig``, and the teacher's server.

    ``top_k`` stays what TRL has it for, a filter of the student's sampling: the ids a position
    that the teacher hands out are ``loss_top_k``.

    Raises:
        ConfigError: a number is outside its range, or ``teacher_server`` is not given.
    """

    teacher_server: str | None = field(
        default=None, metadata={"help": "Address of the teacher's server: unix:/path or host:port."}
    )
    teacher_id: str = field(
        default="", metadata={"help": "Which of the server's teachers, where it has several."}
    )
    loss_top_k: int = field(
        default=64, metadata={"help": "Ids a position that the teacher hands out."}
    )
    loss_add_tail: bool = field(
        default=True, metadata={"help": "Take the mass outside them as one more category."}
    )
    teacher_timeout: float | None = field(
        default=None,
        metadata={"help": "Seconds for one request, and to find the server; else its own, and 60."},
    )
    vocabulary_policy: str = field(
        default="strict",
        metadata={"help": "'truncate' masks the teacher's ids beyond the student's head."},
    )
    teacher_insecure: bool = field(
        default=False, metadata={"help": "Allow a server on another host, unencrypted."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("loss_top_k", self.loss_top_k)
        policy_of(self.vocabulary_policy)
        self.objective()
        self.teacher_settings()

    def objective(self) -> Objective:
        """Return the loss that these arguments name."""
        return Objective(
            beta=self.beta,
            temperature=self.temperature,
            add_tail=self.loss_add_tail,
            tempered_scale=False,
        )

    def teacher_settings(self) -> TeacherSettings:
        """Return where the teacher is, and how it is asked: all of a step at once."""
        return TeacherSettings(
            address=self.teacher_server,
            temperature=self.temperature,
            ahead=self.gradient_accumulation_steps,
            timeout=self.teacher_timeout,
            insecure=self.teacher_insecure,
            top_k_setting="loss_top_k",
        )


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
            args.teacher_settings(), self._profile, lambda: rows_of_head(self.model)
        )
        self._empty = EmptySteps(
            cause="its completions have no token of the student's own",
            is_silent=args.process_index > 0,
        )
        self._objective = args.objective()
        self._evaluation: OpenStep | None = None
        self._evaluations = self._evaluated_batches = 0

    def _profile(self) -> StudentProfile:
        args = self.args
        return profile_of(
            top_k=args.loss_top_k,
            objective=self._objective,
            teacher_id=args.teacher_id,
            tokenizer=getattr(self.processing_class, "tokenizer", self.processing_class),
            model=self.model,
            policy=policy_of(args.vocabulary_policy),
            rank=args.process_index,
            ranks=args.world_size,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
        )

    def train(self, *args: object, **kwargs: object) -> object:
        """Train; see ``Trainer.train``."""
        let_it_be_wrapped(self)
        with self.teacher:
            return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: object, **kwargs: object) -> object:
        """Evaluate; the loss is the mean over all generated tokens, of all ranks."""
        self._evaluations += 1
        reduction = GroupReduction() if self.args.world_size > 1 else None
        normaliser = StepNormaliser(reduction=reduction)
        with self.teacher, normaliser.begin(self._evaluations) as step:
            self._evaluation, self._evaluated_batches = step, 0
            try:
                output = super().evaluation_loop(*args, **kwargs)
                report = step.finish()
            finally:
                self._evaluation = None
        for name in [each for each in output.metrics or () if each.endswith("_loss")]:
            output.metrics[name] = report.loss
        return output

    def _prepare_inputs(self, generation_batch: object) -> dict[str, object]:
        """Return one micro batch; of those just generated all are asked for, this one first."""
        inputs: dict[str, object] = super()._prepare_inputs(generation_batch)
        if _REQUEST not in inputs:
            others = (self._buffered_inputs or ()) if self.model.training else ()
            for each in [inputs, *(other for other in others if other is not inputs)]:
                each[_REQUEST] = self._plan(each)
            self.teacher.send(cast("Request", inputs[_REQUEST]))
            whole = inputs.get("num_items_in_batch")
            if self.model.training and isinstance(whole, torch.Tensor):
                self._empty.note(what="training step", is_empty=not int(whole))
        return inputs

    def _plan(self, inputs: Mapping[str, object]) -> Request:
        if "pixel_values" in inputs:
            raise ConfigError("a batch has images, and the teacher is served token ids alone")
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
        return self.teacher.plan(padded_rows(ids, attention, mask))

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, object],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        """Return the loss of a micro batch as its share of the step's mean, whatever the cut."""
        tensors = cast("Mapping[str, torch.Tensor]", inputs)
        prompt_ids, completion_ids = tensors["prompt_ids"], tensors["completion_ids"]
        outputs = model(
            input_ids=torch.cat([prompt_ids, completion_ids], 1),
            attention_mask=torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], 1),
            logits_to_keep=completion_ids.shape[1] + 1,
        )
        # The last logits speak of a token that is not there; what is left starts at the last of
        # the prompt's columns.
        logits = outputs.logits[:, :-1]
        request = cast("Request", inputs[_REQUEST])
        rows, skipped = request.rows, prompt_ids.shape[1] - 1
        with self.teacher.targets(request) as targets:
            if targets.topk_ids.device != logits.device:
                targets = targets.to(logits.device)
            loss_sum, count = self._objective.sum_and_count(
                logits, rows.place(targets, skipped=skipped), rows.mask[:, skipped:-1]
            )
        if self._evaluation is not None:
            self._evaluation.microbatch(self._evaluated_batches, loss_sum, count)
            self._evaluated_batches += 1
        loss = loss_sum / self._divisor(inputs, count)
        return (loss, outputs) if return_outputs else loss

    def _divisor(self, inputs: Mapping[str, object], count: torch.Tensor) -> torch.Tensor:
        """Return the step's count over all ranks, for gradients that are averaged over them."""
        whole = inputs.get("num_items_in_batch")
        if self.model.training and isinstance(whole, torch.Tensor):
            ranks = int(self.accelerator.num_processes)
            return whole.clamp_min(1) / ranks
        return count.clamp_min(1)

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Log, with the seconds that the student has waited for its teacher since the last."""
        if "loss" in logs:
            logs["teacher_wait"] = self.teacher.waited_lately()
        super().log(logs, *args, **kwargs)
