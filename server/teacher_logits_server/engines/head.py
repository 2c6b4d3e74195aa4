"""A model's output head, run over a few positions at a time.

    hidden [P,H]  ->  chunks [c,V], fp32, in one buffer for all of a call

The whole [P,V] never exists: at V = 151,936 it takes 608 KB a position. What some models do to
their logits behind the head (a scale, a soft cap) is done here too; which of them a model does
is tried against the model's own logits when it is loaded, since configs state such numbers
under one name and models multiply or divide by them.

Matrices in 16 bits answer in fp32 on a CUDA device, where that costs nothing. On a CPU they
answer in their own type, as the model itself does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Peak memory of a chunk, by kind of device."""
MIN_CHUNK_POSITIONS = 64
"""Fewer make the matrix product slow: 32 cost 1.3 to 1.7 times as much."""

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


@dataclass(frozen=True, kw_only=True)
class Transform:
    """What is done to logits behind the head: ``softcap * tanh(scale * logits / softcap)``."""

    scale: float = 1.0
    softcap: float = 0.0

    def apply(self, logits: torch.Tensor) -> None:
        """Do it, in place. A soft cap of 0 is none."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)


def likely_transforms(config: object) -> list[Transform]:
    """Return what a model with this config may do to its logits, the likeliest first."""
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= _number(config, name) or 1.0
    softcap = _number(config, "final_logit_softcapping")
    divisor = _number(config, "logits_scaling") or 1.0
    found = [
        Transform(scale=scale / divisor, softcap=softcap),
        Transform(scale=scale * divisor, softcap=softcap),
        Transform(softcap=softcap),
        Transform(),
    ]
    return list(dict.fromkeys(found))


def _number(config: object, name: str) -> float:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else 0.0


def chunk_positions(budget_bytes: int, *, width: int, weight_bytes: int) -> int:
    """Return how many positions a chunk has, never fewer than 64.

    A 16-bit product takes room beside its fp32 copy (docs/math.md, "Memory of a chunk").
    """
    each = width * (4 if weight_bytes == 4 else 4 + weight_bytes)
    return max(budget_bytes // each, MIN_CHUNK_POSITIONS)


class Head:
    """The head of one model."""

    def __init__(self, module: nn.Module, *, transform: Transform, budget_bytes: int) -> None:
        """Take a model's head; its weights stay the model's."""
        weight = module.weight
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{type(module).__name__} has no weight")
        self.rows = int(weight.shape[0])
        self._module = module
        # A subclass may compute something else than weight and bias say.
        self._plain = type(module) is nn.Linear and weight.dtype.is_floating_point
        self._transform = transform
        self._positions = chunk_positions(
            budget_bytes, width=self.rows, weight_bytes=weight.element_size()
        )
        self._wide_product = self._plain and _answers_in_fp32(weight)

    def chunks(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits of ``hidden`` [P,H], fp32 [c,V] each; a chunk lasts until the next."""
        # Not kept for the next call: the body would then run beside it.
        buffer = torch.empty(min(self._positions, len(hidden)), self.rows, device=hidden.device)
        for start in range(0, len(hidden), self._positions):
            part = hidden[start : start + self._positions]
            logits = buffer[: len(part)]
            with torch.no_grad():
                self._project(part, logits)
                self._transform.apply(logits)
            yield logits

    def _project(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        module = self._module
        if not self._plain or not isinstance(module, nn.Linear):
            out.copy_(module(hidden))
            return
        if module.weight.dtype == torch.float32:
            torch.mm(hidden, module.weight.t(), out=out)
        elif self._wide_product:
            out.copy_(torch.mm(hidden, module.weight.t(), out_dtype=torch.float32))
        else:
            out.copy_(torch.mm(hidden, module.weight.t()))
        if module.bias is not None:
            out.add_(module.bias)


def _answers_in_fp32(weight: torch.Tensor) -> bool:
    """Return whether this torch multiplies such matrices into an fp32 result."""
    if weight.device.type != "cuda" or weight.element_size() != 2:
        return False
    few = weight[:16].detach()
    try:
        torch.mm(few, few.t(), out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def find_head(
    module: nn.Module,
    *,
    config: object,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    budget_bytes: int,
) -> Head | None:
    """Return the head that turns ``hidden`` [P,H] into the model's own ``logits`` [P,V].

    Tries what the config may mean, the likeliest first; None where nothing agrees. The two may
    differ by a few steps of the model's arithmetic at the largest logit.
    """
    own = logits.float()
    steps = 64 if logits.dtype == torch.float32 else 4
    tolerance = steps * torch.finfo(logits.dtype).eps * max(1e-6, float(own.abs().max()))
    for transform in likely_transforms(config):
        head = Head(module, transform=transform, budget_bytes=budget_bytes)
        if head.rows != own.shape[1]:
            return None
        ours = torch.cat([chunk.clone() for chunk in head.chunks(hidden)])
        if float((ours - own).abs().max()) <= tolerance:
            return head
    return None
