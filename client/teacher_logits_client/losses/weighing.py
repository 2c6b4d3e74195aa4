"""Weighing: what K+1 numbers a position come to, whoever made them of the student.

Promises: a loss and its gradient's K+1 numbers a position, the same for logits that were given
and for those of a head that are never made. ``coarse`` says what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits_client.losses.tails import (
    NEMO_LOG_FLOOR,
    Tail,
    log_normalised,
    teacher_categories,
)

if TYPE_CHECKING:
    import torch

    from teacher_logits_client.losses.sharding import VocabShard
    from teacher_logits_client.losses.slopes import Divergence


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What a loss needs beside the student's logits, [P,V] or with padding [N*S,V].

    ``ids`` int64 [P,K], -1 where absent; ``log_teacher`` [P,K+1], its log-probabilities at
    ``temperature``, the mass outside last; ``weights`` [P], where 0 leaves a position out
    entirely; ``places`` int64 [P], the row of the logits that each position is at, None where
    that is the position's own number. No two are the same. With ``shard``, the logits are those
    of its columns, and ``ids`` are of the whole vocabulary; ``named`` is the loss with its
    settings in words, and ``entropy`` [P] what is taken off it afterwards, for ranks to agree on.
    """

    ids: torch.Tensor
    log_teacher: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor | None
    temperature: float
    tail: Tail
    divergence: Divergence
    shard: VocabShard | None = None
    named: str = ""
    entropy: torch.Tensor | None = None

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions that count, int64 [R], and their rows of the logits [R]."""
        at = self.weights.nonzero().squeeze(1)
        # Rows of the logits: padding is never among them.
        return at, at if self.places is None else self.places[at]

    def own_ids(self, at: torch.Tensor) -> torch.Tensor:
        """Return which columns of the logits the ids of some positions are, -1 for none [R,K]."""
        return self.ids[at] if self.shard is None else self.shard.own_ids(self.ids[at])

    def own_columns(self, width: int) -> int:
        """Return how many of ``width`` columns are real: what pads a shard is behind them."""
        return width if self.shard is None else self.shard.columns


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighed:
    """The loss, a scalar, and its slopes: ``pulls`` [R,K+1], c_i of the ids and c_0 last;
    ``of_logs`` [R,1], a floor's pulls of the logs outside, 0 where there is none."""

    loss: torch.Tensor
    pulls: torch.Tensor
    of_logs: torch.Tensor


def weigh(coarse: torch.Tensor, entropy: torch.Tensor, inputs: Inputs, at: torch.Tensor) -> Weighed:
    """Return what the positions ``at`` [R] come to.

    ``coarse`` [R,K+1] are logits over temperature, L_out last; ``entropy`` [R,1] is that of the
    student outside the ids, where a floor needs it, and 0 elsewhere.
    """
    weights = inputs.weights[at].to(coarse.dtype) * inputs.temperature
    log_teacher = teacher_categories(
        inputs.log_teacher[at].to(coarse.dtype), inputs.ids[at], inputs.tail
    )
    log_student = log_normalised(coarse)
    if inputs.tail is Tail.NEMO_FLOOR:
        log_teacher[:, -1:] = NEMO_LOG_FLOOR + entropy
    values, slopes = inputs.divergence(log_teacher, log_student)
    if inputs.tail is Tail.TRUNCATED:
        values[:, -1], slopes[:, -1] = 0.0, 0.0
    student = log_student.exp()
    pulls = slopes - student * slopes.sum(1, keepdim=True)
    pulls[:, -1:] += student[:, -1:] * entropy
    return Weighed(
        loss=(values.sum(1) * weights).sum() * inputs.temperature,
        pulls=pulls * weights.unsqueeze(1),
        of_logs=student[:, -1:] * weights.unsqueeze(1),
    )
