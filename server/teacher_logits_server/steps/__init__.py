"""Steps: what one teacher has of each step, who may have it, and when it ends.

Pure. Publishers reserve and seal its parts (``parts``), students' readers consume it (``seats``).

Promises: a step is had whole or not at all; it is retired when every reader of every
admitted student has consumed it, or when ``keep_steps`` says so, and a retired step never
comes back while anybody is there. What follows for payloads is told once, by ``changes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_server.steps.changes import ChangeLog
from teacher_logits_server.steps.parts import Part, Seat, Stage, Step
from teacher_logits_server.steps.retired import GivenUpSteps, RetiredSteps, retired_error
from teacher_logits_server.steps.seats import Seats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_server.steps.claims import Claim


class Steps:
    """The steps of one teacher.

    Args:
        keep_steps: most steps that are kept, older ones going even unread; 0 keeps the unread.
    """

    def __init__(self, *, keep_steps: int = 0) -> None:
        self.seats = Seats()
        self.keep_steps = keep_steps
        self._steps: dict[int, Step] = {}
        self._parts: dict[str, Part] = {}
        self._by_request: dict[tuple[str, str], Claim] = {}
        self._retired, self._given_up = RetiredSteps(), GivenUpSteps()
        self._highest_complete = -1
        #: What is to be carried out; whoever does takes it.
        self.changes = ChangeLog()

    def __iter__(self) -> Iterator[Step]:
        return iter(sorted(self._steps.values(), key=lambda step: step.number))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is reserved or sealed."""
        return not any(step.is_written for step in self._steps.values())

    @property
    def lowest_open_step(self) -> int:
        """The lowest that is written, or was given up, else the one behind the highest complete."""
        written = (step.number for step in self._open())
        return min((*written, *self._given_up), default=self._highest_complete + 1)

    def lowest_without(self, shard: int) -> int:
        """Return the lowest step that still needs a shard, else the one that comes next for it."""
        lacking = (step.number for step in self._open() if step.lacking((shard,)))
        own = (step.number for step in self._steps.values() if shard in step.claimed)
        coming = max(self._highest_complete, *own, -1) + 1
        return min((*lacking, *self._given_up), default=coming)

    def find(self, number: int) -> Step | None:
        """Return a step of which something is known and that is not retired."""
        return self._steps.get(number)

    def part_of(self, payload_id: str) -> Part | None:
        """Return the part that a payload belongs to, or a reservation's payload to be."""
        return self._parts.get(payload_id)

    def begin_anew(self) -> None:
        """Forget which steps were retired or lost, so that they may come again."""
        self._retired, self._given_up = RetiredSteps(), GivenUpSteps()
        for step in list(self._steps.values()):
            if not step.is_written:
                self._drop(step)
        complete = (s.number for s in self._steps.values() if s.stage is Stage.COMPLETE)
        self._highest_complete = max(complete, default=-1)

    def retire_all(self) -> None:
        """Retire every step there is."""
        for step in list(self._steps.values()):
            self._retire(step)

    def reserve(self, claim: Claim) -> tuple[Claim, bool]:
        """Claim rows; return the claim, a retry the first one, and whether they were sealed before.

        Raises:
            PayloadRetiredError: the step is retired.
            PayloadConflictError: rows, shard, or the step's count of real rows are another's.
            RequestInvalidError: the request id was used for other rows.
        """
        older = self._by_request.get((claim.session_id, claim.request_id))
        if older is not None:
            older.check_same(claim)
            return older, self._parts[older.payload_id].repeat == older
        self.check_open(claim.step)
        step = self._steps.get(claim.step) or self._given_up.begin_again(claim)
        step.check_claim(claim)
        if not step.is_written:
            step.real_rows = claim.real_rows
        part = step.parts.get(claim.shard)
        is_repeat = part is not None and not part.is_lost
        if part is not None and is_repeat:
            part.repeat = claim
        else:
            if part is not None:
                self._forget_claim(part.claim)
            part = step.parts[claim.shard] = Part(claim=claim)
        self._steps[claim.step] = step
        self._given_up.discard(claim.step)
        self._parts[claim.payload_id] = part
        self._by_request[claim.session_id, claim.request_id] = claim
        return claim, is_repeat

    def has_claim(self, session_id: str, request_id: str) -> bool:
        """Say whether a request has claimed rows already."""
        return (session_id, request_id) in self._by_request

    def seal(self, payload_id: str, *, valid_count: int | None, digest: str) -> None:
        """Make a reserved part readable."""
        part = self._parts.get(payload_id)
        if part is None or part.is_sealed:
            raise ValueError(f"payload {payload_id} is not reserved")
        part.is_sealed, part.valid_count, part.digest = True, valid_count, digest
        self.changes.is_news = True
        step = self._steps[part.claim.step]
        if step.stage is not Stage.COMPLETE:
            return
        self._highest_complete = max(self._highest_complete, step.number)
        self.changes.decided.append(step.number)
        self._retire_if_read(step)
        if self.keep_steps:
            kept_from = self._highest_complete - self.keep_steps + 1
            for each in [step for step in self._steps.values() if step.number < kept_from]:
                self._retire(each)
            self._retired.add_below(kept_from)
            self._given_up.discard_below(kept_from, unless=())

    def accept_repeat(self, payload_id: str, session_id: str) -> None:
        """End a repeat that is the same as the first."""
        part = self._parts[payload_id]
        self.abandon(payload_id)
        part.repeated.add((payload_id, session_id))
        self._parts[payload_id] = part

    def abandon(self, payload_id: str) -> None:
        """End a reservation; one that is sealed, or ended, stays as it is.

        A step of which nothing is left stays open where a student wants it, or a higher one began.
        """
        part = self._parts.get(payload_id)
        if part is None:
            return
        if part.repeat is not None and part.repeat.payload_id == payload_id:
            self._forget_claim(part.repeat)
            part.repeat = None
        elif not part.is_sealed:
            step = self._steps[part.claim.step]
            self._forget_claim(part.claim)
            del step.parts[part.claim.shard]
            if not step.parts:
                self._drop(step)
                self._note_given_up(step)
            self.changes.is_news = True

    def orphan(self, payload_id: str) -> None:
        """Learn that a sealed part lasts as long as it is leased, since its writer died."""
        self._parts[payload_id].is_orphan = True

    def succeed(self, payload_id: str) -> str:
        """Have a repeat that is the same take the place of an orphan; return the orphan's id.

        Who reads the orphan reads on; whoever comes reads its successor.
        """
        part = self._parts[payload_id]
        orphan = part.claim
        if part.repeat is None or not part.is_orphan:
            raise ValueError(f"payload {payload_id} repeats no orphan")
        self._forget_claim(orphan)
        part.claim, part.repeat, part.is_orphan = part.repeat, None, False
        return orphan.payload_id

    def lose(self, payload_id: str) -> None:
        """Learn that a part is gone with its writer. A repeat under way takes its place.

        Where all have read its step, that is retired: it lacks nothing that anybody waits for.
        """
        part = self._parts.get(payload_id)
        if part is None or part.claim.payload_id != payload_id:
            self.abandon(payload_id)
            return
        part.is_orphan = False
        if part.repeat is not None:
            self._forget_claim(part.claim)
            part.claim, part.repeat, part.is_sealed = part.repeat, None, False
            part.is_announced = False
        else:
            part.is_lost = True
            if not part.is_sealed:
                self._note_given_up(self._steps[part.claim.step])
            self.changes.decided.append(part.claim.step)
        self.changes.is_news = True
        self._retire_if_read(self._steps[part.claim.step])

    def claims_of(self, session_id: str) -> list[tuple[Claim, bool]]:
        """Return what a session reserved, and whether it is sealed and still there."""
        return [each for step in self._steps.values() for each in step.claims_of(session_id)]

    def check_open(self, number: int) -> None:
        """Refuse a step that is retired.

        Raises:
            PayloadRetiredError: it is, with the lowest step there is.
        """
        if number in self._retired:
            raise retired_error(number, min(self._steps, default=self._highest_complete + 1))

    def had(self, number: int) -> Step | None:
        """Return a step that is complete, and None where it is not yet.

        Raises:
            PayloadRetiredError: it is retired.
            ProducerLostError: a publisher died with some of it.
        """
        self.check_open(number)
        step = self._steps.get(number)
        if step is None or step.stage is Stage.OPEN:
            return None
        if step.stage is Stage.LOST:
            raise step.lost_error()
        return step

    def consume(self, number: int, seat: Seat) -> None:
        """Note that a reader has returned all that it was granted of a step.

        It has gone on without the lower ones that are lost: they do not wait for it any more.
        """
        for step in list(self._steps.values()):
            if step.number == number or (step.number < number and step.stage is Stage.LOST):
                step.consumed.setdefault(seat.student_id, set()).add(seat)
                self._retire_if_read(step)

    def leave(self, session_id: str) -> None:
        """Learn that a reader is gone; steps do not wait for a student without readers."""
        self.seats.leave(session_id)
        self._retire_what_is_read()

    def close(self, session_id: str, steps: frozenset[int]) -> None:
        """Learn that a reader, which has some steps out, will get no other."""
        self.seats.close(session_id, steps)
        self._retire_what_is_read()

    def _note_given_up(self, step: Step) -> None:
        """Keep a step open of which nothing is left, where it is still to come."""
        is_passed = step.consumed or step.number < max(self._highest_complete, *self._steps, -1)
        if not step.is_written and (is_passed or step.number in self.seats.wanted()):
            self._given_up.add(step)

    def _retire_what_is_read(self) -> None:
        for step in list(self._steps.values()):
            self._retire_if_read(step)

    def _open(self) -> list[Step]:
        return [s for s in self._steps.values() if s.is_written and s.stage is not Stage.COMPLETE]

    def _retire_if_read(self, step: Step) -> None:
        # One that somebody has read was complete, whatever it has lost since.
        was_there = step.stage is not Stage.OPEN or step.consumed
        if was_there and self.seats.have_read(step):
            self._retire(step)
            # Its readers have gone on without the lower ones that were given up.
            self._given_up.discard_below(step.number, unless=self.seats.wanted())

    def _retire(self, step: Step) -> None:
        for part in step.parts.values():
            if part.repeat is not None:
                self.changes.lapsed.append(part.repeat.payload_id)
            if not part.is_lost:
                told = self.changes.retired if part.is_sealed else self.changes.lapsed
                told.append(part.claim.payload_id)
        self._drop(step)
        self._given_up.discard(step.number)
        self._retired.add(step.number)
        self.changes.decided.append(step.number)
        self.changes.is_news = True

    def _drop(self, step: Step) -> None:
        for part in step.parts.values():
            self._forget_claim(part.claim)
            if part.repeat is not None:
                self._forget_claim(part.repeat)
            for payload_id, _ in part.repeated:
                self._parts.pop(payload_id, None)
        self._steps.pop(step.number, None)

    def _forget_claim(self, claim: Claim) -> None:
        self._parts.pop(claim.payload_id, None)
        self._by_request.pop((claim.session_id, claim.request_id), None)
