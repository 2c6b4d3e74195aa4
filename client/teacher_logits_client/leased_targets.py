"""Leased targets: targets that let go of their tensors when their lease is closed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import torch

from teacher_logits_client.targets import Targets

Made: TypeAlias = "list[weakref.ref[LeasedTargets]]"
"""Every targets object made under one lease."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LeasedTargets(Targets):
    """Targets that are emptied when their lease is closed, with all that was made from them."""

    made: Made = field(repr=False)

    def __post_init__(self) -> None:
        # `dataclasses.replace`, and with it `rectangular`, hands the same list on.
        self.made.append(weakref.ref(self))

    def empty(self) -> None:
        """Let go of every tensor."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, torch.Tensor):
                object.__setattr__(self, each.name, torch.empty(0, dtype=value.dtype))


def lease_targets(targets: Targets, made: Made) -> LeasedTargets:
    """Return targets that are entered in ``made``, as are all that are made from them."""
    plain = {each.name: getattr(targets, each.name) for each in fields(targets)}
    return LeasedTargets(**plain, made=made)


def empty_all(made: Made) -> None:
    """Empty every targets object that is still there."""
    for reference in made:
        targets = reference()
        if targets is not None:
            targets.empty()
