"""Scenarios within one process, over ``local``: who comes to harm, at which moment, and how.

A scenario follows from its seed alone, as those of ``scenarios`` do.
"""

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tests.processes.faults import stops


class Fate(enum.Enum):
    """What becomes of the victim."""

    DROPPED = "dropped"
    FAILED = "out of memory"
    WAITS = "stopped for a while"
    STOPPED = "stopped for good"
    RECLAIMED = "reclaimed"


@dataclass(frozen=True)
class Plan:
    """One scenario."""

    seed: int
    victim: str
    moment: str
    fate: Fate

    def __str__(self) -> str:
        """Return the test's name, with the seed in front."""
        parts = (self.victim, self.fate.value, self.moment)
        return f"{self.seed:03}-" + "-".join(part.replace(" ", "_") for part in parts)


def plan_of(seed: int) -> Plan:
    """Return the scenario of a seed."""
    ones = _all()
    return Plan(seed, *ones[seed % len(ones)])


def plan_count() -> int:
    """Return how many scenarios there are: seeds from there on begin again."""
    return len(_all())


@cache
def _all() -> list[tuple[str, str, Fate]]:
    ones = [
        (victim, moment, fate)
        for victim, moments in _MOMENTS.items()
        for moment in moments
        for fate in _fates(victim, moment)
    ]
    random.Random(1).shuffle(ones)
    return ones


def _fates(victim: str, moment: str) -> Sequence[Fate]:
    if victim.startswith("server"):
        return [Fate.STOPPED]
    if victim.startswith("room"):
        return [Fate.RECLAIMED]
    # What gives leases back is a thread of the product's, which nobody interrupts.
    own = not moment.endswith("release")
    return (Fate.DROPPED, Fate.FAILED, Fate.WAITS) if own else [Fate.WAITS]


_HOLDS = ("after ask", "before open", "after find", "after open", "read", "before close")
_MOMENTS: Mapping[str, Sequence[str]] = {
    "student": [*stops.LOCAL_SCORES, "read"],
    "student of steps": [*stops.LOCAL_STEPS, "read"],
    "server": [*_HOLDS, "after close", "before release"],
    "server of steps": [*stops.LOCAL_STEPS, "read"],
    "room that is read": ["after find", "after open", "read", "before close"],
}
