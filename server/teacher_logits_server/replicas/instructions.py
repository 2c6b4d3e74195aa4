"""What the dispatch table is told, and what it tells its rim to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of one request: the caller's number for them, and the tokens they cost.

    ``stored_bytes`` of them stay on the node that computes them, and ``near`` is the node of who
    reads those; empty where it is not known.
    """

    key: int
    tokens: int
    stored_bytes: int = 0
    near: str = ""


@dataclass(frozen=True, kw_only=True)
class Send:
    """Have a life of a replica compute a pass; its answer is told by ``attempt``.

    ``node`` is where room was taken for what stays of it; empty where nothing does.
    """

    attempt: int
    replica: int
    life: int
    pieces: tuple[Piece, ...]
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Fail:
    """Pieces that were lost twice, or that nobody is left for; ``lost`` is how often."""

    pieces: tuple[Piece, ...]
    reason: str
    lost: int


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Pieces whose deadline has come: whoever waited has been told."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End a life of a replica, whatever it does."""

    replica: int
    life: int


@dataclass(frozen=True, kw_only=True)
class Start:
    """Begin a new life of a replica."""

    replica: int
    life: int


@dataclass(frozen=True, kw_only=True)
class Look:
    """Look at the stores of the replicas' nodes: a new life may be on another one."""


Instruction: TypeAlias = Send | Fail | Drop | Kill | Start | Look


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a replica may take, in seconds: to start, and to answer behind a deadline.

    ``pause`` is the first that is made before a start; each one after it is twice as long.
    """

    start: float
    answer: float
    pause: float = 1.0
