"""Scenarios over Ray's object store: who comes to harm, at which moment, by which means.

A scenario follows from its seed alone. The first seeds go through every victim and moment once;
those after them through all that there is. How each is played: ``plays``.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache

from tests.processes.faults import stops
from tests.processes.faults.scenarios import Means, Scenario

COPIED, VIEWED, ELSE_STREAMED = "ray_object", "ray_object read_only", "ray_object,stream"
"""Ways to read an object: into a buffer, where it lies, or by a stream where it does not come."""
READERS = (COPIED, VIEWED)
WRITERS = ("shared_memory", "stream")
OF_REPLICAS = "holder of what replicas computed"
OF_SERVER = "holder of what the server put"
RAY_PROCESS = "the server's Ray process"


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
    ones = [
        (victim, moment, means, way)
        for victim, moments in MOMENTS.items()
        for moment in moments
        for means in Means
        for way in _ways(victim, moment)
    ]
    random.Random(1).shuffle(ones)
    first = list({one[:2]: one for one in reversed(ones)}.values())
    return [*first, *(one for one in ones if one not in first)]


def _ways(victim: str, moment: str) -> Sequence[str]:
    if moment == "before put_slab":
        return ["shared_memory"]
    if moment == "upload chunk":
        return ["stream"]
    if victim in ("publisher", "server of steps"):
        return WRITERS
    ways = (*READERS, ELSE_STREAMED) if victim in (OF_SERVER, RAY_PROCESS) else READERS
    return [each for each in ways if moment != "before copy" or each != VIEWED]


MOMENTS: Mapping[str, Sequence[str]] = {
    "student": [*stops.OBJECT_SCORES, "read"],
    "student of steps": [*stops.OBJECT_STEPS, "read"],
    "server": [*stops.STAYING],
    "server of steps": [*stops.PUTTING],
    "publisher": [*stops.PUBLISHER, "write", "while it is read"],
    "replica": ["before a pass", "during a pass", "while it is read"],
    OF_REPLICAS: [*stops.OBJECTS, "read"],
    OF_SERVER: [*stops.OBJECTS, "read"],
    RAY_PROCESS: [*stops.OBJECTS, "read"],
}
