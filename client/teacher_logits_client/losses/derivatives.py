"""Derivatives in closed form: what backward keeps of forward, and that there is no second one.

Promises: tensors made under ``torch.inference_mode``, as a frozen teacher's logits or head are,
may be kept; torch would refuse them. Refuses a second derivative when it is asked for: torch's
``once_differentiable`` takes it for 0 unless what comes from above has a gradient of its own, so
a penalty of a loss's gradient would have no effect, and nobody would hear of it.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.errors import RequestInvalidError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.function import FunctionCtx

    Gradients = tuple[torch.Tensor | None, ...]
    Backward = Callable[[FunctionCtx, torch.Tensor], Gradients]


def save(ctx: FunctionCtx, *tensors: torch.Tensor | None) -> None:
    """Keep tensors for ``saved``; once in each forward."""
    # Nothing counts versions of an inference tensor, so autograd has no place for it.
    apart = [None if each is None or not each.is_inference() else each for each in tensors]
    ctx.apart = apart  # type: ignore[attr-defined]
    ctx.save_for_backward(
        *(each if one is None else None for each, one in zip(tensors, apart, strict=True))  # type: ignore[arg-type]
    )


def saved(ctx: FunctionCtx) -> tuple[torch.Tensor, ...]:
    """Return what was saved, in its order."""
    both = zip(ctx.saved_tensors, ctx.apart, strict=True)  # type: ignore[attr-defined]
    return tuple(one if each is None else each for each, one in both)


def first_only(backward: Backward) -> Backward:
    """Have a backward's gradients refuse to be differentiated."""

    @wraps(backward)
    def checked(ctx: FunctionCtx, upstream: torch.Tensor) -> Gradients:
        with torch.no_grad():
            found = backward(ctx, upstream)
        if not torch.is_grad_enabled():
            return found
        anchor = torch.zeros((), requires_grad=True)
        return tuple(
            cast("torch.Tensor", _Last.apply(each, anchor))  # type: ignore[no-untyped-call]
            if isinstance(each, torch.Tensor)
            else each
            for each in found
        )

    return checked


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gradient: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> None:
        raise RequestInvalidError(
            "the gradient of a loss was differentiated again, and losses here have first "
            "derivatives only, in closed form: leave out the penalty of its gradient, or what "
            "else has create_graph=True, or compute this loss by plain autograd"
        )
