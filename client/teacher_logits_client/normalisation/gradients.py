"""Gradients of a step: emptied, rescaled once, and measured over all ranks that hold some.

A gradient is a parameter's ``grad`` and, where a framework accumulates beside it, its
``main_grad`` (Megatron). Nothing here divides by 0, and a gradient whose loss counted nothing is
set to 0 rather than multiplied by it: 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import ConfigError
from teacher_logits_client.normalisation.reductions import sum_over_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_client.normalisation.reductions import Reduction


class RescaleOrder(Enum):
    """How gradients come to their denominators."""

    DIRECT = "direct"
    """Each loss's gradients are divided once, by its own count. One rounding."""
    SCALE_THEN_CORRECT = "scale_then_correct"
    """As NeMo RL: all by the first loss's count N, then each other's times N over its own D.

    For parity with it alone: one rounding more, and no gradient for any loss where N is 0.
    """


def gradients_of(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield every gradient that the parameters hold."""
    for parameter in parameters:
        for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
            if isinstance(gradient, torch.Tensor):
                yield gradient


def empty_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Leave the parameters without gradients; what a framework owns is set to 0 in place."""
    for parameter in parameters:
        parameter.grad = None
        for gradient in gradients_of([parameter]):
            gradient.zero_()


@torch.no_grad()
def divide_gradients(parameters: Iterable[torch.Tensor], denominator: float) -> None:
    """Divide the gradients in place; ones over 0 become 0."""
    for gradient in gradients_of(parameters):
        if denominator > 0:
            gradient.div_(denominator)
        else:
            gradient.zero_()


@torch.no_grad()
def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply the gradients in place; ones times 0 become 0."""
    for gradient in gradients_of(parameters):
        if factor > 0:
            gradient.mul_(factor)
        else:
            gradient.zero_()


def gradient_norms(
    owned: Mapping[str, Iterable[torch.Tensor]], reduction: Reduction | None = None
) -> dict[str, float]:
    """Return the L2 norm of each group's gradients over all ranks, the same on each rank.

    ``owned`` has, under each group's name, the parameters that this rank owns: none where
    another rank has them. Every rank of ``reduction`` (pipeline and tensor parallel) calls it,
    with the same names in the same order, since all groups travel in one sum of squares, float64.
    A parameter that several ranks hold alike is named by one of them. Call it when the gradients
    are complete: after ``finish``, and after the framework's own reduction.

    Raises:
        RequestInvalidError: the ranks name different groups.
        ConfigError: ``owned`` is no mapping of names to tensors.
    """
    groups = _tensors_of(owned)
    squares = [_sum_of_squares(parameters) for parameters in groups.values()]
    sums, _ = sum_over_ranks(squares, reduction, agreed=f"gradient norms of {list(groups)}")
    return {name: each**0.5 for name, each in zip(groups, sums, strict=True)}


def _tensors_of(owned: object) -> dict[str, list[torch.Tensor]]:
    """Return each group's parameters as a list: an iterable may be read once."""
    if not isinstance(owned, Mapping):
        raise ConfigError(
            f"owned is a {type(owned).__name__}; give the parameters under each group's name, such "
            'as {"policy": model.parameters()}',
            facts={"given": type(owned).__name__},
        )
    found = {}
    for name, given in owned.items():
        several = isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
        found[name] = list(given) if several else []
        wrong = [each for each in found[name] if not isinstance(each, torch.Tensor)]
        if not several or wrong:
            kind = type(wrong[0]).__name__ if wrong else type(given).__name__
            raise ConfigError(
                f"owned: the group {name!r} {'holds' if wrong else 'is'} a {kind}; give an "
                "iterable of tensors, such as model.parameters() or [tensor]",
                facts={"group": str(name), "given": kind},
            )
    return found


def _sum_of_squares(parameters: Iterable[torch.Tensor]) -> float:
    norms = [
        torch.linalg.vector_norm(
            gradient.detach(),
            dtype=torch.float64 if gradient.dtype == torch.float64 else torch.float32,
        ).double()
        for gradient in gradients_of(parameters)
    ]
    # Stacked where they lie, so that a device is waited for once.
    on_one = [each.to(norms[0].device) for each in norms]
    return float(torch.stack(on_one).square().sum()) if on_one else 0.0
