"""The batch grid: how one side cuts the step's global batch, and when two cuts fit.

One step has ``global_batch_size`` rows. A side cuts them contiguously over its data-parallel
ranks, and each rank cuts its rows contiguously into micro batches. Example: 12 rows,
3 ranks, micro batches of 2:

    row            0  1  2  3 |  4  5  6  7 |  8  9 10 11
    rank               0      |      1      |      2
    micro batch    0     1    |  0     1    |  0     1

Promises: every broken rule is named, with its numbers, and the first one named is the one
that NeMo RL would have stopped at. Refuses what NeMo RL lets through: a size below 1, a
boolean, anything that is not a whole number. Nothing here rests on ``assert``.

The rules, in the order in which they are checked; each needs what stands behind "given":

    not_positive            every size is a whole number of at least 1
    gbs_mismatch            step, student and teacher say the same global batch size
    student_dp_indivisible  the step's rows split over the student's ranks
    teacher_dp_indivisible  the step's rows split over the teacher's ranks
    student_mbs_indivisible a rank's rows split into micro batches, given student_dp_indivisible
    teacher_mbs_indivisible a rank's rows split into micro batches, given teacher_dp_indivisible
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from teacher_logits.errors import GridMismatchError, Violation

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

    from teacher_logits.errors import Fact

Side = Literal["student", "teacher"]


@dataclass(frozen=True, kw_only=True)
class BatchGrid:
    """How one side cuts the global batch. Sizes count rows, or ranks for data parallel.

    Building one checks nothing, so that a handshake can name every broken rule at once.
    """

    global_batch_size: int
    data_parallel_size: int
    micro_batch_size: int


def check_batch_grid(
    *, global_batch_size: int, student: BatchGrid, teacher: BatchGrid | None
) -> list[Violation]:
    """Return every rule that the two grids break on a step of ``global_batch_size`` rows.

    In the order of the module's table; empty where they fit. A rule whose premise already
    failed is left out. ``teacher=None`` leaves the teacher's side unchecked: only what the
    student's own numbers can break is looked at.
    """
    sides: dict[Side, BatchGrid] = {"student": student}
    if teacher is not None:
        sides["teacher"] = teacher
    sizes = {"global_batch_size": global_batch_size}
    for side, grid in sides.items():
        sizes |= batch_sizes(grid, side=side)
    return [
        *check_sizes(sizes),
        *_check_same_batch(global_batch_size, sides),
        *(v for side, grid in sides.items() for v in _check_ranks(global_batch_size, grid, side)),
        *(v for side, grid in sides.items() for v in _check_micro(global_batch_size, grid, side)),
    ]


def check_own_grid(grid: BatchGrid, *, side: Side) -> list[Violation]:
    """Return every rule that one side's grid breaks by itself, on a step of its own size."""
    return [
        *check_sizes(batch_sizes(grid, side=side)),
        *_check_ranks(grid.global_batch_size, grid, side),
        *_check_micro(grid.global_batch_size, grid, side),
    ]


def batch_sizes(grid: BatchGrid, *, side: Side) -> dict[str, int]:
    """Return the grid's sizes under the names that messages and facts give them."""
    return {
        f"{side}_global_batch_size": grid.global_batch_size,
        f"{side}_data_parallel_size": grid.data_parallel_size,
        f"{side}_micro_batch_size": grid.micro_batch_size,
    }


