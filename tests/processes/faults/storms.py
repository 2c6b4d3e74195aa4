"""Storms: several come to harm in one run, at moments of their own, and the weather is bad too.

A storm follows from its seed alone, of which there is no end. How each is played:
``storm_plays``; what each kind of weather is: ``weather``.
"""

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tests.processes.faults import stops
from tests.processes.faults.publisher import SHARDS
from tests.processes.faults.scenarios import Means

ROUNDS = 4
MOST_HARMS = 3
"""Of a round."""
PUBLISHERS = tuple(f"publisher {shard}" for shard in range(SHARDS))
READERS = ("reader", "left", "right")
"""One student of one rank, and the two ranks of another."""
SCORER = "scorer"


class Weather(enum.Enum):
    """What goes wrong around a round, whoever comes to harm in it."""

    FLAPPING = "who connects hangs up"
    GARBAGE = "garbage on every socket"
    HALF_OPEN = "connections that say nothing"
    NO_DESCRIPTORS = "the server has no descriptors left"
    NO_ROOM = "no file of the server's or of a publisher's can grow: full memory, full disk"


@dataclass(frozen=True)
class Harm:
    """Somebody comes to harm, if that moment comes."""

    victim: str
    moment: str
    means: Means


@dataclass(frozen=True)
class Round:
    """A step: written by all publishers, read by all readers, beside a score."""

    harms: tuple[Harm, ...]
    weather: tuple[Weather, ...]


@dataclass(frozen=True)
class Storm:
    """All that happens; ``transports`` by role."""

    seed: int
    transports: Mapping[str, str]
    rounds: tuple[Round, ...]

    def __str__(self) -> str:
        """Return what happens in each round, for the report of a failure."""
        lines = [f"storm {self.seed}, {dict(self.transports)}"]
        for number, each in enumerate(self.rounds):
            harms = [f"{h.victim} is {h.means.value} {h.moment}" for h in each.harms]
            lines.append(f"  {number}: {'; '.join([*harms, *(w.value for w in each.weather)])}")
        return "\n".join(lines)


def storm_of(seed: int) -> Storm:
    """Return the storm of a seed."""
    chance = random.Random(f"storm {seed}")
    names = (*PUBLISHERS, *READERS, SCORER)
    return Storm(
        seed=seed,
        transports={name: chance.choice(("shared_memory", "stream")) for name in names},
        rounds=tuple(_round(chance) for _ in range(ROUNDS)),
    )


def calm_of(seed: int) -> Storm:
    """Return one in which nothing happens."""
    return replace(storm_of(seed), rounds=())


def _round(chance: random.Random) -> Round:
    victims = chance.sample(list(_MOMENTS), chance.choice((0, 1, 1, 2, 2, MOST_HARMS)))
    return Round(
        harms=tuple(
            Harm(name, chance.choice(_MOMENTS[name]), chance.choice(list(Means)))
            for name in victims
        ),
        weather=tuple(chance.sample(list(Weather), chance.choice((0, 0, 1, 2)))),
    )


_MOMENTS: Mapping[str, Sequence[str]] = {
    "server": [*(stops.SCORING | stops.REGISTRY | stops.ANNOUNCING)],
    **dict.fromkeys(PUBLISHERS, (*stops.PUBLISHER, *stops.SEALED, "write")),
    **dict.fromkeys(READERS, (*stops.STEPS, *stops.AHEAD, "read")),
    SCORER: [*stops.SCORES, "read"],
}
