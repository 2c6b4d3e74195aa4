"""The losses of a step: what each is called, how its bins weigh, and which parameters it trains.

Promises that every parameter has one denominator. Refuses losses of one name, a parameter that
two losses name, and weights that no mean can be made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLoss:
    """One loss of a step, with a denominator of its own.

    ``parameters`` are those whose gradients are divided by this loss's count; no other loss may
    reach them, so detach what a draft loss takes from the policy. Where backward was called and
    none of them has a gradient, such as those of another model, the step is refused. Left out or
    ``()`` for an evaluation, and on a rank that holds none of them, or divides by itself.
    Read once, when this is made: something else that turns out to be empty, such as a generator
    that an optimizer was made of before, is refused with the first sum that needs a gradient.
    ``weight`` multiplies the loss where gradients are made of it, and in ``StepReport.loss``;
    its own mean is reported without it. A loss that weighs 0 is reported and nothing else: its
    parameters get gradients of 0, and ``StepReport.loss`` and whether to step leave it out.
    ``bin_weights`` [B], at least 0 and one of them above, weigh the sums and the counts of bins
    (passes, slots, teachers) alike: the mean is Σ w_b S_b / Σ w_b C_b. One bin unless more are
    given.

    Raises:
        ConfigError: parameters that are no tensors, a name that is no text, or weights that no
            mean can be made of.
    """

    name: str = "loss"
    parameters: Iterable[torch.Tensor] = ()
    weight: float = 1.0
    bin_weights: Sequence[float] = (1.0,)
    ran_out: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(
                f"name: a loss is called {self.name!r}, a {type(self.name).__name__}; give text",
                facts={"given": type(self.name).__name__},
            )
        # Tied parameters are named twice and have one gradient.
        each = {id(parameter): parameter for parameter in _tensors(self)}
        object.__setattr__(self, "ran_out", not each and self.parameters != ())
        object.__setattr__(self, "parameters", tuple(each.values()))
        object.__setattr__(self, "weight", _number("weight", self.weight))
        object.__setattr__(self, "bin_weights", _numbers("bin_weights", self.bin_weights))
        for number, weight in enumerate(self.bin_weights):
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(
                    f"bin_weights: bin {number} of the loss {self.name!r} weighs {weight}; "
                    "weights are finite and at least 0",
                    facts={"loss": self.name, "bin": number, "weight": weight},
                )
        if not any(self.bin_weights) or not math.isfinite(self.weight):
            raise ConfigError(
                f"the loss {self.name!r} has the weight {self.weight} and "
                f"{len(self.bin_weights)} bins, of which none weighs more than 0 or its own "
                "weight is not finite; give a finite weight and one bin above 0",
                facts={
                    "loss": self.name,
                    "weight": self.weight,
                    "bins": len(self.bin_weights),
                },
            )

    @property
    def bins(self) -> int:
        """How many bins its sums and counts have."""
        return len(self.bin_weights)


def _numbers(name: str, given: object) -> tuple[float, ...]:
    """Return an iterable of numbers, such as a tensor of them, as floats."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return tuple(_number(f"one of {name}", each) for each in _each(name, given))
    raise ConfigError(
        f"{name} is {given!r}, a {type(given).__name__}; give a sequence of numbers, one a bin",
        facts={"name": name, "given": type(given).__name__},
    )


def _each(name: str, given: Iterable[object]) -> Iterator[object]:
    try:
        yield from given
    except TypeError:  # A tensor of no dimension says so only here.
        raise ConfigError(
            f"{name} is {given!r}, a single number; give a sequence, one a bin",
            facts={"name": name, "given": type(given).__name__},
        ) from None


def _number(name: str, given: object) -> float:
    """Return a number as a float; a tensor of one element is one."""
    single = isinstance(given, torch.Tensor) and given.numel() == 1 and not given.is_complex()
    if not (single or isinstance(given, Real)):
        raise ConfigError(
            f"{name} is {given!r}, a {type(given).__name__}; give a number",
            facts={"name": name, "given": type(given).__name__},
        )
    return float(given)  # type: ignore[arg-type]


def _tensors(loss: StepLoss) -> Iterator[torch.Tensor]:
    """Yield a loss's parameters: what has no gradient of its own would never be divided."""
    given: object = loss.parameters
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise ConfigError(
            f"parameters: the loss {loss.name!r} was given a {type(given).__name__}; give an "
            "iterable of tensors, such as model.parameters() or [tensor]",
            facts={"loss": loss.name, "given": type(given).__name__},
        )
    for number, parameter in enumerate(given):
        if not isinstance(parameter, torch.Tensor):
            raise ConfigError(
                f"parameters: number {number} of the loss {loss.name!r} is a "
                f"{type(parameter).__name__}; give tensors, such as model.parameters(), without "
                "their names or groups",
                facts={"loss": loss.name, "given": type(parameter).__name__},
            )
        yield parameter


def check_losses(losses: Sequence[StepLoss]) -> None:
    """Raise ConfigError where two losses have one name or one parameter, or one is none."""
    owners: dict[int, str] = {}
    names: set[str] = set()
    for loss in losses:
        if not isinstance(loss, StepLoss):
            raise ConfigError(
                f"losses: one is a {type(loss).__name__}; give each as "
                "StepLoss(parameters=model.parameters())",
                facts={"given": type(loss).__name__},
            )
        if loss.name in names:
            raise ConfigError(
                f"losses: two are called {loss.name!r}; give each a name of its own",
                facts={"loss": loss.name},
            )
        names.add(loss.name)
        for parameter in loss.parameters:
            other = owners.setdefault(id(parameter), loss.name)
            if other != loss.name:
                raise ConfigError(
                    f"parameters: one of shape {tuple(parameter.shape)} is named by the losses "
                    f"{other!r} and {loss.name!r}; a gradient has one denominator, so name it "
                    "once, and detach what the other loss takes from it",
                    facts={"loss": loss.name, "other": other},
                )
