"""Which steps of a teacher are over for good, and which were given up, in bounded memory. Pure."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadRetiredError
from teacher_logits_server.steps.parts import Step

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from teacher_logits_server.steps.claims import Claim
    from teacher_logits_server.steps.parts import Seat

LIMIT = 4096
"""Retired steps remembered one by one; all below the lowest of them count as retired too."""


class RetiredSteps:
    """A set of steps that only grows, from below."""

    def __init__(self) -> None:
        self._single: set[int] = set()
        self._heap: list[int] = []
        self._below = 0

    def __contains__(self, step: int) -> bool:
        return step < self._below or step in self._single

    def add(self, step: int) -> None:
        """Retire one step."""
        if step in self:
            return
        self._single.add(step)
        heapq.heappush(self._heap, step)
        if len(self._heap) > LIMIT:
            self.add_below(self._heap[0] + 1)

    def add_below(self, step: int) -> None:
        """Retire every step below this one."""
        self._below = max(self._below, step)
        while self._heap and self._heap[0] < self._below:
            self._single.discard(heapq.heappop(self._heap))


class GivenUpSteps:
    """Steps of which nothing is left, and that are still to be written: others wait for them.

    Who has read one, before it was lost, is kept: nobody waits for that reader again.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, set[Seat]]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def add(self, step: Step) -> None:
        """Have room kept for a step; beyond ``LIMIT`` the highest are forgotten."""
        self._steps[step.number] = step.consumed
        if len(self._steps) > LIMIT:
            del self._steps[max(self._steps)]

    def begin_again(self, claim: Claim) -> Step:
        """Return the step of a claim as that begins it: with who has read it, if it was here."""
        read = self._steps.get(claim.step, {})
        return Step(number=claim.step, real_rows=claim.real_rows, consumed=read)

    def discard(self, step: int) -> None:
        """Learn that a step is written again, or over."""
        self._steps.pop(step, None)

    def discard_below(self, step: int, *, unless: Container[int]) -> None:
        """Learn that nobody needs a step below this one, ``unless`` it is waited for."""
        self._steps = {n: read for n, read in self._steps.items() if n >= step or n in unless}


def retired_error(number: int, lowest: int) -> PayloadRetiredError:
    """Return the error of whoever wants a step that is over; ``lowest`` is the first there is."""
    return PayloadRetiredError(
        f"step {number} is retired: all who read it have returned it, or --keep-steps let it go; "
        f"the lowest step there is, or that comes next, is {lowest}",
        facts={"step": number, "lowest_step": lowest},
    )
