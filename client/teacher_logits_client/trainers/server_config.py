"""Training arguments of a ``Trainer`` that has its teacher served; see ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError
from teacher_logits_client.trainers.extras import missing
from teacher_logits_client.trainers.objective import Objective, check_count, check_share
from teacher_logits_client.trainers.served_arguments import ServedTeacherArguments
from teacher_logits_client.trainers.served_teacher import TeacherSettings
from teacher_logits_client.trainers.vocabulary import policy_of

try:
    from transformers import TrainingArguments
except ImportError as error:
    raise missing(error, trainer="transformers", extra="transformers") from error

if TYPE_CHECKING:
    from transformers import Trainer


@dataclass
class TeacherServerConfig(ServedTeacherArguments, TrainingArguments):
    """Training arguments, and the teacher's.

    Names and the meaning of ``beta`` are TRL's. ``lmbda`` is the share of batches that the
    student continues itself, each from its prompt: the tokens in front of the first label.

    Raises:
        ConfigError: a number is outside its range, or ``teacher_server`` is not given.
    """

    top_k: int = field(default=64, metadata={"help": "Ids a position that the teacher hands out."})
    beta: float = field(
        default=0.0,
        metadata={
            "help": "0 is forward KL, 1 reverse KL, between them generalised JSD, as in TRL."
        },
    )
    temperature: float = field(
        default=1.0,
        metadata={"help": "Divides both sides' logits; the loss is multiplied by its square."},
    )
    add_tail: bool = field(
        default=True, metadata={"help": "Take the mass outside the top_k ids as one more category."}
    )
    lmbda: float = field(
        default=0.0,
        metadata={"help": "Share of batches whose completions the student generates itself."},
    )
    max_new_tokens: int = field(
        default=128, metadata={"help": "Longest completion that the student generates."}
    )
    teacher_prefetch: int = field(
        default=2, metadata={"help": "Micro batches whose scores are asked for ahead."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.check()

    def check(self) -> None:
        """Let settings pass that make sense, as they are now: a search, or a callback, sets them.

        Raises:
            ConfigError: a number is outside its range, or ``teacher_server`` is not given.
        """
        check_share("lmbda", self.lmbda)
        check_count("top_k", self.top_k)
        check_count("max_new_tokens", self.max_new_tokens)
        policy_of(self.vocabulary_policy)
        self.objective()
        self.teacher_settings()

    def objective(self) -> Objective:
        """Return the loss that these arguments name."""
        return Objective(beta=self.beta, temperature=self.temperature, add_tail=self.add_tail)

    def teacher_settings(self) -> TeacherSettings:
        """Return where the teacher is, and how it is asked."""
        return TeacherSettings(
            address=self.teacher_server,
            temperature=self.temperature,
            ahead=self.teacher_prefetch,
            timeout=self.teacher_timeout,
            insecure=self.teacher_insecure,
        )


def check_trainer(trainer: Trainer, args: TeacherServerConfig) -> None:
    """Let a trainer pass whose loss is the teacher's alone, over whole rows of its own.

    Raises:
        ConfigError: it has something that would change the loss unseen; or see ``args.check``.
    """
    args.check()
    wrong = ""
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if trainer.label_smoother is not None:
        wrong = "label_smoothing_factor is for labels, and the teacher's probabilities are none"
    elif trainer.compute_loss_func is not None:
        wrong = "compute_loss_func would be ignored: the loss is that of beta and add_tail"
    elif getattr(getattr(trainer.model, "config", None), "is_encoder_decoder", False):
        wrong = (
            "the model is an encoder and a decoder, and the teacher continues input_ids, which "
            "are the encoder's alone: give a causal language model"
        )
    elif args.n_gpu > 1:
        wrong = (
            f"{args.n_gpu} GPUs are visible to one process, and DataParallel cuts batches "
            "behind the trainer's back: launch with torchrun or accelerate, or show it one GPU"
        )
    elif args.lmbda > 0 and _has_shards_alone(trainer):
        wrong = (
            "lmbda above 0 where ranks have shards of the student's weights alone (FSDP, ZeRO-3): "
            "each rank generates by itself"
        )
    elif parallel is not None and (parallel.cp_size > 1 or getattr(parallel, "sp_size", 1) > 1):
        wrong = "rows that are cut over ranks (context or sequence parallel) are not taken here"
    if wrong:
        raise ConfigError(f"a TeacherServerTrainer was given what it cannot keep: {wrong}")


def _has_shards_alone(trainer: Trainer) -> bool:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return bool(trainer.is_fsdp_enabled) or getattr(plugin, "zero_stage", 0) == 3
