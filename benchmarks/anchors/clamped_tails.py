"""Anchors: the student's tail as 1 minus a sum, kept from zero by a clamp or an epsilon.

    trl                 TRL's own function, where it is installed: log-sum clamped at -1e-7
    remainder_clamped   1 - sum, at least 1e-8, as Megatron-LM's ghost token has it
    remainder_plus_eps  1 - sum + 1e-8, as DistillKit's has it; written here as the formula says

Each takes the student's log-probabilities of the K ids [P,K] and returns its tail's [P,1].
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

EPSILON = 1e-8


def trl(chosen: torch.Tensor) -> torch.Tensor:
    """TRL 1.16's tail bucket."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_distillation import async_distillation_trainer as trl

    present = torch.ones_like(chosen, dtype=torch.bool)
    with_tail: torch.Tensor = trl._add_tail_bucket(chosen, present)[0]
    return with_tail[:, -1:]


def remainder_clamped(chosen: torch.Tensor) -> torch.Tensor:
    """The remainder in probabilities, clamped."""
    return (1 - chosen.exp().sum(1, keepdim=True)).clamp_min(EPSILON).log()


def remainder_plus_eps(chosen: torch.Tensor) -> torch.Tensor:
    """The remainder in probabilities, with an epsilon added."""
    return (1 - chosen.exp().sum(1, keepdim=True) + EPSILON).log()


CLAMPED_TAILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    each.__name__: each for each in (trl, remainder_clamped, remainder_plus_eps)
}
