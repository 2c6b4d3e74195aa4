"""The crowd: how many sessions there may be, of students and of publishers, and of one student.

Pure. Students and publishers have places of their own, so that neither keeps the other out. A
session counts until it has ended; one that was closed and may still be read from counts too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.profiles import StudentProfile
from teacher_logits_server.caps import Cap
from teacher_logits_server.sessions.session import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_server.sessions.session import Session


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """The most sessions of each kind; ``limits.Limits`` has the numbers' names."""

    max_sessions: int
    max_student_sessions: int
    max_publishers: int

    def check(self, sessions: Iterable[Session], profile: StudentProfile | TeacherProfile) -> None:
        """Refuse one session too many, of the kind of its profile.

        Raises:
            LimitReachedError: there are as many as may be.
        """
        there = [each.profile for each in sessions if each.phase is not Phase.ENDED]
        if not isinstance(profile, StudentProfile):
            self._publishers.check(sum(not isinstance(p, StudentProfile) for p in there))
            return
        students = [each for each in there if isinstance(each, StudentProfile)]
        self._all.check(len(students))
        own = sum(each.student_id == profile.student_id for each in students)
        self._of(profile.student_id).check(own)

    @property
    def _publishers(self) -> Cap:
        return Cap(
            name="publishers",
            most=self.max_publishers,
            flag="--max-publishers",
            what="publishers",
            way_out="close some",
        )

    @property
    def _all(self) -> Cap:
        return Cap(
            name="sessions",
            most=self.max_sessions,
            flag="--max-sessions",
            what="sessions of students",
            way_out="close some",
        )

    def _of(self, student_id: str) -> Cap:
        return Cap(
            name="student_sessions",
            most=self.max_student_sessions,
            flag="--max-student-sessions",
            what=f"sessions of student {student_id!r}",
            way_out="close those that it needs no more",
        )
