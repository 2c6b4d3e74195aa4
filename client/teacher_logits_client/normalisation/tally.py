"""The sums and counts of one loss, as its micro batches come in on this rank.

Promises float64 whatever the loss computes in (fp32 counts lose whole tokens above 2**24), and
no wait for a device before the step is finished. A count that is not finite or below 0 is
remembered, and so are gradients that went elsewhere than to the loss's parameters; both travel
with the sums: so all ranks refuse the step together, and none is left waiting for the rank that
saw it.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits_client.normalisation.gradients import gradients_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.normalisation.step_losses import StepLoss


class Tally:
    """What one loss has summed and counted so far, [B] each."""

    def __init__(self, loss: StepLoss, *, is_trained: bool) -> None:
        """Take the loss; gradients of one that is not trained have nowhere to go."""
        self.loss = loss
        self._is_trained = is_trained
        self._has_gone_back = False
        self._sums = torch.zeros(loss.bins, dtype=torch.float64)
        self._counts = torch.zeros(loss.bins, dtype=torch.float64)
        self._bad_counts = torch.zeros(1, dtype=torch.float64)
        self._numbers: set[int | str] = set()

    def has(self, number: int | str) -> bool:
        """Whether this micro batch was added already."""
        return number in self._numbers

    def add(self, number: int | str, loss_sum: torch.Tensor, count: torch.Tensor | float) -> None:
        """Add a micro batch.

        Raises:
            PayloadInvalidError: not one number a bin, or something else than a tensor and numbers;
                nothing was added.
            ConfigError: a sum that needs a gradient, of a loss whose parameters were given and
                turned out to be none; nothing was added.
        """
        _check_kinds(number, loss_sum, count)
        _check_trains(self.loss, loss_sum)
        sums = loss_sum.detach().reshape(-1)
        counts = torch.as_tensor(count, dtype=torch.float64).detach().reshape(-1)
        if not (len(sums) == len(counts) == self.loss.bins and sums.is_floating_point()):
            raise PayloadInvalidError(
                f"micro batch {number} has a sum of shape {tuple(loss_sum.shape)} in "
                f"{loss_sum.dtype} and {len(counts)} counts for the loss {self.loss.name!r} of "
                f"{self.loss.bins} bins; give one floating-point sum and one count a bin",
                facts={
                    "micro_batch": number,
                    "sums": len(sums),
                    "counts": len(counts),
                    "bins": self.loss.bins,
                },
            )
        counts = counts.to(sums.device)
        bad = ~(counts.isfinite() & (counts >= 0))
        self._sums = self._sums.to(sums.device) + sums.double()
        self._counts = self._counts.to(sums.device) + counts
        self._bad_counts = self._bad_counts.to(sums.device) + bad.sum()
        self._numbers.add(number)
        if loss_sum.requires_grad:
            loss_sum.register_hook(self._note_backward)

    def _note_backward(self, gradient: torch.Tensor) -> None:
        self._has_gone_back = True

    @property
    def _is_undivided(self) -> bool:
        """Whether gradients were made, and are not where they would be divided."""
        parameters = self.loss.parameters
        if not self._has_gone_back or (self._is_trained and not parameters):
            return False
        return not any(True for _ in gradients_of(parameters))

    def values(self) -> list[float]:
        """Return [undivided, bad counts, counts[B], sums[B]]: zeros on an idle rank."""
        found: list[float] = torch.cat([self._bad_counts, self._counts, self._sums]).tolist()
        return [float(self._is_undivided), *found]


def _check_kinds(number: int | str, loss_sum: object, count: object) -> None:
    """Let a sum pass that is a tensor, and a count that is numbers."""
    if not isinstance(loss_sum, torch.Tensor):
        raise PayloadInvalidError(
            f"the sum of micro batch {number} is {loss_sum!r}, a {type(loss_sum).__name__}; give "
            "the tensor that the loss returned, which backward is called on",
            facts={"micro_batch": number, "given": type(loss_sum).__name__},
        )
    each = count if isinstance(count, list | tuple) else [count]
    for one in each:
        is_tensor = isinstance(one, torch.Tensor) and not one.is_complex()
        if not (is_tensor or isinstance(one, Real)):
            raise PayloadInvalidError(
                f"the count of micro batch {number} is {count!r}, a {type(count).__name__}; give a "
                "number, or a tensor of one a bin",
                facts={"micro_batch": number, "given": type(count).__name__},
            )


def _check_trains(loss: StepLoss, loss_sum: torch.Tensor) -> None:
    """Refuse a sum whose gradients would be left as they are, undivided."""
    if loss.ran_out and loss_sum.requires_grad:
        raise ConfigError(
            f"parameters of the loss {loss.name!r} were given and turned out to be none, so "
            "gradients would never be divided: a generator, such as model.parameters(), is empty "
            "once it was read; give list(model.parameters()), and () where a rank has none",
            facts={"loss": loss.name},
        )


def weighted(loss: StepLoss, each: Sequence[float]) -> float:
    """Return Σ w_b x_b; a bin that weighs 0 is left out, whatever it holds."""
    return sum(w * x for w, x in zip(loss.bin_weights, each, strict=True) if w > 0)


def weighted_loss(loss: StepLoss, loss_sum: torch.Tensor) -> torch.Tensor:
    """Return the scalar to call ``backward`` on: the loss's weight times Σ w_b S_b, undivided."""
    parts = [
        part if weight == 1 else part * weight
        for part, weight in zip(loss_sum.reshape(-1), loss.bin_weights, strict=True)
        if weight > 0
    ]
    whole = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    return whole if loss.weight == 1 else whole * loss.weight
