"""Global order: what the workers of many ranks hold, row by row of the whole batch.

Every worker of a data-parallel rank (one for each tensor- and context-parallel place) answers
with one handle a row of that rank. Ranks hold their rows contiguously, in the order of ranks:

    rank 0, place 0   a b        row 0 of the batch: a c
    rank 1, place 0   e f   ->   row 1             : b d
    rank 0, place 1   c d        row 2             : e    row 3: f

Pure: what a handle is does not matter here. Refuses what would move rows into the place of others:
a rank that is missing, workers of one rank that hold differing numbers of rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_whole
from teacher_logits_client.ray.given import check_sizes_given

if TYPE_CHECKING:
    from collections.abc import Iterable

Handle = TypeVar("Handle")


@dataclass(frozen=True, kw_only=True)
class RankHandles(Generic[Handle]):
    """What one worker answers: its data-parallel rank, and a handle for each of its rows."""

    data_parallel_rank: int
    handles: tuple[Handle, ...]

    def __post_init__(self) -> None:
        if not is_whole(self.data_parallel_rank) or not isinstance(self.handles, tuple | list):
            told = type(self.handles).__name__
            raise PayloadInvalidError(
                f"data-parallel rank {self.data_parallel_rank!r} holds a {told}: give a whole "
                "number, and a tuple with one handle a row",
                facts={"data_parallel_rank": repr(self.data_parallel_rank), "handles": told},
            )


def in_global_order(
    answers: Iterable[RankHandles[Handle]], *, data_parallel_size: int | None = None
) -> list[tuple[Handle, ...]]:
    """Return the handles of each row of the batch, in the order in which workers answered.

    Without ``data_parallel_size`` a rank that is missing at the end cannot be told.

    Raises:
        PayloadInvalidError: ranks are missing or too many, or workers of one rank disagree about
            its number of rows.
    """
    by_rank: dict[int, list[tuple[Handle, ...]]] = defaultdict(list)
    check_sizes_given(data_parallel_size=data_parallel_size)
    for place, answer in enumerate(answers):
        if not isinstance(answer, RankHandles):
            raise PayloadInvalidError(
                f"worker {place} answered {type(answer).__name__}: give a RankHandles of each",
                facts={"place": place, "type": type(answer).__name__},
            )
        by_rank[answer.data_parallel_rank].append(answer.handles)
    size = max(by_rank, default=-1) + 1 if data_parallel_size is None else data_parallel_size
    if by_rank.keys() != set(range(size)):
        missing = sorted(set(range(size)) - by_rank.keys())
        beyond = sorted(by_rank.keys() - set(range(size)))
        raise PayloadInvalidError(
            f"of {size} data-parallel ranks, rank {missing or 'none'} did not answer, and rank "
            f"{beyond or 'none'} is not one of them: rows would take the place of others",
            facts={"ranks": size, "missing": str(missing), "beyond": str(beyond)},
        )
    rows: list[tuple[Handle, ...]] = []
    for rank in range(size):
        counts = {len(handles) for handles in by_rank[rank]}
        if len(counts) > 1:
            raise PayloadInvalidError(
                f"workers of data-parallel rank {rank} hold {sorted(counts)} rows: all of them "
                "hold the same",
                facts={"data_parallel_rank": rank, "row_counts": str(sorted(counts))},
            )
        rows += zip(*by_rank[rank], strict=True)
    return rows
