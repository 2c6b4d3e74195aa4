"""Batching: which rows of which requests run through the teacher together, and in what order.

Pure: no lock, no clock, no tensors. A request is known by a ticket, a number of the caller's.

    add --> waits --take--> some or all of its rows are in a pass --take--> ... --> drop
              ^  |
    room_freed|  |park: no room for its payload now
              parked

First come, first served. A pass has at most ``max_batch_tokens`` tokens, padding counted (rows
times the longest), or a single longer row. Rows of a request run in their order, over several
passes where they are many. Nobody starves: a request that waits for room lets 16 later ones
have room before it, such as need less than it does, and then nobody. Who waits for room of one
pool stands in the way of those alone who want room of the same. Refuses a request more than
``max_waiting_requests``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.errors import PoolFullError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_OVERTAKINGS = 16
"""Later requests that may have room before one that waits for it."""
RETRY_AFTER = timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of one request that run in one pass."""

    ticket: int
    first_row: int
    row_count: int


@dataclass(frozen=True, kw_only=True)
class Late:
    """A request past its deadline, and what it was doing."""

    ticket: int
    waited_for_room: bool


@dataclass(kw_only=True)
class _Request:
    row_tokens: Sequence[int]
    deadline: float
    tokens_left: int
    size_bytes: int
    pool: str
    next_row: int = 0
    seated: bool = False
    parked: bool = False
    #: It was parked, and has had no room since.
    wants_room: bool = False
    overtaken: int = 0

    @property
    def waits(self) -> bool:
        return self.next_row < len(self.row_tokens)

    @property
    def limit_behind(self) -> float:
        """What a later request has to be smaller than, to have room before this one."""
        if not self.wants_room:
            return math.inf
        return self.size_bytes if self.overtaken < MAX_OVERTAKINGS else -1

    def put_back(self) -> None:
        self.next_row = 0
        self.tokens_left = sum(self.row_tokens)


class Batching:
    """The requests of one engine, from ``add`` to ``drop``.

    Args:
        max_batch_tokens: most tokens of a pass, padding included.
        max_waiting_requests: most requests with rows that wait.
    """

    def __init__(self, *, max_batch_tokens: int, max_waiting_requests: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_waiting_requests = max_waiting_requests
        self._requests: dict[int, _Request] = {}
        self._freed_count = 0

    @property
    def waiting_requests(self) -> int:
        """Requests with rows that wait."""
        return sum(request.waits for request in self._requests.values())

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the rows that wait."""
        return sum(request.tokens_left for request in self._requests.values())

    @property
    def running_requests(self) -> int:
        """Requests of which all rows were taken."""
        return len(self._requests) - self.waiting_requests

    @property
    def freed_count(self) -> int:
        """How often room came free. ``park`` takes the count from before room was asked for."""
        return self._freed_count

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline; None without requests."""
        return min((request.deadline for request in self._requests.values()), default=None)

    def check_room(self) -> None:
        """Refuse another request where as many wait as may.

        Raises:
            PoolFullError: with both numbers.
        """
        waiting = self.waiting_requests
        if waiting < self._max_waiting_requests:
            return
        raise PoolFullError(
            f"the queue of scoring requests is full: {waiting} wait for the teacher, and "
            f"{self._max_waiting_requests} may: send fewer and larger ones, come back later, or "
            "raise --max-waiting-requests on the server",
            facts={"waiting_requests": waiting, "limit": self._max_waiting_requests},
            retry_after=RETRY_AFTER,
        )

    def add(
        self,
        ticket: int,
        row_tokens: Sequence[int],
        *,
        deadline: float,
        size_bytes: int = 0,
        pool: str = "",
    ) -> None:
        """Take a request in; ``row_tokens`` is what each of its rows costs the engine.

        Tickets rise. A row of no tokens runs beside others for nothing. ``size_bytes`` is the
        room that its payload will need, and ``pool`` names where.

        Raises:
            PoolFullError: too many wait already.
        """
        self.check_room()
        self._requests[ticket] = _Request(
            row_tokens=row_tokens,
            deadline=deadline,
            tokens_left=sum(row_tokens),
            size_bytes=size_bytes,
            pool=pool,
        )

    def drop(self, ticket: int) -> None:
        """Forget a request that is done, failed or cancelled. One not known is fine."""
        self._requests.pop(ticket, None)

    def expire(self, now: float) -> list[Late]:
        """Forget the requests whose deadline has come, running ones too, and return them."""
        late = [
            Late(ticket=ticket, waited_for_room=request.parked)
            for ticket, request in self._requests.items()
            if request.deadline <= now
        ]
        for each in late:
            self.drop(each.ticket)
        return late

    def seat(self, ticket: int) -> None:
        """Note that a request has room for its payload."""
        seated = self._requests.get(ticket)
        if seated is None:
            return
        seated.seated, seated.wants_room = True, False
        for request in self._requests.values():
            if request is seated:
                return
            if request.parked and request.pool == seated.pool:
                request.overtaken += 1

    def may_seat(self, ticket: int) -> bool:
        """Say whether a request may have room now, or must leave it to one that waits for it.

        One that must goes on waiting with all its rows.
        """
        wants = self._requests.get(ticket)
        if wants is None:
            return True
        limit = math.inf
        for request in self._requests.values():
            if request is wants:
                break
            if request.pool == wants.pool:
                limit = min(limit, request.limit_behind)
        if wants.seated or wants.size_bytes < limit:
            return True
        wants.put_back()
        return False

    def park(self, ticket: int, *, freed_count: int) -> None:
        """Put a request's rows back, since there is no room for its payload.

        It waits for ``room_freed``, unless room came free since ``freed_count``.
        """
        request = self._requests.get(ticket)
        if request is not None:
            request.put_back()
            request.wants_room = True
            request.parked = freed_count == self._freed_count

    def room_freed(self) -> None:
        """Let the parked requests try again, in the order in which they came."""
        self._freed_count += 1
        for request in self._requests.values():
            request.parked = False

    def take(self) -> list[Piece]:
        """Take the rows of the next pass; empty where nothing can run now."""
        pieces: list[Piece] = []
        rows = longest = 0
        limits: dict[str, float] = {}  # smaller ones may pass those that wait for room
        for ticket, request in self._requests.items():
            limit = limits.get(request.pool, math.inf)
            passes = request.seated or request.size_bytes < limit
            if request.parked:
                limits[request.pool] = min(limit, request.limit_behind)
            if request.parked or not request.waits or not passes:
                continue
            first = request.next_row
            for tokens in request.row_tokens[first:]:
                wider = max(longest, tokens)
                if rows and tokens and (rows + 1) * wider > self._max_batch_tokens:
                    break
                rows, longest = rows + bool(tokens), wider
                request.next_row += 1
                request.tokens_left -= tokens
            if request.next_row > first:
                pieces.append(
                    Piece(ticket=ticket, first_row=first, row_count=request.next_row - first)
                )
            if request.waits:
                break
        return pieces
