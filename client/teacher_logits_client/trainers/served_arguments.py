"""The arguments that every trainer of a served teacher has."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ServedTeacherArguments:
    """Where the teacher is and how it is asked, beside a trainer's own arguments."""

    teacher_server: str | None = field(
        default=None, metadata={"help": "Address of the teacher's server: unix:/path or host:port."}
    )
    teacher_id: str = field(
        default="", metadata={"help": "Which of the server's teachers, where it has several."}
    )
    teacher_timeout: float | None = field(
        default=None,
        metadata={"help": "Seconds for one request, and to find the server; else its own, and 60."},
    )
    loss_from_hidden: bool = field(
        default=False,
        metadata={"help": "Take the loss from hidden states: no array of all logits is made."},
    )
    vocabulary_policy: str = field(
        default="strict",
        metadata={"help": "'truncate' masks the teacher's ids beyond the student's head."},
    )
    teacher_insecure: bool = field(
        default=False, metadata={"help": "Allow a server on another host, unencrypted."}
    )
