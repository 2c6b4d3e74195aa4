"""The seconds of the GPU check: one budget, and stages that leave out what is late.

    start |-- share --|-- share --------|-- share --| start + seconds

A stage goes through its parts while there is time for one more in its share, or in what those
before it left (``Clock.through``). What it leaves out is in its report: a check that left something
out has not passed. A stage that is not done all the same, on a slow machine or because it hangs, is
ended after some shares of its own, and before the rest could not even begin.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Part = TypeVar("Part")

LAST_SECONDS = 4.0
"""What a stage keeps for its end: its processes end, and its report is written."""


PATIENT_SHARES = 3.0
"""How many shares of its own a stage may take at most."""
LEAST_SECONDS = 5.0
"""What a stage needs at least, for its imports alone."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A stage's time: it is to leave out what would come behind ``soft``, and ends at ``hard``."""

    soft: float
    hard: float


def limits(shares: Sequence[float], number: int, *, seconds: float, now: float) -> Limits:
    """Return the limits of a stage that begins ``now``, all in seconds from the check's start."""
    scale = seconds / sum(shares)
    own, planned = scale * shares[number], scale * sum(shares[: number + 1])
    later = LEAST_SECONDS * (len(shares) - number - 1)
    hard = min(now + PATIENT_SHARES * own, seconds - later)
    return Limits(soft=min(hard, max(planned, now + own)), hard=hard)


@dataclass(kw_only=True)
class Clock:
    """One stage's time: ``until`` is of ``time.monotonic``, ``skipped`` what it has left out.

    ``tell`` hears at which part it is, for whoever ends it.
    """

    until: float = math.inf
    skipped: list[str] = field(default_factory=list)
    tell: Callable[[str], None] = lambda where: None

    def through(self, parts: Iterable[Part], *, what: str) -> Iterator[Part]:
        """Yield parts, the first in any case and others while one more may be had in time.

        One takes as long as the longest has.
        """
        every, longest = list(parts), 0.0
        for number, part in enumerate(every):
            started = time.monotonic()
            if number and started + longest > self.until - LAST_SECONDS:
                self.skipped.append(f"{len(every) - number} of {len(every)} {what}")
                return
            self.tell(f"{what} {number + 1} of {len(every)}")
            yield part
            longest = max(longest, time.monotonic() - started)
