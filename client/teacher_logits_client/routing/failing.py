"""How an error of one of several teachers says whose it is, and which row of the batch it names."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from teacher_logits.errors import TeacherLogitsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def about(teacher_id: str, rows: Sequence[int] = ()) -> Iterator[None]:
    """Have an error say that it is about a teacher.

    Args:
        rows: places in the batch of the rows that the teacher has; an error counts among these.
    """
    try:
        yield
    except TeacherLogitsError as error:
        where = f"teacher {teacher_id!r}"
        row = error.facts.get("row", error.facts.get("first_row"))
        if isinstance(row, int) and 0 <= row < len(rows):
            where += f" (its row {row} is row {rows[row]} of the batch)"
            error.facts["batch_row"] = rows[row]
        error.message = f"{where}: {error.message}"
        error.args = (error.message,)
        error.facts["teacher_id"] = teacher_id
        raise
