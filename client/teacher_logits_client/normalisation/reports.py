"""What a finished step says: the sums, counts and means of all its ranks, the same on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """One loss over the whole step, reduced over its ranks.

    ``sums`` and ``counts`` [B] have one number a bin. ``denominator`` is Σ w_b C_b, and ``mean``
    is Σ w_b S_b over it; it and ``sums`` are 0 where nothing counted.
    """

    sums: tuple[float, ...]
    counts: tuple[float, ...]
    denominator: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A step over all its ranks. Each of the ``ranks`` of the reduction has the same one.

    ``loss`` is the weighted sum of the losses' means. ``reason`` says why an optimizer should not
    step, and is None where it should; what weighs 0 has no say in either. Where no loss counted
    anything all gradients are 0, and one that has momentum or decays weights would move the
    parameters all the same. Where a loss is NaN its gradients are too, and would end the training.
    An infinite loss is no reason: the gradients of ours are finite then. Those of another, or fp16
    that overflowed, are seen in the gradient norm alone (``gradient_norms``).
    """

    step: int
    attempt: int
    ranks: int
    loss: float
    losses: Mapping[str, LossReport]
    reason: str | None = None

    @property
    def should_step(self) -> bool:
        """Whether an optimizer should step, the same on every rank."""
        return self.reason is None
