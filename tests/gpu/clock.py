"""The seconds of the GPU check: one budget, cut by shares, and stages that leave out what is late.

    start |-- share --|-- share --------|-- share --| start + seconds
          a stage may run to its share's end; what it leaves, the next ones have

So a stage that hangs takes nothing from those behind it, and all of them together are done when
they should be. A stage goes through its parts while there is time for one more (``Clock.through``),
and what it leaves out is in its report: a check that left something out has not passed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Part = TypeVar("Part")

LAST_SECONDS = 4.0
"""What a stage keeps for its end: its processes end, and its report is written."""


def share_out(shares: Sequence[float], *, seconds: float) -> list[float]:
    """Return when each stage has to be done, in seconds from the start; the last is ``seconds``."""
    whole = sum(shares)
    return [seconds * each / whole for each in accumulate(shares)]


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
