"""Batching: which rows of which requests run through the teacher together, and in what order.

Pure: no lock, no clock, no tensors. A request is known by a ticket, a number of the caller's.

    add --> waits --take--> some or all of its rows are in a pass --take--> ... --> drop
              ^  |
    room_freed|  |park: no room for its payload now
              parked

Sessions take turns by tokens (``fair_turns``), and within one the order is that of arrival. A pass
has at most ``max_batch_tokens`` tokens, padding counted (rows times the longest), or a single
longer row. Rows of a request run in their order, over several passes where they are many. Nobody
starves: a request that waits for room lets 16 that come behind it have room first, such as need
less than it does, and then nobody; but it holds up nobody while its session has more than its
share of the room, or the most that one may have (``Held``), and those that do get none while others
wait for room. Who waits for room of one pool stands in the way of those alone who want room of the
same. Refuses a request more than ``max_waiting_requests``, where its session has one that waits,
and more than ``max_session_requests`` of one session.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits_server.caps import Cap
from teacher_logits_server.fair_turns import FairTurns
from teacher_logits_server.room_turns import Held, NothingHeld, Request, RoomTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


class Batching:
    """The requests of one engine, from ``add`` to ``drop``.

    Args:
        max_batch_tokens: most tokens of a pass, padding included.
        max_waiting_requests: most requests with rows that wait; the first of a session may be one
            more.
        max_session_requests: most requests of one session.
        held: returns what each session has of a pool, by its name.
    """

    def __init__(
        self,
        *,
        max_batch_tokens: int,
        max_waiting_requests: int,
        max_session_requests: int,
        held: Callable[[str], Held] = lambda pool: NothingHeld(),
    ) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._held = held
        self._requests: dict[int, Request] = {}
        self._by_session: dict[str, dict[int, Request]] = {}
        #: Requests with rows that wait, by session: a refusal costs next to nothing.
        self._waiting: Counter[str] = Counter()
        self._waiting_count = 0
        self._turns = FairTurns()
        self._freed_count = 0
        self._cap = Cap(
            name="waiting_requests",
            most=max_waiting_requests,
            flag="--max-waiting-requests",
            what="scoring requests that wait for the teacher",
            way_out="send fewer and larger ones, come back later",
        )
        self._session_cap = Cap(
            name="session_requests",
            most=max_session_requests,
            flag="--max-session-requests",
            what="scoring requests of this session that wait or run",
            way_out="send fewer and larger ones, or take answers before you ask for more",
        )

    @property
    def waiting_requests(self) -> int:
        """Requests with rows that wait."""
        return self._waiting_count

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

    def check_room(self, session_id: str) -> None:
        """Refuse another request of a session.

        Raises:
            LimitReachedError: too many wait already, or too many are its own.
        """
        self._session_cap.check(len(self._by_session.get(session_id, ())))
        if self._waiting[session_id]:
            self._cap.check(self._waiting_count)

    def add(
        self,
        ticket: int,
        row_tokens: Sequence[int],
        *,
        deadline: float,
        session_id: str = "",
        size_bytes: int = 0,
        pool: str = "",
    ) -> None:
        """Take a request in; ``row_tokens`` is what each of its rows costs the engine.

        Tickets rise. A row of no tokens runs beside others for nothing. ``size_bytes`` is the
        room that its payload will need, and ``pool`` names where.

        Raises:
            LimitReachedError: see ``check_room``.
        """
        self.check_room(session_id)
        if not self._waiting[session_id]:
            self._turns.forget(self._waiting.keys())
            self._turns.join(session_id)
        own = self._by_session.get(session_id, {})
        ahead = sum(each.tokens_left for each in own.values())
        request = Request(
            ticket=ticket,
            session_id=session_id,
            row_tokens=row_tokens,
            deadline=deadline,
            tokens_left=sum(row_tokens),
            size_bytes=size_bytes,
            pool=pool,
            turn=(self._turns.account(session_id) + ahead, ticket),
        )
        self._requests[ticket] = request
        self._by_session.setdefault(session_id, {})[ticket] = request
        if request.waits:
            self._count_waiting(session_id, 1)

    def drop(self, ticket: int) -> None:
        """Forget a request that is done, failed or cancelled. One not known is fine."""
        request = self._requests.pop(ticket, None)
        if request is None:
            return
        own = self._by_session[request.session_id]
        del own[ticket]
        if not own:
            del self._by_session[request.session_id]
        if request.waits:
            self._count_waiting(request.session_id, -1)

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
        for request in self._room(seated.pool).overtaken_by(seated):
            request.overtaken += 1

    def may_seat(self, ticket: int) -> bool:
        """Say whether a request may have room now, or must leave it to one that waits for it.

        One that must goes on waiting with all its rows.
        """
        wants = self._requests.get(ticket)
        if wants is None or wants.seated or self._room(wants.pool).may_have(wants):
            return True
        self._put_back(wants)
        return False

    def park(self, ticket: int, *, freed_count: int) -> None:
        """Put a request's rows back, since there is no room for its payload.

        It waits for ``room_freed``, unless room came free since ``freed_count``.
        """
        request = self._requests.get(ticket)
        if request is not None:
            self._put_back(request)
            request.wants_room = True
            request.parked = freed_count == self._freed_count

    def room_freed(self) -> None:
        """Let the parked requests try again, each in its turn."""
        self._freed_count += 1
        for request in self._requests.values():
            if request.parked:
                request.parked = False
                self._turns.join(request.session_id)  # it was not for lack of a turn

    def take(self) -> list[Piece]:
        """Take the rows of the next pass; empty where nothing can run now."""
        pieces: list[Piece] = []
        rows = longest = 0
        rooms: dict[str, RoomTurns] = {}
        for request in self._in_turn():
            if request.parked:
                continue
            if not request.seated:
                room = rooms.get(request.pool) or self._room(request.pool)
                rooms[request.pool] = room
                if not room.may_run(request):
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
                pieces.append(self._piece(request, first))
            if request.waits:
                break
            self._count_waiting(request.session_id, -1)
        return pieces

    def _piece(self, request: Request, first: int) -> Piece:
        """Charge the rows that were taken to their session."""
        tokens = sum(request.row_tokens[first : request.next_row])
        self._turns.charge(request.session_id, tokens, position=request.turn[0])
        count = request.next_row - first
        return Piece(ticket=request.ticket, first_row=first, row_count=count)

    def _put_back(self, request: Request) -> None:
        waited, total = request.waits, sum(request.row_tokens)
        self._turns.refund(request.session_id, total - request.tokens_left)
        request.next_row, request.tokens_left = 0, total
        if request.waits and not waited:
            self._count_waiting(request.session_id, 1)

    def _count_waiting(self, session_id: str, change: int) -> None:
        self._waiting_count += change
        self._waiting[session_id] += change
        if not self._waiting[session_id]:
            del self._waiting[session_id]

    def _in_turn(self) -> list[Request]:
        """Return the requests that wait, in the order of their turns, which are told here."""
        waiting = [each for each in self._requests.values() if each.waits]
        ahead: dict[str, int] = {}
        for request in waiting:
            before = ahead.get(request.session_id, 0)
            position = self._turns.account(request.session_id) + before
            request.turn = position, request.ticket
            ahead[request.session_id] = before + request.tokens_left
        return sorted(waiting, key=lambda each: each.turn)

    def _room(self, pool: str) -> RoomTurns:
        wanting = [r for r in self._requests.values() if r.wants_room and r.pool == pool]
        return RoomTurns(wanting, self._held(pool) if wanting else NothingHeld())
