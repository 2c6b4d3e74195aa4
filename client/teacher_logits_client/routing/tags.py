"""Tags: which teacher is to say something of which row.

Each teacher has tags of its own, and each row of a batch one tag. Refuses a tag that two teachers
have, a teacher that has none, and a row whose tag nobody has.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from teacher_logits.errors import PayloadInvalidError, RequestInvalidError, UnknownTeacherError

if TYPE_CHECKING:
    from collections.abc import Sequence

Tagged: TypeAlias = "Mapping[str, Iterable[str] | str] | Iterable[str]"
"""The tags of each teacher, by its id; or ids of teachers that are tags themselves."""


class Tags:
    """The tags of all teachers."""

    def __init__(self, tagged: Tagged) -> None:
        """Take them.

        Raises:
            RequestInvalidError: a tag is nobody's own or none, or there are no teachers.
        """
        self._of = by_teacher = _by_teacher(tagged)
        self.teachers = tuple(by_teacher)
        self._teacher_of: dict[str, str] = {}
        for teacher, tags in by_teacher.items():
            if not tags:
                raise _refuse(f"teacher {teacher!r} has no tags, so that no row is its own")
            for tag in tags:
                other = self._teacher_of.setdefault(tag, teacher)
                if other != teacher:
                    raise _refuse(
                        f"tag {tag!r} is of teacher {other!r} and of teacher {teacher!r}: a row "
                        "with it has one teacher; give each tag to one of them",
                        tag=tag,
                    )

    def of(self, teacher_id: str) -> tuple[str, ...]:
        """Return a teacher's tags."""
        return self._of[teacher_id]

    def split(self, tags: Sequence[str], *, row_count: int) -> dict[str, list[int]]:
        """Return the rows of each teacher that has some, by its id and in the batch's order.

        Raises:
            PayloadInvalidError: there is not one tag a row.
            UnknownTeacherError: no teacher has a row's tag.
        """
        if isinstance(tags, str) or not isinstance(tags, Iterable):
            raise PayloadInvalidError(
                f"tags is {reprlib.repr(tags)}: give a list with one tag a row",
                facts={"given": type(tags).__name__},
            )
        listed = list(tags)
        if len(listed) != row_count:
            raise PayloadInvalidError(
                f"{len(listed)} tags are given for {row_count} rows: give one a row",
                facts={"tags": len(listed), "rows": row_count},
            )
        rows: dict[str, list[int]] = {}
        for row, tag in enumerate(listed):
            teacher = self._teacher_of.get(tag) if isinstance(tag, str) else None
            if teacher is None:
                known = ", ".join(self._teacher_of)
                raise UnknownTeacherError(
                    f"row {row} has the tag {tag!r}, and no teacher has that; there are: {known}",
                    facts={"row": row, "tag": str(tag), "tags": known},
                )
            rows.setdefault(teacher, []).append(row)
        return {teacher: rows[teacher] for teacher in self.teachers if teacher in rows}


def _by_teacher(tagged: Tagged) -> dict[str, tuple[str, ...]]:
    if isinstance(tagged, str) or not isinstance(tagged, Iterable):
        raise _refuse(f"teachers are {tagged!r}: give their ids, or a mapping of ids to tags")
    if isinstance(tagged, Mapping):
        by_teacher = {
            teacher: (tags,) if isinstance(tags, str) else tuple(tags)
            for teacher, tags in tagged.items()
        }
    else:
        listed = tuple(tagged)
        by_teacher = {teacher: (teacher,) for teacher in listed}
        if len(by_teacher) < len(listed):
            raise _refuse(f"teachers {', '.join(map(str, listed))}: one of them is named twice")
    if not by_teacher:
        raise _refuse("no teacher is named, to whom a row could go")
    for teacher, tags in by_teacher.items():
        for text in (teacher, *tags):
            if not isinstance(text, str) or not text:
                raise _refuse(f"{text!r} is no name: ids of teachers and tags are texts")
    return by_teacher


def _refuse(message: str, **facts: str) -> RequestInvalidError:
    return RequestInvalidError(message, facts=facts)
