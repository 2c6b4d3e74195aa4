"""The teachers that the server's own engines are, by name.

Pure, and the same for as long as the server lives. Refuses two of one name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.terms import Check


@dataclass(frozen=True, kw_only=True)
class EngineTeacher:
    """One of them.

    ``checks`` are shown in every session with it. ``pool_size_bytes``: most bytes of host memory
    that its payloads may take together; None for as much as there is.
    """

    profile: TeacherProfile
    checks: tuple[Check, ...] = ()
    pool_size_bytes: int | None = None


class EngineTeachers:
    """All of them, in the order in which they were given."""

    def __init__(self, teachers: Sequence[EngineTeacher]) -> None:
        self._teachers = {each.profile.teacher_id: each for each in teachers}
        if len(self._teachers) < len(teachers):
            names = ", ".join(each.profile.teacher_id for each in teachers)
            raise ValueError(f"two engines have one name: {names}")

    def __iter__(self) -> Iterator[EngineTeacher]:
        return iter(self._teachers.values())

    def find(self, teacher_id: str) -> EngineTeacher | None:
        """Return the teacher of that name, if an engine is one."""
        return self._teachers.get(teacher_id)

    @property
    def profiles(self) -> tuple[TeacherProfile, ...]:
        """What each engine says of its teacher."""
        return tuple(each.profile for each in self)

    @property
    def names(self) -> str:
        """All names, for messages."""
        return ", ".join(self._teachers) or "none"
