"""Room turns: who of those that wait for room of one pool may have it before whom.

Pure; a look at one moment. A request that wants room bars those behind it, as far as
``limit_behind`` says, unless its session has had enough: the most that one may have, or more than
its share while others wait. Who has more than that is held back while anybody waits that has not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MAX_OVERTAKINGS = 16
"""Requests from behind that may have room before one that waits for it."""


class Held(Protocol):
    """What each session has of a pool; ``lending.holdings.Held``."""

    def above_share(self, waiting: Collection[str]) -> Collection[str]:
        """Return the sessions that have more than their share while these wait for room."""

    def has_enough(self, session_id: str, size_bytes: int) -> bool:
        """Say whether a session cannot have so much more, however much is free."""


class NothingHeld:
    """What sessions have of a pool of which nobody counts that."""

    def above_share(self, waiting: Collection[str]) -> Collection[str]:
        """Nobody."""
        return ()

    def has_enough(self, session_id: str, size_bytes: int) -> bool:
        """No."""
        return False


@dataclass(kw_only=True)
class Request:
    """A scoring request, as ``Batching`` keeps it; that alone changes it."""

    ticket: int
    session_id: str
    row_tokens: Sequence[int]
    deadline: float
    tokens_left: int
    size_bytes: int
    pool: str
    #: Its place among the others: the lowest comes first.
    turn: tuple[int, int]
    next_row: int = 0
    seated: bool = False
    parked: bool = False
    #: It was parked, and has had no room since.
    wants_room: bool = False
    overtaken: int = 0

    @property
    def waits(self) -> bool:
        """Whether it has rows that wait."""
        return self.next_row < len(self.row_tokens)

    @property
    def limit_behind(self) -> float:
        """What a request from behind has to be smaller than, to have room before this one."""
        if not self.wants_room:
            return math.inf
        return self.size_bytes if self.overtaken < MAX_OVERTAKINGS else -1


class RoomTurns:
    """The requests that want room of one pool, and what their sessions have of it.

    Args:
        wanting: those that were parked, and have had no room since.
    """

    def __init__(self, wanting: Sequence[Request], held: Held) -> None:
        self._held = held
        self._wanting = [each for each in wanting if not self._has_most(each)]
        self._waiting = frozenset(each.session_id for each in self._wanting)

    def may_have(self, request: Request) -> bool:
        """Say whether a request may have room now, before all that want it and come first."""
        return self._may_pass(request, parked_alone=False)

    def may_run(self, request: Request) -> bool:
        """Say whether a request may be in a pass: those that are not parked try for room first."""
        return self._may_pass(request, parked_alone=True)

    def overtaken_by(self, request: Request) -> list[Request]:
        """Return the parked requests that a request which has room now has left behind."""
        return [each for each in self._barring(request) if each.parked]

    def _may_pass(self, request: Request, *, parked_alone: bool) -> bool:
        if not self._wanting:
            return True
        above = self._above(request)
        if request.session_id in above and not self._waiting <= set(above):
            return False
        return all(
            request.size_bytes < each.limit_behind
            for each in self._barring(request)
            if each.parked or not parked_alone
        )

    def _barring(self, request: Request) -> list[Request]:
        """Return the requests that come before one, and do not give way to it."""
        above = self._above(request)
        gives_way = () if request.session_id in above else above
        return [
            each
            for each in self._wanting
            if each.turn < request.turn and each.session_id not in gives_way
        ]

    def _above(self, request: Request) -> Collection[str]:
        """Return whose sessions have more than their share where this request waits too."""
        return self._held.above_share(self._waiting | {request.session_id})

    def _has_most(self, request: Request) -> bool:
        return self._held.has_enough(request.session_id, request.size_bytes)
