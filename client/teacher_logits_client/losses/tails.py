"""Tails: what a loss makes of the mass outside the K ids. There are five ways, each by its name.

They differ in what the student learns of that mass (docs/math.md, "The tail"), which is why none
stands in for another silently: renormalised losses are blind to it, a renormalised teacher has it
vanish, a truncated sum may fall below 0, and NeMo RL's floor pushes it out at 100 nats.

Refuses what teaches nothing or is infinite whatever the student does.
"""

from __future__ import annotations

from enum import Enum

import torch

from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits_client.targets import ABSENT_LOGPROB

NEMO_LOG_FLOOR = -100.0
"""The teacher's log-probability of each id outside the K, under ``Tail.NEMO_FLOOR``."""


class Tail(Enum):
    """What becomes of everything but the K ids."""

    BUCKET = "bucket"
    """One more category on both sides: a true divergence, the one that agrees on all mass."""

    RENORMALISED = "renormalised"
    """Both sides divided by their mass on the K ids, each position as if nothing else were."""

    TEACHER_RENORMALISED = "teacher_renormalised"
    """The teacher divided by its mass on the K ids, 0 outside; the student left whole."""

    TRUNCATED = "truncated"
    """Nothing renormalised, and the terms of everything outside left out of the sum."""

    NEMO_FLOOR = "nemo_floor"
    """As ``TEACHER_RENORMALISED``, but with log-probability -100 at each id outside: finite in
    reverse KL, and what NeMo RL does there with ``zero_outside_topk``."""

    @property
    def teacher_has_none(self) -> bool:
        """The teacher is renormalised on the K ids, and the student is not."""
        return self in (Tail.TEACHER_RENORMALISED, Tail.NEMO_FLOOR)


def check_tail(tail: object, *, width: int, at_reverse_kl: bool) -> None:
    """Let a way pass that teaches something at K = ``width``.

    Raises:
        ConfigError: it is no ``Tail``, or makes no sense with this divergence.
        PayloadInvalidError: K is 0, or is 1 and both sides are renormalised: the loss is 0
            whatever the student says.
    """
    if not isinstance(tail, Tail):
        ways = ", ".join(f"Tail.{each.name}" for each in Tail)
        raise ConfigError(
            f"tail is {tail!r}, a {type(tail).__name__}: give one of {ways}",
            facts={"given": type(tail).__name__},
        )
    least = 2 if tail is Tail.RENORMALISED else 1
    if width < least:
        raise PayloadInvalidError(
            f"the targets have K = {width}, where a loss with Tail.{tail.name} is 0 whatever the "
            f"student says; open the session with top_k of at least {least}"
            + (", or take Tail.BUCKET" if width else ""),
            facts={"k": width, "least": least, "tail": tail.value},
        )
    if at_reverse_kl and tail is Tail.TEACHER_RENORMALISED:
        raise ConfigError(
            "reverse KL against a teacher renormalised on its K ids is infinite wherever the "
            "student has mass outside them; take Tail.BUCKET, or Tail.NEMO_FLOOR for -100 there",
            facts={"tail": tail.value},
        )
    if not at_reverse_kl and tail is Tail.NEMO_FLOOR:
        raise ConfigError(
            "a floor under the teacher's log-probabilities changes nothing but reverse KL; take "
            "Tail.TEACHER_RENORMALISED, which is what NeMo RL computes elsewhere",
            facts={"tail": tail.value},
        )


def teacher_categories(log_teacher: torch.Tensor, ids: torch.Tensor, tail: Tail) -> torch.Tensor:
    """Return the teacher's log-probabilities [R,K+1] under ``tail``, -inf where nothing is.

    ``log_teacher`` [R,K+1] are the true ones, the mass outside last.
    """
    log_teacher = log_teacher.masked_fill(log_teacher <= ABSENT_LOGPROB, -torch.inf)
    if tail in (Tail.BUCKET, Tail.TRUNCATED):
        return log_teacher
    entries = log_teacher[:, :-1].masked_fill(ids < 0, -torch.inf)
    outside = torch.full_like(log_teacher[:, -1:], -torch.inf)
    return torch.cat([log_normalised(entries), outside], 1)


def log_normalised(values: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of each row [R,C]; a row of nothing but -inf stays that."""
    empty = (values == -torch.inf).all(1, keepdim=True)
    return values.log_softmax(1).masked_fill(empty, -torch.inf)