def is_whole(value: object) -> TypeGuard[int]:
    """Say whether ``value`` is a whole number, NumPy's included; booleans are none here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_size(value: object) -> TypeGuard[int]:
    """Say whether ``value`` is a whole number of at least 1."""
    return is_whole(value) and value >= 1


def check_sizes(sizes: Mapping[str, object]) -> list[Violation]:
    """Return one ``not_positive`` violation that names each bad size, or nothing."""
    bad = {name: value for name, value in sizes.items() if not is_size(value)}
    if not bad:
        return []
    named = ", ".join(f"{name} is {_shown(value)}" for name, value in bad.items())
    message = f"{named}; give each a whole number of at least 1"
    facts = {name: _fact(value) for name, value in bad.items()}
    return [Violation(rule="not_positive", message=message, facts=facts)]


def check_rank(rank: object, size: object, *, name: str) -> list[Violation]:
    """Return a ``rank_out_of_range`` violation where ``rank`` is not one of 0 to ``size`` - 1.

    ``name`` is what message and facts call the rank, e.g. ``student_data_parallel_rank``. A
    ``size`` that is itself no size is ``not_positive``'s to name: then nothing is said here.
    """
    if not is_size(size) or (is_whole(rank) and 0 <= rank < size):
        return []
    message = f"{name} is {_shown(rank)}; {size} ranks count from 0 to {size - 1}"
    facts = {name: _fact(rank), f"{name}_count": int(size)}
    return [Violation(rule="rank_out_of_range", message=message, facts=facts)]


def rows_of_rank(grid: BatchGrid, rank: int, *, side: Side = "student") -> range:
    """Return the rows of the global batch that data-parallel ``rank`` holds: [d·G/D, (d+1)·G/D).

    ``side`` only chooses the rule names of a refusal.

    Raises:
        GridMismatchError: the grid breaks a rule by itself, or has no such rank.
    """
    rows, _ = _cut(grid, rank, side)
    return rows


def micro_batches(grid: BatchGrid, rank: int, *, side: Side = "student") -> list[range]:
    """Return the rows of each of ``rank``'s micro batches, in order; they tile ``rows_of_rank``.

    Raises:
        GridMismatchError: the grid breaks a rule by itself, or has no such rank.
    """
    rows, size = _cut(grid, rank, side)
    return [range(start, start + size) for start in range(rows.start, rows.stop, size)]


def _cut(grid: BatchGrid, rank: int, side: Side) -> tuple[range, int]:
    """Return a rank's rows and its micro batch size, once the grid is known to hold."""
    violations = [
        *check_own_grid(grid, side=side),
        *check_rank(rank, grid.data_parallel_size, name=f"{side}_data_parallel_rank"),
    ]
    if violations:
        raise GridMismatchError(violations)
    count = int(grid.global_batch_size) // int(grid.data_parallel_size)
    start = int(rank) * count
    return range(start, start + count), int(grid.micro_batch_size)


def _check_same_batch(gbs: int, sides: Mapping[Side, BatchGrid]) -> list[Violation]:
    said = {"global_batch_size": gbs}
    said |= {f"{side}_global_batch_size": grid.global_batch_size for side, grid in sides.items()}
    sizes = {name: int(size) for name, size in said.items() if is_size(size)}
    if len(set(sizes.values())) < 2:
        return []
    named = ", ".join(f"{name} is {size}" for name, size in sizes.items())
    message = f"{named}; step and sides need one and the same"
    return [Violation(rule="gbs_mismatch", message=message, facts=sizes)]


def _check_ranks(gbs: int, grid: BatchGrid, side: Side) -> list[Violation]:
    ranks = grid.data_parallel_size
    if not (is_size(gbs) and is_size(ranks)) or gbs % ranks == 0:
        return []
    message = f"global batch {gbs} does not split over {ranks} {side} ranks; use a divisor of {gbs}"
    facts: dict[str, Fact] = {
        "global_batch_size": int(gbs),
        f"{side}_data_parallel_size": int(ranks),
    }
    return [Violation(rule=f"{side}_dp_indivisible", message=message, facts=facts)]


def _check_micro(gbs: int, grid: BatchGrid, side: Side) -> list[Violation]:
    ranks, size = grid.data_parallel_size, grid.micro_batch_size
    if not all(map(is_size, (gbs, ranks, size))) or gbs % ranks or gbs // ranks % size == 0:
        return []
    rows = int(gbs) // int(ranks)
    message = (
        f"each of {ranks} {side} ranks holds {rows} of {gbs} rows, which do not split into micro "
        f"batches of {size}; use a divisor of {rows}"
    )
    facts: dict[str, Fact] = {
        "global_batch_size": int(gbs),
        f"{side}_data_parallel_size": int(ranks),
        f"{side}_rows_per_rank": rows,
        f"{side}_micro_batch_size": int(size),
    }
    return [Violation(rule=f"{side}_mbs_indivisible", message=message, facts=facts)]


def _shown(value: object) -> str:
    """Return the value for a message, cut short, with its type where it is no whole number."""
    return str(value) if is_whole(value) else f"{reprlib.repr(value)} ({type(value).__name__})"


def _fact(value: object) -> Fact:
    return int(value) if is_whole(value) else _shown(value)
