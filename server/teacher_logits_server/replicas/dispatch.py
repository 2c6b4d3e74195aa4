"""The dispatch table: which replica computes which pass, and what becomes of those of a dead one.

Pure: events and ``now`` in, instructions out. A *piece* is some rows of one request, a pass some
pieces that are computed together; a replica is known by its number, and each of its lives by
another, so that what a former life still says is told apart.

    add -> waits -> Send -> answered -> over
             ^        |
             |        | died, or its deadline came while others' had not
             +--------+ once: each piece then alone, on a replica that does nothing else
                      | a second time: Fail

    replica:  starting -> ready <-> unresponsive -> (Kill) starting
                  |  ^
                  v  | after a pause
                  down

Promises: a pass goes to the ready replica with the fewest tokens outstanding, which has at most
``PASSES_A_REPLICA``; of equals, to one on a node where it is read. One whose rows stay there takes
room of that node: where no node has it, it waits, and so do those behind it that stay, while
others go by. A piece is sent at most twice, and is over once: answered, failed or dropped;
what a replica still says of one that was given to another is not used. Since it is retried alone,
rows that end a replica take no others with them. What is not over when all replicas are down fails
with their reason.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING

from teacher_logits_server.replicas.instructions import Drop, Fail, Kill, Look, Send, Start
from teacher_logits_server.replicas.lives import Replica, State
from teacher_logits_server.replicas.rooms import StoreRooms
from teacher_logits_server.replicas.work import Pass, Work

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from teacher_logits_server.replicas.instructions import Instruction, Patience, Piece

PASSES_A_REPLICA = 2
"""One that is computed, and one behind it so that the replica never waits."""


class Dispatch:
    """The passes of one engine, over replicas that are all ready when it is made."""

    def __init__(
        self, *, replica_count: int, patience: Patience, rooms: StoreRooms | None = None
    ) -> None:
        self.rooms = rooms or StoreRooms()
        self._nodes = [""] * replica_count
        self._lives = [
            Replica(number, first_pause=patience.pause) for number in range(replica_count)
        ]
        self._work = [Work() for _ in range(replica_count)]
        self._patience = patience
        self._waiting: deque[Pass] = deque()
        self._attempts = count()
        self._life_numbers = count(replica_count)

    # What can be seen

    @property
    def room(self) -> int:
        """How many passes would be sent at once if they were added now."""
        free = sum(PASSES_A_REPLICA - len(self._work[at].passes) for at in self._open())
        return max(0, free - sum(not each.lacks_room for each in self._waiting))

    @property
    def refusal(self) -> str | None:
        """Why nothing can be computed, where every replica is down; None where one is not."""
        if any(each.state is not State.DOWN for each in self._lives):
            return None
        return next(each.reason for each in self._lives)

    @property
    def ready_count(self) -> int:
        """How many replicas are ready."""
        return sum(each.state is State.READY for each in self._lives)

    def replica(self, number: int) -> Replica:
        """Return what is known of a replica's life, to look at."""
        return self._lives[number]

    def outstanding(self, number: int) -> tuple[int, int]:
        """Return how many passes, and tokens, a replica has to compute."""
        return len(self._work[number].passes), self._work[number].tokens

    @property
    def next_due(self) -> float | None:
        """When ``tick`` has something to do at the latest; None where it has nothing."""
        times = [each.due(self._patience.start, self._patience.answer) for each in self._lives]
        times += [each.due(self._patience.answer) for each in self._work]
        times += [each.deadline for each in self._waiting]
        times += [
            each.deadline for work in self._work for each in work.passes.values() if not each.over
        ]
        return min((time for time in times if time is not None), default=None)

    # Events

    def lies_on(self, replica: int, node: str) -> None:
        """Note on which node a replica's life is."""
        self._nodes[replica] = node

    def opened(self, budgets: Mapping[str, int], *, now: float) -> list[Instruction]:
        """Learn how much may stay on each of the replicas' nodes."""
        self.rooms.set_budgets(budgets)
        return self._place(now)

    def freed(self, node: str, size_bytes: int, *, now: float) -> list[Instruction]:
        """Take back room of a node that an answer was given with."""
        self.rooms.give_back(node, size_bytes)
        return self._place(now)

    def add(self, pieces: Sequence[Piece], *, deadline: float, now: float) -> list[Instruction]:
        """Take a pass in."""
        self._waiting.append(Pass(pieces=tuple(pieces), deadline=deadline))
        return self._place(now)

    def answered(
        self, attempt: int, *, now: float, has_rows: bool = True
    ) -> tuple[bool, list[Instruction]]:
        """Note that an attempt was answered; return whether the answer is to be used.

        It is not where the pass was given to somebody else, or given up. Where it is, and it
        ``has_rows``, the room that they take is the caller's (``freed``).
        """
        for life, work in zip(self._lives, self._work, strict=True):
            if attempt in work.passes:
                answered = work.take(attempt, now)
                life.has_answered()
                if answered.over or not has_rows:
                    self._give_back(answered)
                return not answered.over, self._place(now)
            if life.heard(attempt, now):
                return False, self._place(now)
        return False, []

    def died(self, replica: int, life: int, *, reason: str, now: float) -> list[Instruction]:
        """Note that a life of a replica has ended; one that ended before is no news."""
        if not self._lives[replica].is_in(life):
            return []
        lost = self._work[replica].passes.values()
        self._work[replica] = Work()
        self._lives[replica].died(reason, now)
        return [*self._lose(lost, reason), *self._begin(now), *self._place(now)]

    def started(self, replica: int, life: int, *, now: float) -> list[Instruction]:
        """Note that a new life is ready for passes."""
        if not self._lives[replica].is_in(life):
            return []
        self._lives[replica].started()
        return [Look(), *self._place(now)]

    def start_failed(
        self, replica: int, life: int, *, reason: str, now: float
    ) -> list[Instruction]:
        """Note that a new life came to nothing. It is tried again after a pause."""
        if not self._lives[replica].is_in(life):
            return []
        self._lives[replica].start_failed(reason, now)
        return self._place(now)

    def tick(self, now: float) -> list[Instruction]:
        """Do what is due: deadlines, replicas that do not answer, starts."""
        instructions: list[Instruction] = []
        for replica in self._lives:
            instructions += self._look_at(replica, now)
        return [*instructions, *self._begin(now), *self._place(now)]

    # Within

    def _look_at(self, replica: Replica, now: float) -> list[Instruction]:
        work, life = self._work[replica.number], replica.life
        if replica.start_is_late(self._patience.start, now):
            seconds = self._patience.start
            replica.start_failed(f"did not start within {seconds:g} s", now)
            return [Kill(replica=replica.number, life=life)]
        if replica.is_lost(self._patience.answer, now):
            replica.died(f"did not answer for {now - replica.since:.0f} s", now)
            return [Kill(replica=replica.number, life=life)]
        late = [each for each in work.passes.values() if each.deadline <= now and not each.over]
        for each in late:
            each.over = True
        instructions: list[Instruction] = [Drop(pieces=each.pieces) for each in late]
        due = work.due(self._patience.answer)
        if due is not None and due <= now:
            replica.hangs(work.passes, now)
            self._work[replica.number] = Work()
            instructions += self._lose(work.passes.values(), "the replica does not answer")
        return instructions

    def _lose(self, passes: Iterable[Pass], reason: str) -> list[Instruction]:
        """Put lost passes in front, each piece alone; fail those that were lost before."""
        instructions: list[Instruction] = []
        retries: list[Pass] = []
        for each in passes:
            self._give_back(each)
            if each.over:
                continue
            if each.lost:
                instructions.append(Fail(pieces=each.pieces, reason=reason, lost=each.lost + 1))
            else:
                retries += [Pass(pieces=(p,), deadline=each.deadline, lost=1) for p in each.pieces]
        self._waiting.extendleft(reversed(retries))
        return instructions

    def _begin(self, now: float) -> list[Instruction]:
        """Start what is due to be started."""
        due = [each for each in self._lives if each.is_due(now)]
        instructions: list[Instruction] = []
        for replica in due:
            replica.begin(next(self._life_numbers), now)
            instructions.append(Start(replica=replica.number, life=replica.life))
        return instructions

    def _place(self, now: float) -> list[Instruction]:
        """Send what waits, in its order, as far as there are replicas for it."""
        instructions: list[Instruction] = []
        late = [each for each in self._waiting if each.deadline <= now]
        instructions += [Drop(pieces=each.pieces) for each in late]
        self._waiting = deque(each for each in self._waiting if each.deadline > now)
        if (reason := self.refusal) is not None:
            instructions += [
                Fail(pieces=each.pieces, reason=reason, lost=each.lost) for each in self._waiting
            ]
            self._waiting.clear()
        stay: deque[Pass] = deque()
        while self._waiting and (places := self._places_for(self._waiting[0])):
            given = self._waiting.popleft()
            # In their order: a large one would wait for ever behind small ones.
            behind = bool(given.stored_bytes) and any(each.stored_bytes for each in stay)
            at = None if behind else self._choose(given, places)
            given.lacks_room = at is None
            if at is None:
                stay.append(given)
                continue
            instructions.append(self._send(given, at, now))
        self._waiting.extendleft(reversed(stay))
        return instructions

    def _choose(self, given: Pass, places: Sequence[int]) -> int | None:
        """Return the replica for a pass; None where no node has room for what stays of it."""
        near = {piece.near for piece in given.pieces if piece.stored_bytes and piece.near}
        found = [at for at in places if self.rooms.fits(self._nodes[at], given.stored_bytes)]

        def cost(at: int) -> tuple[int, bool, int]:
            return self._work[at].tokens, self._nodes[at] not in near, at

        return min(found, key=cost, default=None)

    def _send(self, given: Pass, at: int, now: float) -> Send:
        attempt, life = next(self._attempts), self._lives[at].life
        if given.stored_bytes:
            given.node = self._nodes[at]
            self.rooms.take(given.node, given.stored_bytes)
        self._work[at].send(attempt, given, now)
        return Send(attempt=attempt, replica=at, life=life, pieces=given.pieces, node=given.node)

    def _give_back(self, given: Pass) -> None:
        """Give the room of a pass back that comes to nothing where it was sent."""
        if given.node:
            self.rooms.give_back(given.node, given.stored_bytes)
            given.node = ""

    def _open(self) -> list[int]:
        """Return the replicas that take another pass."""
        return [
            number
            for number, (life, work) in enumerate(zip(self._lives, self._work, strict=True))
            if life.state is State.READY
            and len(work.passes) < PASSES_A_REPLICA
            and not work.has_retry
        ]

    def _places_for(self, given: Pass) -> list[int]:
        """Return where a pass may go: a retry has its replica for itself."""
        places = self._open()
        return [at for at in places if not self._work[at].passes] if given.lost else places
