"""The loss of a trainer: which divergence, at which temperature, with or without the tail.

The names are TRL's, and so is the meaning of ``beta``. Promises a sum and a count, as every loss
of ``teacher_logits_client.losses``; the trainer divides, once, by the whole step's count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError
from teacher_logits.grid import is_size
from teacher_logits_client.losses import Tail, generalised_jsd

if TYPE_CHECKING:
    import torch

    from teacher_logits_client.losses import HeadLogits
    from teacher_logits_client.targets import Targets


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A divergence between teacher and student over the K ids.

    ``beta`` 0 is forward KL, 1 reverse KL, between them the generalised Jensen-Shannon
    divergence. ``temperature`` divides the logits of both. ``add_tail`` makes the mass outside
    the K ids one category more; without it both sides are renormalised on the K, and the
    student learns nothing about that mass. ``tempered_scale`` multiplies by temperature², as
    the losses do, so that the gradient's size does not depend on it; TRL does not.

    Raises:
        ConfigError: a number is outside its range.
    """

    beta: float = 0.0
    temperature: float = 1.0
    add_tail: bool = True
    tempered_scale: bool = True

    def __post_init__(self) -> None:
        check_share("beta", self.beta)
        if not isinstance(self.temperature, Real) or not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature!r}: give a number above 0",
                facts={"temperature": repr(self.temperature)},
            )

    @property
    def tail(self) -> Tail:
        """What becomes of the mass outside the K ids."""
        return Tail.BUCKET if self.add_tail else Tail.RENORMALISED

    @property
    def other_temperatures(self) -> tuple[float, ...]:
        """Temperatures that the teacher has to be asked for; 1 is always there."""
        return () if self.temperature == 1 else (self.temperature,)

    def sum_and_count(
        self, logits: torch.Tensor | HeadLogits, targets: Targets, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss summed over positions, and how many they are.

        Raises:
            PayloadInvalidError, LeaseLostError: see ``losses.forward_kl``.
        """
        loss_sum, count = generalised_jsd(logits, targets, mask, beta=self.beta, tail=self.tail)
        return (loss_sum if self.tempered_scale else loss_sum / self.temperature**2), count


def check_share(name: str, share: float) -> None:
    """Let a number from 0 to 1 pass.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(share, Real) or not 0 <= share <= 1:
        raise ConfigError(
            f"{name} is {share!r}: give a number from 0 to 1", facts={name: repr(share)}
        )


def check_count(name: str, count: object) -> None:
    """Let a whole number from 1 on pass.

    Raises:
        ConfigError: it is none.
    """
    if not is_size(count):
        raise ConfigError(
            f"{name} is {count!r}: give a whole number from 1 on", facts={name: repr(count)}
        )
