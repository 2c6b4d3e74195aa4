"""What the teachers of these tests say: every number follows from step, row and position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

import teacher_logits_client as tl
from teacher_logits.digest import row_digest
from teacher_logits.grid import rows_of_rank
from teacher_logits.layout import ElementType
from teacher_logits.shard_parts import ShardedBy
from teacher_logits.tensors import DTYPES
from teacher_logits.zigzag import zigzag_positions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NEVER = 3600.0


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """A teacher and its students' common settings, in plain values.

    ``row_tokens`` are the lengths of a step's rows, by turns; with ``empty_every`` n, each nth
    row's window is empty. With ``context`` above 1 the one data-parallel rank is as many
    context-parallel ones, which divide its rows in zigzag order; ``rank`` then is theirs.
    """

    teacher_id: str = "device"
    rows: int = 4
    ranks: int = 1
    top_k: int = 5
    vocabulary_size: int = 61
    value_type: str = "float16"
    temperatures: tuple[float, ...] = (1.0, 2.0)
    row_tokens: tuple[int, ...] = (3, 7, 2, 5)
    empty_every: int = 0
    context: int = 1

    @property
    def grid(self) -> tl.BatchGrid:
        """The teacher's batch grid."""
        return tl.BatchGrid(
            global_batch_size=self.rows, data_parallel_size=self.ranks, micro_batch_size=1
        )

    def teacher(self, rank: int = 0) -> tl.TeacherProfile:
        """Return what a rank says of itself."""
        return tl.TeacherProfile(
            teacher_id=self.teacher_id,
            vocabulary_size=self.vocabulary_size,
            head_rows=self.vocabulary_size,
            top_k=self.top_k,
            max_row_tokens=max(self.row_tokens),
            temperatures=self.temperatures,
            value_type=ElementType(self.value_type),
            batch_grid=self.grid,
            data_parallel_rank=rank if self.context == 1 else 0,
            sharded_by=() if self.context == 1 else (ShardedBy.ZIGZAG,),
            model_grid=None if self.context == 1 else self._model_grid(rank),
        )

    def _model_grid(self, rank: int) -> tl.ModelGrid:
        return tl.ModelGrid(
            node_count=1,
            gpus_per_node=8,
            context_parallel_size=self.context,
            context_parallel_rank=rank,
        )

    def student(self, **wishes: object) -> tl.StudentProfile:
        """Return what a student of one rank says of itself."""
        given: dict[str, object] = {
            "teacher_id": self.teacher_id,
            "batch_grid": replace(self.grid, data_parallel_size=1),
            "top_k": self.top_k,
            "temperatures": self.temperatures[1:],
            "value_type": ElementType(self.value_type),
            **wishes,
        }
        return tl.StudentProfile(**given)  # type: ignore[arg-type]

    def rows_of(self, rank: int) -> range:
        """Return the rows that a rank of the teacher writes."""
        return rows_of_rank(self.grid, rank if self.context == 1 else 0)

    def tokens(self, step: int, row: int) -> list[int]:
        """Return a row's token ids."""
        count = self.row_tokens[(step + row) % len(self.row_tokens)]
        return [
            (step * 29 + row * 13 + position * 7) % self.vocabulary_size
            for position in range(count)
        ]

    def window(self, step: int, row: int) -> tuple[int, int]:
        """Return first position and count of a row."""
        empty = self.empty_every and row % self.empty_every == 0
        return (0, 0) if empty else (0, len(self.tokens(step, row)))

    def logits(self, step: int, rows: Sequence[int]) -> torch.Tensor:
        """Return what the teacher says about some rows, fp32 [P,V]."""
        columns = torch.arange(self.vocabulary_size)
        seeds = torch.tensor(
            [
                step * 7919 + row * 1031 + position * 173
                for row in rows
                for position in range(self.window(step, row)[1])
            ],
            dtype=torch.int64,
        ).unsqueeze(1)
        return ((seeds + columns * columns * 37 + columns * seeds) % 499) / 64

    def logits_of_part(self, step: int, rows: Sequence[int], rank: int) -> torch.Tensor:
        """Return those that a context-parallel rank has, flat, of rows each padded by itself."""
        logits = self.logits(step, rows)
        held, start, parts = [], 0, 2 * self.context
        for row in rows:
            count = self.window(step, row)[1]
            width = -(-len(self.tokens(step, row)) // parts) * parts
            held += [
                start + position
                for run in zigzag_positions(width, rank=rank, size=self.context)
                for position in run
                if position < count
            ]
            start += count
        return logits[held]

    def right(self, step: int, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return every column as it must be read."""
        ids = [self.tokens(step, row) for row in rows]
        counts = [self.window(step, row)[1] for row in rows]
        following = [
            token
            for row, count in zip(ids, counts, strict=True)
            for token in [*row[1:], -1][:count]
        ]
        kept = tl.select_top_k(
            self.logits(step, rows),
            k=self.top_k,
            temperatures=self.temperatures,
            next_ids=torch.tensor(following, dtype=torch.int64),
        )
        assert kept.actual_logprob is not None
        lengths = torch.tensor(counts)
        return {
            "topk_ids": kept.topk_ids,
            "topk_logprobs": kept.topk_logprobs.to(DTYPES[ElementType(self.value_type)]),
            "log_tail": kept.log_tail,
            "logsumexp": kept.logsumexp,
            "actual_logprob": kept.actual_logprob,
            "row_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            "row_windows": torch.tensor(
                [self.window(step, row) for row in rows], dtype=torch.int32
            ),
            "row_digests": torch.tensor([list(row_digest(row)) for row in ids], dtype=torch.uint8),
        }

    def check(
        self, columns: Mapping[str, torch.Tensor], step: int, rows: Sequence[int] = ()
    ) -> None:
        """Hold what was read against what was written, to the bit."""
        rows = rows or range(self.rows)
        for name, right in self.right(step, rows).items():
            found = columns[name]
            same = found.shape == right.shape and torch.equal(bits(found), bits(right))
            assert same, f"step {step}: {name} is {found}, and must be {right}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes: NaN differs from nothing, and -0.0 from 0.0."""
    return tensor.contiguous().view(-1).view(torch.uint8)
