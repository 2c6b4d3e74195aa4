"""Arguments of TRL's distillation whose teacher is served; see ``trl``."""

from __future__ import annotations

from dataclasses import dataclass, field

from teacher_logits_client.trainers.extras import missing
from teacher_logits_client.trainers.objective import Objective, check_count
from teacher_logits_client.trainers.served_arguments import ServedTeacherArguments
from teacher_logits_client.trainers.served_teacher import TeacherSettings
from teacher_logits_client.trainers.vocabulary import policy_of

try:
    from trl import DistillationConfig
except ImportError as error:
    raise missing(error, trainer="trl", extra="trl") from error


@dataclass
class ServerDistillationConfig(ServedTeacherArguments, DistillationConfig):
    """TRL's ``DistillationConfig``, and the teacher's server.

    ``top_k`` stays what TRL has it for, a filter of the student's sampling: the ids a position
    that the teacher hands out are ``loss_top_k``.

    Raises:
        ConfigError: a number is outside its range, or ``teacher_server`` is not given.
    """

    loss_top_k: int = field(
        default=64, metadata={"help": "Ids a position that the teacher hands out."}
    )
    loss_add_tail: bool = field(
        default=True, metadata={"help": "Take the mass outside them as one more category."}
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
