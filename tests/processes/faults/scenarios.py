"""Scenarios: who comes to harm, at which moment, by which means.

A scenario follows from its seed alone. The first seeds go through every victim and moment
once; those after them through all that there is. How each is played: ``stage``.
"""

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tests.processes.faults import stops


class Means(enum.Enum):
    """What is done to the victim."""

    KILL = "killed"
    STOP_AND_KILL = "stopped and killed"
    STOP_AND_GO_ON = "stopped for a while"


@dataclass(frozen=True)
class Scenario:
    """One scenario."""

    seed: int
    victim: str
    moment: str
    means: Means
    transport: str

    def __str__(self) -> str:
        """Return the test's name, with the seed in front."""
        parts = (self.victim, self.means.value, self.moment, self.transport)
        return f"{self.seed:03}-" + "-".join(part.replace(" ", "_") for part in parts)


def scenario_of(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    ones = _all()
    victim, moment, means, transport = ones[seed % len(ones)]
    return Scenario(seed, victim, moment, means, transport)


def scenario_count() -> int:
    """Return how many scenarios there are: seeds from there on begin again."""
    return len(_all())


@cache
def _all() -> list[tuple[str, str, Means, str]]:
    """Return all there are; in front, enough for every victim and every moment."""
    return [
        *_shuffled(MOMENTS),
        *((*one, "shared_memory") for one in dict.fromkeys(e[:3] for e in _shuffled(ANNOUNCED))),
    ]


def _shuffled(table: Mapping[str, Sequence[str]]) -> list[tuple[str, str, Means, str]]:
    ones = [
        (victim, moment, means, transport)
        for victim, moments in table.items()
        for moment in moments
        for means in Means
        for transport in _transports(moment)
    ]
    random.Random(1).shuffle(ones)
    seen: set[str] = set()
    first = []
    for one in ones:
        if not seen.issuperset(one[:2]):
            seen.update(one[:2])
            first.append(one)
    return [*first, *(one for one in ones if one not in first)]


def _transports(moment: str) -> list[str]:
    if moment in ("stream chunk", "upload chunk"):
        return ["stream"]
    if moment.endswith("_slab") or moment == "while a worker reads":
        return ["shared_memory"]
    return ["shared_memory", "stream"]


MOMENTS = {
    "student": [*stops.SCORES, "read"],
    "server": [*stops.SCORING],
    "student with a worker": ["while a worker reads"],
    "worker": ["while a worker reads"],
    "publisher": [*stops.PUBLISHER, "write", "while it is read"],
    "student of steps": [*stops.STEPS, "read"],
    "student of steps with a worker": ["while a worker reads"],
    "server of steps": [*stops.REGISTRY],
}
ANNOUNCED = {
    "publisher of announced steps": ["write", *stops.SEALED],
    "student of announced steps": [*stops.AHEAD],
    "server of announced steps": [*stops.ANNOUNCING],
}
"""Of steps that are announced before they are sealed, which is so in shared memory alone."""
