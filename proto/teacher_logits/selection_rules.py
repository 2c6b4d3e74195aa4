"""Selection rules: what a payload's entries are, said by a profile and by every payload.

    TopK        the K best entries of each position, and the mass outside as its tail
    Nucleus     of these, those before which less than ``mass`` lies; the rest is in the tail
    Sampled     a sample of fixed size, whose weights are unbiased and sum to one
    ClientIds   ids that a client chose, in its order, with the mass outside exactly those

A loss may be fed targets of every rule but ``Sampled``: an estimate is unbiased only where the
loss is linear in the teacher's probabilities, and every other loss refuses it by the payload's
word. Refuses numbers that select nothing, as the caller's mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

from teacher_logits.errors import RequestInvalidError
from teacher_logits.grid import is_size, is_whole

SEED_LIMIT = 1 << 64
MAX_IDS_PER_TOKEN = 8
"""A request of client-chosen ids has at most so many of them for each token that a server takes at
a time, however they are spread: 2 MiB where it takes 65,536, which its messages may hold anyway."""


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The K best, value descending, then id ascending. What is selected where nothing is said."""

    name = "top_k"


@dataclass(frozen=True, kw_only=True)
class Nucleus:
    """The K best, cut where ``mass`` is reached: true mass of the whole vocabulary.

    An entry is kept where the mass before it is below ``mass``, and the first ``least`` in any
    case. So peaked positions keep few entries, and flat ones all K.

    Raises:
        RequestInvalidError: ``mass`` is not above 0 and up to 1, or ``least`` is below 1.
    """

    name = "nucleus"

    mass: float
    least: int = 1

    def __post_init__(self) -> None:
        number = isinstance(self.mass, Real) and not isinstance(self.mass, bool)
        if not number or not 0 < self.mass <= 1:
            raise RequestInvalidError(
                f"a nucleus of mass {self.mass!r}: give a share above 0 and up to 1, such as 0.99",
                facts={"mass": repr(self.mass)},
            )
        if not is_size(self.least):
            raise RequestInvalidError(
                f"a nucleus keeps at least {self.least!r} entries: give a whole number from 1 on",
                facts={"least": repr(self.least)},
            )
        object.__setattr__(self, "mass", float(self.mass))
        object.__setattr__(self, "least", int(self.least))


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A threshold sample of fixed size: ``top_k`` says how many entries.

    One uniform a position, a function of ``seed``, the row's tokens and the position in the row:
    the same sample for a retry, in another batch and from another replica.

    Raises:
        RequestInvalidError: ``seed`` is no whole number from 0 to 2**64 - 1.
    """

    name = "sampled"

    seed: int = 0

    def __post_init__(self) -> None:
        if not is_whole(self.seed) or not 0 <= self.seed < SEED_LIMIT:
            raise RequestInvalidError(
                f"the seed is {self.seed!r}: give a whole number from 0 to 2**64 - 1",
                facts={"seed": repr(self.seed)},
            )
        object.__setattr__(self, "seed", int(self.seed))


@dataclass(frozen=True, kw_only=True)
class ClientIds:
    """Ids that a client chose: what ``Session.scored_ids`` brings; no session asks for it."""

    name = "client_ids"


SelectionRule: TypeAlias = TopK | Nucleus | Sampled | ClientIds

TOP_K = TopK()


def check_selection(selection: object, allowed: tuple[type, ...], *, whose: str) -> None:
    """Let a rule of an allowed kind pass.

    Raises:
        RequestInvalidError: it is another, with those that are allowed.
    """
    if isinstance(selection, allowed):
        return
    ways = " or ".join(f"{each.__name__}(...)" for each in allowed)
    if isinstance(selection, Sampled):
        ways += ", since what is published are the K best; a sample is drawn by a server's engine "
        ways += "(serve --model), for the students whose StudentProfile asks for Sampled(...)"
    raise RequestInvalidError(
        f"selection of {whose} is {selection!r}: give {ways}",
        facts={"argument": "selection", "given": type(selection).__name__},
    )
