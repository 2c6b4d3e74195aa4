"""Shard parts: how the ranks of a tensor- and context-parallel teacher divide their rows.

A teacher says in its profile by what its shards are divided (``sharded_by``):

    nothing      one publisher a data-parallel rank writes all of its rows
    sequence     context-parallel rank c of C holds one run of each row, the c-th of equal parts
    zigzag       it holds two, parts c and 2C-1-c of 2C (``zigzag``)
    vocabulary   tensor-parallel rank t of T holds ids [t·w, (t+1)·w), w = ceil(head_rows / T)

Each rank that holds ids is a publisher, and each publisher a shard. Shards are counted by
data-parallel rank, context-parallel part, tensor-parallel part, the last innermost:

    shard = (dp rank * sequence parts + sequence part) * vocabulary parts + vocabulary part

A vocabulary part says of its own ids what a payload says of all: log-probabilities, tail and
normaliser within them. With the raw logits beside them, parts are merged exactly. Pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import GridMismatchError, PayloadInvalidError
from teacher_logits.grid import check_rank
from teacher_logits.zigzag import zigzag_positions

if TYPE_CHECKING:
    from teacher_logits.locality import ModelGrid


class ShardedBy(enum.Enum):
    """What the ranks of one data-parallel rank divide."""

    VOCABULARY = "vocabulary"
    SEQUENCE = "sequence"
    ZIGZAG = "zigzag"


BY_SEQUENCE = (ShardedBy.SEQUENCE, ShardedBy.ZIGZAG)


class Sharded(Protocol):
    """What is asked of a teacher's profile here."""

    @property
    def sharded_by(self) -> tuple[ShardedBy, ...]:
        """See ``TeacherProfile``."""

    @property
    def model_grid(self) -> ModelGrid | None:
        """See ``TeacherProfile``."""

    @property
    def data_parallel_rank(self) -> int:
        """See ``TeacherProfile``."""

    @property
    def vocabulary_size(self) -> int:
        """See ``TeacherProfile``."""

    @property
    def head_rows(self) -> int:
        """See ``TeacherProfile``."""


@dataclass(frozen=True, kw_only=True)
class ShardPart:
    """Which part of its rows a payload holds.

    ``sequence_part`` of ``sequence_parts``, whose positions ``row_runs`` says where there are
    several; and the ids from ``first_id`` to before ``stop_id``.
    """

    sequence_part: int
    sequence_parts: int
    first_id: int
    stop_id: int

    @property
    def text(self) -> str:
        """What messages call it."""
        return (
            f"sequence part {self.sequence_part} of {self.sequence_parts}, ids {self.first_id} to "
            f"{self.stop_id - 1}"
        )


@dataclass(frozen=True, kw_only=True)
class PartGrid:
    """Into how many shards a teacher divides the rows of one data-parallel rank."""

    sequence_parts: int = 1
    vocabulary_parts: int = 1

    @property
    def count(self) -> int:
        """Shards a data-parallel rank."""
        return self.sequence_parts * self.vocabulary_parts

    def rank_of(self, shard: int) -> int:
        """Return the data-parallel rank of a shard."""
        return shard // self.count

    def text_of(self, shard: int) -> str:
        """Return a shard's number, and which part of which rank it is where ranks have several."""
        if self.count == 1:
            return str(shard)
        sequence, vocabulary = divmod(shard % self.count, self.vocabulary_parts)
        return (
            f"{shard} (data-parallel rank {self.rank_of(shard)}, context-parallel part {sequence}, "
            f"tensor-parallel part {vocabulary})"
        )


UNDIVIDED = PartGrid()


