"""Seats: which students read a teacher's steps, and which of their readers have read one.

Pure. A student has ``data_parallel_size * readers_per_rank`` readers, and each has a seat. A
session sits down when it opens and leaves when it ends; its successor takes the free seat, so
that what was read from it stays read. A rank whose readers are all there takes no other: it would
read the same rows, and another rank's nobody. Steps wait for every student that is there, which
it is while one of its sessions is; once all have closed, only those that they still hold do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import SessionRefusedError, Violation
from teacher_logits_server.steps.parts import Seat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits.errors import Fact
    from teacher_logits.profiles import StudentProfile
    from teacher_logits_server.admission.holders import Standing
    from teacher_logits_server.steps.parts import Step

MAX_WANTED = 32
"""Steps that one reader waits for and that are remembered."""


@dataclass(kw_only=True)
class _Student:
    student_id: str
    data_parallel_size: int
    readers_per_rank: int
    #: The first step that waits for it.
    begin: int
    seats: dict[str, Seat] = field(default_factory=dict)
    #: Sessions that get no step any more: those that each may still read.
    closed: dict[str, frozenset[int]] = field(default_factory=dict)

    def is_there(self, number: int) -> bool:
        """Whether it may read a step."""
        return len(self.closed) < len(self.seats) or any(
            number in steps for steps in self.closed.values()
        )


class Seats:
    """The readers of one teacher's steps."""

    def __init__(self) -> None:
        self._students: dict[str, _Student] = {}
        self._by_session: dict[str, Seat] = {}
        self._highest_asked = -1
        #: Steps that sessions asked for and did not get yet.
        self._wanted: dict[str, set[int]] = {}
        #: Whether anybody has ever read here.
        self.were_taken = False

    @property
    def is_empty(self) -> bool:
        """Whether nobody reads here."""
        return not self._students

    def check(self, student: StudentProfile) -> None:
        """Refuse a session whose grid is another than that of its own student's others.

        Raises:
            SessionRefusedError: by rule ``student_grid_conflict``.
        """
        known = self._students.get(student.student_id)
        if known is None:
            return
        for name, has, says in (
            ("data_parallel_size", known.data_parallel_size, student.batch_grid.data_parallel_size),
            ("readers_per_rank", known.readers_per_rank, student.readers_per_rank),
        ):
            if has != says:
                raise SessionRefusedError([_grid_conflict(student.student_id, name, has, says)])

    def holders(self, student: StudentProfile) -> list[str]:
        """Return the sessions that have a seat of a student's rank and did not close."""
        known = self._students.get(student.student_id)
        if known is None:
            return []
        return [
            session_id
            for session_id, seat in known.seats.items()
            if seat.rank == student.data_parallel_rank and session_id not in known.closed
        ]

    def join(self, session_id: str, student: StudentProfile) -> None:
        """Give a reader a seat of its rank, of which one is free.

        It is where its reader closed, though steps be out.

        The first student is waited for from the first step on, a later one from behind the
        highest step that anybody asked for and got.
        """
        known = self._students.get(student.student_id)
        if known is None:
            known = _Student(
                student_id=student.student_id,
                data_parallel_size=student.batch_grid.data_parallel_size,
                readers_per_rank=student.readers_per_rank,
                begin=self._highest_asked + 1 if self._students else 0,
            )
            self._students[student.student_id] = known
        rank = student.data_parallel_rank
        taken = {known.seats[each].number for each in self.holders(student)}
        number = min(set(range(known.readers_per_rank)) - taken)
        seat = Seat(student_id=student.student_id, rank=rank, number=number)
        known.seats[session_id] = self._by_session[session_id] = seat
        self.were_taken = True

    def of(self, session_id: str) -> Seat | None:
        """Return a reader's seat; None where it has none, or has left it."""
        return self._by_session.get(session_id)

    def sessions(self) -> list[str]:
        """Return the sessions that have a seat."""
        return list(self._by_session)

    def close(self, session_id: str, steps: frozenset[int]) -> None:
        """Have a reader get none but the steps that it has.

        Where all of a student's have closed, it is there for these steps alone.
        """
        seat = self._by_session.get(session_id)
        if seat is not None:
            self._students[seat.student_id].closed[session_id] = steps

    def leave(self, session_id: str) -> None:
        """Take a reader's seat back; its student goes with its last."""
        self._wanted.pop(session_id, None)
        seat = self._by_session.pop(session_id, None)
        if seat is None:
            return
        student = self._students[seat.student_id]
        del student.seats[session_id]
        student.closed.pop(session_id, None)
        if student.seats:
            return
        del self._students[seat.student_id]
        if not self._students:
            self._highest_asked = -1

    def note_asked(self, number: int) -> None:
        """Note that a reader asked for a step and got it."""
        self._highest_asked = max(self._highest_asked, number)

    def note_wanted(self, session_id: str, steps: Iterable[int]) -> None:
        """Note for which steps a reader waits now."""
        if session_id in self._by_session:
            self._wanted[session_id] = set(steps)

    def want_also(self, session_id: str, step: int) -> None:
        """Note that a reader waits for one step more; the highest few are kept."""
        if session_id in self._by_session:
            wanted = self._wanted.setdefault(session_id, set())
            wanted.add(step)
            if len(wanted) > MAX_WANTED:
                wanted.remove(min(wanted))

    def want_no_more(self, session_id: str, step: int) -> None:
        """Note that a reader has got a step."""
        self._wanted.get(session_id, set()).discard(step)

    def wanted(self) -> set[int]:
        """Return the steps that some reader waits for."""
        return set().union(*self._wanted.values())

    def have_read(self, step: Step) -> bool:
        """Say whether every reader that a step waits for has read it, and there is one at all."""
        there = [s for s in self._students.values() if s.is_there(step.number)]
        return bool(there) and all(
            len(step.consumed.get(student.student_id, ()))
            >= student.data_parallel_size * student.readers_per_rank
            for student in there
            if student.begin <= step.number
        )

    def waited_for(self, step: Step) -> dict[str, list[int]]:
        """Return the ranks of each student that have not read a step yet."""
        waiting = {}
        for student_id, student in self._students.items():
            done = Counter(seat.rank for seat in step.consumed.get(student_id, ()))
            ranks = [
                rank
                for rank in range(student.data_parallel_size)
                if done[rank] < student.readers_per_rank
            ]
            if ranks and student.begin <= step.number and student.is_there(step.number):
                waiting[student_id] = ranks
        return waiting


def _grid_conflict(student_id: str, name: str, has: int, says: int) -> Violation:
    return Violation(
        rule="student_grid_conflict",
        message=f"other sessions of student {student_id!r} say {name} {has}, this one {says}; give "
        "each training job a student_id of its own",
        facts={f"student_{name}": says, f"other_{name}": has},
    )


def rank_taken(student: StudentProfile, standing: Standing) -> Violation:
    """Return the rule that a reader of a rank breaks whose seats are taken."""
    facts: dict[str, Fact] = {
        "student_id": student.student_id[:48],
        "data_parallel_rank": student.data_parallel_rank,
        "readers_per_rank": student.readers_per_rank,
        **standing.facts,
    }
    return Violation(
        rule="rank_taken",
        message=f"data-parallel rank {student.data_parallel_rank} of student "
        f"{facts['student_id']!r} is read by {standing.text}: give each rank its own "
        "data_parallel_rank=, say readers_per_rank= where several read one rank's rows, or give "
        "another job its student_id=",
        facts=facts,
    )
