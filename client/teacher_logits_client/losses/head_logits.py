"""The logits of a linear head, described and never made: what a loss takes in their place.

Promises: nothing is computed here and nothing copied; hidden states, weight and bias are yours.
Refuses what is no linear head: shapes that do not meet, whole numbers, more than one device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

import torch

from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits_client.losses.fitting import is_dense

_SUCH_AS = {
    "hidden": "the model's last hidden states [P,H] or [N,S,H]",
    "weight": "model.lm_head.weight",
    "bias": "model.lm_head.bias, or None where the head has none",
}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HeadLogits:
    """Logits [...,V] of hidden states [...,H], weight [V,H] and bias [V]; see ``from_hidden``."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    soft_cap: float | None

    def __repr__(self) -> str:
        """Shapes and settings, and not a number of the tensors."""
        bias = "no bias" if self.bias is None else f"bias {list(self.bias.shape)}"
        given = f"hidden {list(self.hidden.shape)}, weight {list(self.weight.shape)}, {bias}"
        settings = f"scale {self.scale}, soft cap {self.soft_cap}"
        return f"<{type(self).__name__} {given}, {settings}, {self.hidden.dtype}, {self.device}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the logits would have."""
        return (*self.hidden.shape[:-1], len(self.weight))

    @property
    def device(self) -> torch.device:
        """Where hidden states and head lie."""
        return self.hidden.device

    def cut(self, columns: int) -> HeadLogits:
        """Return the logits of the first columns alone; the others get no gradient."""
        if columns == len(self.weight):
            return self
        bias = None if self.bias is None else self.bias[:columns]
        return replace(self, weight=self.weight[:columns], bias=bias)


def from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> HeadLogits:
    """Return what any loss here takes in place of logits: those of a linear head, never made.

    ``hidden`` [P,H] or [N,S,H], where logits would be [P,V] or [N,S,V]; ``weight`` [V,H] and
    ``bias`` [V] as in ``torch.nn.Linear``; bf16, fp16, fp32 or fp64, not all the same if you
    like. The logits are y = scale * (hidden @ weight.T + bias) and, with ``soft_cap``,
    soft_cap * tanh(y / soft_cap). A bias of -inf rules a column out, such as one of padding.

    A loss of them is that of the logits in fp32 (fp64 where one of the three is), whatever type
    they come in: products, sums and gradients are accumulated so, and each gradient is rounded
    once, to the type of what it is of. On a GPU, where hidden states and weight are both bf16,
    they are multiplied as such and summed in fp32; the logits' gradient is rounded to bf16 then.

    Forward and backward go over tiles of positions and columns: no array of [P,V] is made, and
    K+1 numbers a position are kept between them. A tensor that wants no gradient costs none:
    for a frozen head give ``weight.detach()``. Autocast is not looked at.

    Raises:
        PayloadInvalidError: shapes that do not meet, or something else than dense floats on
            one device.
        ConfigError: ``scale`` is not finite, or ``soft_cap`` is not a finite number above 0.
    """
    _check_tensors(hidden, weight, bias)
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise ConfigError(f"scale is {scale!r}; give a finite number", facts={"scale": repr(scale)})
    capped = soft_cap is not None
    if capped and not (isinstance(soft_cap, Real) and 0 < soft_cap < math.inf):
        raise ConfigError(
            f"soft_cap is {soft_cap!r}; give a finite number above 0, or None for no cap",
            facts={"soft_cap": repr(soft_cap)},
        )
    return HeadLogits(hidden=hidden, weight=weight, bias=bias, scale=scale, soft_cap=soft_cap)


def _check_tensors(hidden: object, weight: object, bias: object) -> None:
    given = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    devices = set()
    for name, each in given.items():
        if not isinstance(each, torch.Tensor):
            kind = type(each).__name__
            raise PayloadInvalidError(
                f"{name} is of type {kind}; give a tensor, such as {_SUCH_AS[name]}",
                facts={"name": name, "kind": kind},
            )
        if not each.is_floating_point() or not is_dense(each):
            kind = f"{each.dtype} ({'nested' if each.is_nested else each.layout})"
            raise PayloadInvalidError(
                f"{name} is {kind}: give dense floats", facts={"name": name, "kind": kind}
            )
        devices.add(str(each.device))
    if len(devices) > 1:
        raise PayloadInvalidError(
            f"hidden states and head lie on {', '.join(sorted(devices))}; bring them together",
            facts={"devices": ", ".join(sorted(devices))},
        )
    shapes = {name: tuple(each.shape) for name, each in given.items()}  # type: ignore[attr-defined]
    _check_shapes(shapes)


def _check_shapes(shapes: dict[str, tuple[int, ...]]) -> None:
    hidden, weight = shapes["hidden"], shapes["weight"]
    fits = len(hidden) in (2, 3) and len(weight) == 2 and hidden[-1] == weight[1] > 0
    if not fits or shapes.get("bias", weight[:1]) != weight[:1]:
        told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise PayloadInvalidError(
            f"shapes do not meet: {told}; give hidden [P,H] or [N,S,H], weight [V,H] and, if the "
            "head has one, bias [V]",
            facts={name: str(shape) for name, shape in shapes.items()},
        )
