"""``transformers.Trainer`` with a served teacher: one config, one trainer, the usual loop.

    config = TeacherServerConfig(
        output_dir="out", teacher_server="unix:/run/teacher-logits/teacher.sock",
        top_k=64, beta=0.0, temperature=1.0, gradient_accumulation_steps=4,
    )
    TeacherServerTrainer(model=model, args=config, train_dataset=rows, ...).train()

Promises: a token weighs the same however the step was cut, over micro batches and over ranks: the
divisor is the count of the whole accumulated batch on all of them. The evaluation's loss is on
that scale too, a mean over all its tokens. Scores of the next batches are asked for before the
student's forward of the present one. Logged beside the loss: ``teacher_wait``, in seconds.

Refuses what would change the loss unseen: label smoothing, a loss of one's own, DataParallel,
rows cut over ranks. Needs ``teacher-logits[transformers]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.errors import ConfigError
from teacher_logits_client.trainers import wrapping
from teacher_logits_client.trainers.asked_ahead import EvaluationBatches, ReadAhead
from teacher_logits_client.trainers.empty_steps import EmptySteps
from teacher_logits_client.trainers.evaluation import Evaluation
from teacher_logits_client.trainers.extras import missing
from teacher_logits_client.trainers.served_teacher import ServedTeacher
from teacher_logits_client.trainers.server_config import TeacherServerConfig, check_trainer
from teacher_logits_client.trainers.student_head import (
    StudentHead,
    check_positions,
    logits_of,
    one_line,
)
from teacher_logits_client.trainers.student_profile import profile_of
from teacher_logits_client.trainers.teacher_batches import PREFIXES, REQUEST, TeacherBatches
from teacher_logits_client.trainers.vocabulary import rows_of_head

try:
    from transformers import Trainer
except ImportError as error:
    raise missing(error, trainer="transformers", extra="transformers") from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader
    from transformers.trainer_utils import EvalLoopOutput, TrainOutput

    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.losses import HeadLogits
    from teacher_logits_client.trainers.teacher_batches import Inputs

__all__ = ["PREFIXES", "TeacherServerConfig", "TeacherServerTrainer"]


class TeacherServerTrainer(Trainer):
    """A ``Trainer`` whose loss is against a served teacher.

    Batches have ``input_ids`` and ``labels`` [N,S], as for a causal language model, with
    ``attention_mask``, or one line of packed rows with ``position_ids``. The labels say which
    tokens are learnt, and are not learnt themselves. ``teacher`` is the server's side; it is
    open inside ``train``, ``evaluate`` and ``predict``.

    Raises:
        ConfigError: ``args`` are others, or name what is refused.
    """

    args: TeacherServerConfig
    loss_is_scaled_for_ga = True

    def __init__(
        self, model: object = None, args: TeacherServerConfig | None = None, **others: object
    ) -> None:
        if not isinstance(args, TeacherServerConfig):
            raise ConfigError(
                f"args is a {type(args).__name__}: give a TeacherServerConfig, with teacher_server"
            )
        super().__init__(model=model, args=args, **others)  # type: ignore[arg-type]
        check_trainer(self, args)
        # Releases that do not know `loss_is_scaled_for_ga` would divide once more.
        self.model_accepts_loss_kwargs = True
        # What a model takes for its own loss says nothing of this one.
        self.label_names = ["labels"]
        self.teacher = ServedTeacher(
            lambda: self.args.teacher_settings(), self._profile, lambda: rows_of_head(self.model)
        )
        self._empty = EmptySteps(
            cause="all labels are -100, so look at your data collator",
            is_silent=args.process_index > 0,
        )
        self._batches = TeacherBatches(self, args, self.teacher)
        self._ahead: ReadAhead[Inputs, tuple[Inputs, int | None]] | None = None
        self._loader: object = None
        self._step_count: torch.Tensor | None = None
        self._evaluation = Evaluation(ranks=args.world_size)
        self._head: StudentHead | None = None
        self._hands_out_logits = False

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train; see ``Trainer.train``."""
        check_trainer(self, self.args)  # which may have been set since
        wrapping.let_it_be_wrapped(self)
        self._head = None  # the model may be another one by then
        with self.teacher:
            try:
                return super().train(*args, **kwargs)  # type: ignore[arg-type]
            finally:
                self._ahead = self._loader = self._step_count = None

    def evaluation_loop(
        self,
        dataloader: DataLoader[object],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate; the loss is the mean over all tokens that count, of all ranks."""
        batches = EvaluationBatches(
            dataloader, self._batches.prepare_evaluation, ahead=self.args.teacher_prefetch
        )
        around, self._head = self._hands_out_logits, None  # the model may be another one by now
        self._hands_out_logits = not (prediction_loss_only or self.args.prediction_loss_only)
        with self.teacher, self._evaluation.under_way():
            try:
                output = super().evaluation_loop(
                    cast("DataLoader[object]", batches),
                    description,
                    prediction_loss_only,
                    ignore_keys,
                    metric_key_prefix,
                )
                report = self._evaluation.finish()
            finally:
                self._hands_out_logits = around
        self._empty.note(what="evaluation", is_empty=not report.should_step)
        if output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = report.loss
        return output

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = cast("list[str]", self._signature_columns)
        if PREFIXES not in columns:  # the teacher's, if not the model's
            columns.append(PREFIXES)

    def _profile(self) -> StudentProfile:
        return profile_of(self, top_k=self.args.top_k, objective=self.args.objective())

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], torch.Tensor]:
        """Return the batches of a step and the count of its positions over all ranks."""
        loader = self.callback_handler.train_dataloader
        if (
            self._ahead is None or self._loader is not loader
        ):  # a run begins, or again with smaller batches
            self._ahead, self._loader = None, loader
            self._batches.begin()
        self._ahead = ReadAhead.behind(
            self._ahead,
            epoch_iterator,
            self._batches.prepare_training,
            ahead=self.args.teacher_prefetch,
            is_stream=self._batches.are_a_stream,
        )
        batches = [
            batch if number is None else self._batches.continued(batch, number)
            for batch, number in self._ahead.take(num_batches)
        ]
        counts = [self._batches.request_of(batch).rows.mask.sum() for batch in batches]
        count = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
        count = count.to(device)
        if self.args.world_size > 1:
            count = self.accelerator.gather(count).sum() // wrapping.copies_of_batches(self)
        self._empty.note(what="training step", is_empty=bool(batches) and not int(count))
        self._step_count = count
        return batches, count

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        """Return the loss of a batch as its share of the step's mean, whatever the cut."""
        request = self._batches.request_of(inputs)
        self.teacher.send(request)  # and those behind it, before the student computes
        own = (REQUEST, PREFIXES, "labels", "skip_logits")
        given = {name: value for name, value in inputs.items() if name not in own}
        outputs, logits = self._forward(model, given)
        rows = request.rows
        with self.teacher.targets(request) as targets:
            if targets.topk_ids.device != logits.device:
                targets = targets.to(logits.device)
            loss_sum, count = self.args.objective().sum_and_count(
                logits if rows.columns is not None else one_line(logits),
                rows.place(targets),
                rows.mask.to(logits.device),
            )
        loss = loss_sum / self._divisor(loss_sum, count, num_items_in_batch)
        if return_outputs and not isinstance(outputs, dict):
            # Where a Trainer looks for the logits, behind a loss.
            outputs = (loss, *cast("tuple[object, ...]", outputs))
        return (loss, outputs) if return_outputs else loss

    def _forward(
        self, model: torch.nn.Module, given: dict[str, object]
    ) -> tuple[object, torch.Tensor | HeadLogits]:
        """Return the model's outputs and its logits, or what stands for them."""
        if self.args.loss_from_hidden and not self._hands_out_logits:
            self._head = self._head or StudentHead(self)
            return self._head.forward(model, given)
        outputs = model(**given)
        logits = logits_of(outputs)
        check_positions(logits.shape, given)
        return outputs, logits

    def _divisor(
        self, loss_sum: torch.Tensor, count: torch.Tensor, step_count: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Return what a sum is divided by; an evaluation's sum and count are noted as well."""
        self._evaluation.note(loss_sum, count)
        if step_count is None:  # as where a compute_loss of the user's own leaves it out
            step_count = self._step_count
        if self._evaluation.is_under_way or step_count is None:
            return count.clamp_min(1)
        whole = torch.as_tensor(step_count, device=loss_sum.device)
        # Gradients are averaged over ranks that have tokens of their own: undone here.
        ranks = int(self.args.world_size) // wrapping.copies_of_batches(self)
        return whole.clamp_min(1).to(loss_sum.dtype) / ranks

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Log, with the seconds that the student has waited for its teacher since the last."""
        if "loss" in logs:
            logs["teacher_wait"] = self.teacher.waited_lately()
        super().log(logs, *args, **kwargs)  # type: ignore[arg-type]
