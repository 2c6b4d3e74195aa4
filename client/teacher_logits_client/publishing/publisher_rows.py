"""Which rows of a step a publisher writes: those that the batch grid gives its rank, or fewer.

The rows of a step that are no padding are its first. A rank of a partial last batch may have
fewer than its share of them, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_whole, rows_of_rank

if TYPE_CHECKING:
    from teacher_logits.grid import BatchGrid
    from teacher_logits.profiles import TeacherProfile


def rows_to_write(
    profile: TeacherProfile, rows: range | None, *, real_rows: int | None
) -> tuple[range, int]:
    """Return the rows that a publisher writes, and how many with the padding behind them.

    Raises:
        PayloadInvalidError: they are not among the step's, or all of them are padding.
        GridMismatchError: the profile's grid does not hold.
    """
    grid, end = _grid_of(profile), _real_rows(profile, real_rows)
    if rows is None:
        own = rows_of_rank(grid, profile.data_parallel_rank, side="teacher")
        rows = _cut(own, end)
        if not rows:
            raise _invalid(
                f"all rows of data-parallel rank {profile.data_parallel_rank} ({own.start} to "
                f"{own.stop - 1}) are padding, since the step has {end} real rows: such a rank "
                "publishes nothing for this step; skip it where publisher.rows_of_step(real_rows) "
                "is empty",
                first_row=own.start,
                real_rows=end,
            )
        return rows, len(own)
    if not isinstance(rows, range) or rows.step != 1 or not rows:
        raise _invalid(f"rows is {rows!r}: give a range of rows that follow one another")
    if rows.start < 0 or rows.stop > end:
        raise _invalid(
            f"rows {rows.start} to {rows.stop - 1} are not among the step's {end} real rows",
            first_row=rows.start,
            row_count=len(rows),
            real_rows=end,
        )
    return rows, len(rows)


def rows_of_step(profile: TeacherProfile, *, real_rows: int | None) -> range:
    """Return the rows of a step that a publisher writes; none where all are padding.

    Raises:
        PayloadInvalidError, GridMismatchError: as for ``rows_to_write``.
    """
    own = rows_of_rank(_grid_of(profile), profile.data_parallel_rank, side="teacher")
    return _cut(own, _real_rows(profile, real_rows))


def _grid_of(profile: TeacherProfile) -> BatchGrid:
    if profile.batch_grid is None:
        raise _invalid("the teacher's profile has no batch_grid, which says what its rows are")
    return profile.batch_grid


def _real_rows(profile: TeacherProfile, real_rows: int | None) -> int:
    """Return how many rows of the step are no padding."""
    size = _grid_of(profile).global_batch_size
    if real_rows is None:
        return size
    if not (is_whole(real_rows) and 1 <= real_rows <= size):
        raise _invalid(
            f"real_rows is {real_rows}, and a step has {size} rows: give 1 to {size}, or leave "
            "it out for all",
            real_rows=str(real_rows),
            global_batch_size=size,
        )
    return int(real_rows)


def _cut(own: range, end: int) -> range:
    """Return those of a rank's rows that stand before the step's padding."""
    return range(own.start, max(own.start, min(own.stop, end)))


def _invalid(message: str, **facts: int | str) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
