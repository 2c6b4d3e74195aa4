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
from teacher_logits_client.normalisation import GroupReduction, StepNormaliser
from teacher_logits_client.trainers import wrapping
from teacher_logits_client.trainers.asked_ahead import EvaluationBatches, ReadAhead
from teacher_logits_client.trainers.batch_rows import rows_of
from teacher_logits_client.trainers.empty_steps import EmptySteps
from teacher_logits_client.trainers.extras import missing
from teacher_logits_client.trainers.on_policy import (
    Coin,
    continue_prompts,
    prompts_of,
    special_ids,
)
from teacher_logits_client.trainers.served_teacher import Request, ServedTeacher
from teacher_logits_client.trainers.server_config import TeacherServerConfig, check_trainer
from teacher_logits_client.trainers.student_head import StudentHead, one_line
from teacher_logits_client.trainers.student_profile import profile_of
from teacher_logits_client.trainers.vocabulary import check_ids, policy_of, rows_of_head

try:
    from transformers import Trainer
except ImportError as error:
    raise missing(error, trainer="transformers", extra="transformers") from error

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from torch.utils.data import DataLoader
    from transformers.trainer_utils import EvalLoopOutput, TrainOutput

    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.losses import HeadLogits
    from teacher_logits_client.normalisation import OpenStep
    from teacher_logits_client.trainers.on_policy import Generates

    Inputs = MutableMapping[str, object]

__all__ = ["PREFIXES", "TeacherServerConfig", "TeacherServerTrainer"]

