"""What lies outside the K ids, summed up tile by tile: its log-sum-exp and its entropy.

A running maximum m goes with the sums; when it grows by d they shrink by exp(-d):

    s = Σ exp(z_j - m)                     L_out = m + log s
    e = Σ exp(z_j - m) (z_j - m)           entropy = log s - e / s

Promises: one number a position and sum, whatever order the tiles come in; -inf where nothing
is outside; a NaN stays one.
"""

from __future__ import annotations

import torch

from teacher_logits_client.losses.powers import powers
from teacher_logits_client.targets import ABSENT_LOGPROB


class Outside:
    """Running sums over the logits outside, a row for each of ``count`` positions."""

    def __init__(
        self, count: int, *, dtype: torch.dtype, device: torch.device, with_entropy: bool
    ) -> None:
        self._top = torch.full((count, 1), -torch.inf, dtype=dtype, device=device)
        self._sums = torch.zeros_like(self._top)
        self._products = torch.zeros_like(self._top) if with_entropy else None

    def add(self, positions: slice, logits: torch.Tensor) -> None:
        """Add logits [c,n] of some positions, -inf at the ids. They are overwritten."""
        top, sums = self._top[positions], self._sums[positions]
        largest = torch.maximum(top, logits.amax(1, keepdim=True))
        base = largest.masked_fill(largest == -torch.inf, 0.0)
        fall = top - base
        shrink = fall.exp()
        logits.sub_(base)
        logs = None if self._products is None else logits.clamp_min(ABSENT_LOGPROB)
        powers(logits)
        if self._products is not None and logs is not None:
            products = self._products[positions]
            products.add_(sums * fall.clamp_min(ABSENT_LOGPROB)).mul_(shrink)
            products.add_(logs.mul_(logits).sum(1, keepdim=True))
        sums.mul_(shrink).add_(logits.sum(1, keepdim=True))
        top.copy_(largest)

    def log_sum(self) -> torch.Tensor:
        """Return L_out [R,1]."""
        return self._top.masked_fill(self._sums == 0, 0.0) + self._sums.log()

    def entropy(self) -> torch.Tensor:
        """Return the entropy [R,1] of the softmax outside; 0 where nothing is, or none is kept."""
        if self._products is None:
            return torch.zeros_like(self._sums)
        inside = self._sums.log() - self._products / self._sums
        return inside.masked_fill(self._sums == 0, 0.0)
