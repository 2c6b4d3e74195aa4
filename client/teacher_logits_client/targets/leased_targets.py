"""Leased targets: targets that let go of their tensors when their lease is closed.

Whoever asks them for a tensor after that has a ``LeaseLostError``, as from all else of a lease.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import LeaseLostError
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.errors import Fact


class Made:
    """Every targets object made under one lease or several, and whether that is still open.

    Args:
        what: what was leased, as in "lease 5 of payload 7".
        again: how it is to be had again.
        facts: of errors about it.
    """

    def __init__(self, *, what: str, again: str, facts: Mapping[str, Fact]) -> None:
        self._what = what
        self._again = again
        self.facts = facts
        self._targets: list[weakref.ref[LeasedTargets]] = []
        self.is_over = False

    def enter(self, targets: LeasedTargets) -> None:
        """Remember targets, to empty them with the lease."""
        self._targets.append(weakref.ref(targets))

    def empty_all(self) -> None:
        """Note the end of the lease, and empty every targets object that is still there."""
        self.is_over = True
        for reference in self._targets:
            targets = reference()
            if targets is not None:
                targets.empty()

    def check_open(self) -> None:
        """Let what a lease gave pass while that is open.

        Raises:
            LeaseLostError: the lease is closed.
        """
        if self.is_over:
            raise self.lost()

    def lost(self) -> LeaseLostError:
        """Return the error for whoever uses what the lease gave after its end."""
        return LeaseLostError(
            f"{self._what} is closed: acquire {self._again} again, or score anew; stay inside the "
            "`with` block with what it gives, or take targets.clone() along",
            facts=self.facts,
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LeasedTargets(Targets):
    """Targets that are emptied when their lease is closed, with all that was made from them.

    ``temperature`` and ``sampled`` stay; every other field raises ``LeaseLostError`` then.
    """

    made: Made = field(repr=False)

    if not TYPE_CHECKING:  # to a type checker the fields are what ``Targets`` says

        def __getattribute__(self, name: str) -> object:
            value = object.__getattribute__(self, name)  # before the look: another may close it
            if name in _OF_THE_LEASE:
                self.made.check_open()
            return value

    def __post_init__(self) -> None:
        # `dataclasses.replace`, and with it `rectangular`, hands the same object on.
        self.made.enter(self)

    def check_open(self) -> None:
        """Let targets pass while their lease is open.

        Raises:
            LeaseLostError: it is closed.
        """
        self.made.check_open()

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel(
            "targets of a lease", "hand on targets.clone(), which outlives the lease"
        )

    def __repr__(self) -> str:
        return "<targets of a closed lease>" if self.made.is_over else super().__repr__()

    def empty(self) -> None:
        """Let go of every tensor: the lease is over, and whoever asks for one is told so."""
        for name, value in [*vars(self).items()]:
            if isinstance(value, torch.Tensor):
                object.__setattr__(self, name, None)


_OF_THE_LEASE = frozenset(each.name for each in fields(Targets)) - {"temperature", "sampled"}
"""What ends with the lease: tensors, or None in the place of one."""


def lease_targets(targets: Targets, made: Made) -> LeasedTargets:
    """Return targets that are entered in ``made``, as are all that are made from them."""
    plain = {each.name: getattr(targets, each.name) for each in fields(targets)}
    return LeasedTargets(**plain, made=made)