def part_grid(profile: Sharded) -> PartGrid:
    """Return into how many shards a teacher divides the rows of a data-parallel rank."""
    model = profile.model_grid
    if model is None or not profile.sharded_by:
        return UNDIVIDED
    by_sequence = any(each in BY_SEQUENCE for each in profile.sharded_by)
    by_vocabulary = ShardedBy.VOCABULARY in profile.sharded_by
    width = _width(profile, model)
    return PartGrid(
        sequence_parts=model.context_parallel_size if by_sequence else 1,
        vocabulary_parts=-(-profile.vocabulary_size // width) if by_vocabulary else 1,
    )


def shard_of(profile: Sharded) -> int:
    """Return the shard that a publisher writes."""
    grid, model = part_grid(profile), profile.model_grid
    if model is None or grid.count == 1:
        return profile.data_parallel_rank
    sequence = model.context_parallel_rank if grid.sequence_parts > 1 else 0
    vocabulary = model.tensor_parallel_rank if grid.vocabulary_parts > 1 else 0
    rank = profile.data_parallel_rank
    return (rank * grid.sequence_parts + sequence) * grid.vocabulary_parts + vocabulary


def is_shard(profile: Sharded) -> bool:
    """Say whether a rank is to publish: not one that holds a copy of another's part, or no ids.

    Of ranks that hold the same, as tensor-parallel ones do where the vocabulary is not divided,
    the first publishes.

    Raises:
        GridMismatchError: it is no rank of its model grid: it would take another's part, or none.
    """
    grid, model = part_grid(profile), profile.model_grid
    if model is None:
        return True
    broken = check_rank(
        model.tensor_parallel_rank, model.tensor_parallel_size, name="tensor_parallel_rank"
    ) + check_rank(
        model.context_parallel_rank, model.context_parallel_size, name="context_parallel_rank"
    )
    if broken:
        raise GridMismatchError(broken)
    if columns_of_rank(profile).start >= profile.vocabulary_size:
        return False
    by_vocabulary = ShardedBy.VOCABULARY in profile.sharded_by
    is_copy = (grid.sequence_parts == 1 and model.context_parallel_rank > 0) or (
        not by_vocabulary and model.tensor_parallel_rank > 0
    )
    return not is_copy


def part_of(profile: Sharded) -> ShardPart | None:
    """Return which part of its rows a publisher writes; None where it writes all of them."""
    grid, model = part_grid(profile), profile.model_grid
    if model is None or grid.count == 1:
        return None
    columns = columns_of_rank(profile)
    return ShardPart(
        sequence_part=model.context_parallel_rank if grid.sequence_parts > 1 else 0,
        sequence_parts=grid.sequence_parts,
        first_id=columns.start,
        stop_id=min(columns.stop, profile.vocabulary_size),
    )


def columns_of_rank(profile: Sharded) -> range:
    """Return the columns of the head that a publisher's logits have, padding included."""
    model = profile.model_grid
    if model is None or ShardedBy.VOCABULARY not in profile.sharded_by:
        return range(profile.head_rows)
    width = _width(profile, model)
    start = model.tensor_parallel_rank * width
    return range(start, max(start, min(start + width, profile.head_rows)))


def runs_of_part(
    length: int, *, part: int, parts: int, sharded_by: tuple[ShardedBy, ...]
) -> tuple[range, ...]:
    """Return the runs of a row of ``length`` positions that a context-parallel rank holds.

    Raises:
        PayloadInvalidError: the row cannot be cut into parts of equal length, or there is no such
            part.
    """
    if not 0 <= part < parts:
        raise PayloadInvalidError(
            f"part {part} of {parts} is none: they are counted from 0",
            facts={"part": part, "parts": parts},
        )
    if ShardedBy.ZIGZAG in sharded_by:
        return zigzag_positions(length, rank=part, size=parts)
    if length % parts:
        raise PayloadInvalidError(
            f"a row of {length} positions cannot be cut into {parts} parts of equal length: pad it "
            f"to a multiple of {parts}",
            facts={"length": length, "parts": parts},
        )
    width = length // parts
    return (range(part * width, (part + 1) * width),)


def _width(profile: Sharded, model: ModelGrid) -> int:
    return max(1, -(-profile.head_rows // max(1, model.tensor_parallel_size)))