PREFIXES = "teacher_prefix_ids"
"""Under this a batch may bring tokens that only the teacher sees, a list of ints for each row."""
_REQUEST = "teacher_request"


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
        check_trainer(self)
        # Releases that do not know `loss_is_scaled_for_ga` would divide once more.
        self.model_accepts_loss_kwargs = True
        # What a model takes for its own loss says nothing of this one.
        self.label_names = ["labels"]
        self.teacher = ServedTeacher(
            args.teacher_settings(), self._profile, lambda: rows_of_head(self.model)
        )
        self._empty = EmptySteps(
            cause="all labels are -100, so look at your data collator",
            is_silent=args.process_index > 0,
        )
        self._objective = args.objective()
        self._coin = Coin(args.lmbda, seed=args.seed)
        self._ahead: ReadAhead[Inputs, tuple[Inputs, bool]] | None = None
        self._evaluation: OpenStep | None = None
        self._evaluations = self._evaluated_batches = 0
        self._head: StudentHead | None = None
        self._hands_out_logits = False

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train; see ``Trainer.train``."""
        wrapping.let_it_be_wrapped(self)
        if self.args.loss_from_hidden:
            self._head = StudentHead(self)
        with self.teacher:
            try:
                return super().train(*args, **kwargs)  # type: ignore[arg-type]
            finally:
                self._ahead = None

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
            dataloader, self._prepare_evaluation, ahead=self.args.teacher_prefetch
        )
        self._evaluations += 1
        reduction = GroupReduction() if self.args.world_size > 1 else None
        normaliser = StepNormaliser(reduction=reduction)
        with self.teacher, normaliser.begin(self._evaluations) as step:
            self._evaluation, self._evaluated_batches = step, 0
            loss_only = prediction_loss_only or self.args.prediction_loss_only
            self._hands_out_logits = not loss_only
            try:
                output = super().evaluation_loop(
                    cast("DataLoader[object]", batches),
                    description,
                    prediction_loss_only,
                    ignore_keys,
                    metric_key_prefix,
                )
                report = step.finish()
                self._empty.note(what="evaluation", is_empty=not report.should_step)
            finally:
                self._evaluation, self._hands_out_logits = None, False
        if output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = report.loss
        return output

    def _profile(self) -> StudentProfile:
        args = self.args
        return profile_of(
            top_k=args.top_k,
            objective=self._objective,
            teacher_id=args.teacher_id,
            tokenizer=self.processing_class,
            model=self.model,
            policy=policy_of(args.vocabulary_policy),
            rank=args.process_index,
            ranks=args.world_size,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
        )

    # --- batches, and their requests

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], torch.Tensor]:
        """Return the batches of a step and the count of its positions over all ranks."""
        ahead = self.args.teacher_prefetch
        self._ahead = ReadAhead.behind(
            self._ahead, epoch_iterator, self._prepare_training, ahead=ahead
        )
        batches = [
            self._continued(batch) if is_on_policy else batch
            for batch, is_on_policy in self._ahead.take(num_batches)
        ]
        counts = [self._request(batch).rows.mask.sum() for batch in batches]
        count = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
        count = count.to(device)
        if self.args.world_size > 1:
            count = self.accelerator.gather(count).sum() / wrapping.copies_of_batches(self)
        self._empty.note(what="training step", is_empty=bool(batches) and not int(count))
        return batches, count

    def _prepare_training(self, batch: Inputs) -> tuple[Inputs, bool]:
        is_on_policy = self._coin.toss()
        if not is_on_policy:
            batch[_REQUEST] = self._plan(batch)
        return batch, is_on_policy

    def _prepare_evaluation(self, batch: Inputs, is_last: bool) -> Inputs:
        request = self._plan(batch)
        real = wrapping.rows_that_are_no_repeats(self, len(request.rows.rows)) if is_last else None
        if real is not None:
            request.rows = request.rows.first_rows(real)
        batch[_REQUEST] = request
        return batch

    def _request(self, batch: Inputs) -> Request:
        found = batch.get(_REQUEST)
        return found if isinstance(found, Request) else self._plan(batch)

    def _plan(self, batch: Inputs) -> Request:
        rows = rows_of(batch)
        check_ids(cast("torch.Tensor", batch["input_ids"]), self.model)
        return self.teacher.plan(rows, cast("list[list[int]] | None", batch.get(PREFIXES)))

    def _continued(self, batch: Inputs) -> Inputs:
        """Return a batch whose completions are the student's own, and have them scored."""
        ids, labels = (cast("torch.Tensor", batch[name]) for name in ("input_ids", "labels"))
        tokens = cast("torch.Tensor | None", batch.get("attention_mask"))
        check_ids(ids, self.model)
        model = self.accelerator.unwrap_model(self.model)
        ends, pad = special_ids(self.processing_class, model)
        made: Inputs = dict(
            continue_prompts(
                cast("Generates", model),
                prompts_of(ids, tokens, labels),
                device=self.args.device,
                pad_id=pad,
                end_ids=ends,
                settings={
                    "max_new_tokens": self.args.max_new_tokens,
                    "temperature": self.args.temperature,
                },
            )
        )
        if PREFIXES in batch:
            made[PREFIXES] = batch[PREFIXES]
        request = self._plan(made)
        self.teacher.send(request)  # it is scored while the next batch is generated
        made[_REQUEST] = request
        return made

    # --- the loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        """Return the loss of a batch as its share of the step's mean, whatever the cut."""
        request = self._request(inputs)
        self.teacher.send(request)  # and those behind it, before the student computes
        own = (_REQUEST, PREFIXES, "labels", "skip_logits")
        given = {name: value for name, value in inputs.items() if name not in own}
        outputs, logits = self._forward(model, given)
        rows = request.rows
        with self.teacher.targets(request) as targets:
            if targets.topk_ids.device != logits.device:
                targets = targets.to(logits.device)
            loss_sum, count = self._objective.sum_and_count(
                logits if rows.columns is not None else one_line(logits),
                rows.place(targets),
                rows.mask.to(logits.device),
            )
        loss = loss_sum / self._divisor(loss_sum, count, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _forward(
        self, model: torch.nn.Module, given: dict[str, object]
    ) -> tuple[object, torch.Tensor | HeadLogits]:
        """Return the model's outputs and its logits, or what stands for them."""
        if self.args.loss_from_hidden and not self._hands_out_logits:
            self._head = self._head or StudentHead(self)
            return self._head.forward(model, given)
        outputs = model(**given)
        return outputs, outputs["logits"] if isinstance(outputs, dict) else outputs[0]

    def _divisor(
        self, loss_sum: torch.Tensor, count: torch.Tensor, step_count: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Return what a sum is divided by; an evaluation's sum and count are noted as well."""
        if self._evaluation is not None:
            self._evaluation.microbatch(self._evaluated_batches, loss_sum, count)
            self._evaluated_batches += 1
        if self._evaluation is not None or step_count is None:
            return count.clamp_min(1)
        whole = torch.as_tensor(step_count, device=loss_sum.device)
        # Gradients are averaged over ranks that have tokens of their own: undone here.
        ranks = int(self.args.world_size) // wrapping.copies_of_batches(self)
        return whole.clamp_min(1) / ranks

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Log, with the seconds that the student has waited for its teacher since the last."""
        if "loss" in logs:
            logs["teacher_wait"] = self.teacher.waited_lately()
        super().log(logs, *args, **kwargs)  # type: ignore[arg-type]
