"""The state of a soft cross entropy against dense teacher logits, streamed over the vocabulary.

A position's state is six numbers, folded tile by tile (docs/math.md, "Dense logits"). With m the
largest logit so far, of teacher t and student z, and every sum scaled again where a tile raises
its m:

    s_t = Σ exp(t - m_t)      d = Σ exp(t - m_t) (z - m_s)      CE = log s_s - d / s_t
    s_s = Σ exp(z - m_s)      e = Σ exp(t - m_t) (t - m_t)      H  = log s_t - e / s_t

States of different columns merge like tiles, so ranks that hold a shard each meet by one maximum
of [m_t, m_s] and one sum of [s_t, s_s, d, e] a position.

Promises: no clamp and no epsilon; what has no mass on the teacher's side adds 0, even where the
student rules it out; a NaN of either side stays one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from teacher_logits_client.losses.merging import finite
from teacher_logits_client.losses.powers import powers
from teacher_logits_client.targets import ABSENT_LOGPROB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.losses.sharding import VocabShard


@dataclass(kw_only=True, eq=False)
class StreamedSums:
    """The state of R positions, after the tiles that were folded in. All [R]."""

    teacher_top: torch.Tensor
    teacher_sum: torch.Tensor
    student_top: torch.Tensor
    student_sum: torch.Tensor
    cross: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def of_none(cls, count: int, dtype: torch.dtype, device: torch.device) -> StreamedSums:
        """Return the state of ``count`` positions before any column."""
        low = torch.full((count,), -torch.inf, dtype=dtype, device=device)
        zero = torch.zeros_like(low)
        return cls(
            teacher_top=low,
            teacher_sum=zero,
            student_top=low,
            student_sum=zero,
            cross=zero,
            entropy=zero,
        )

    @classmethod
    def together(cls, states: Sequence[StreamedSums]) -> StreamedSums:
        """Return the states of several runs of positions as one."""
        return cls(
            **{
                each.name: torch.cat([getattr(state, each.name) for state in states])
                for each in fields(cls)
            }
        )

    def fold(self, teacher: torch.Tensor, student: torch.Tensor) -> None:
        """Take in a tile [R,C] of both, over temperature and in the type of the state."""
        self.raise_tops(
            torch.maximum(self.teacher_top, teacher.amax(1)),
            torch.maximum(self.student_top, student.amax(1)),
        )
        below = teacher - finite(self.teacher_top).unsqueeze(1)
        p = powers(below.clone())
        self.teacher_sum = self.teacher_sum + p.sum(1)
        # Without mass, p is 0 whatever this is.
        self.entropy = self.entropy + below.clamp_min_(ABSENT_LOGPROB).mul_(p).sum(1)
        below = student - finite(self.student_top).unsqueeze(1)
        self.cross = self.cross + below.masked_fill(p == 0, 0.0).mul_(p).sum(1)
        self.student_sum = self.student_sum + powers(below).sum(1)

    def raise_tops(self, teacher_top: torch.Tensor, student_top: torch.Tensor) -> None:
        """Measure every sum from these logits [R], the largest of each position or near it."""
        fell = finite(self.teacher_top) - finite(teacher_top)
        scale = torch.where(self.teacher_sum == 0, 0.0, fell.exp())
        moved = finite(self.student_top) - finite(student_top)
        self.cross = _scaled(self.cross + moved * self.teacher_sum, scale)
        self.entropy = _scaled(self.entropy + fell * self.teacher_sum, scale)
        self.teacher_sum = self.teacher_sum * scale
        self.student_sum = torch.where(self.student_sum == 0, 0.0, self.student_sum * moved.exp())
        self.teacher_top, self.student_top = teacher_top, student_top

    def merge(self, shard: VocabShard, *, agreed: str) -> None:
        """Take in what the other ranks of a shard have, in two reductions."""
        count = len(self.cross)
        tops = torch.cat([self.teacher_top, self.student_top])
        tops = shard.maxima(tops, agreed=agreed)
        self.raise_tops(tops[:count], tops[count:])
        sums = [self.teacher_sum, self.student_sum, self.cross, self.entropy]
        self.teacher_sum, self.student_sum, self.cross, self.entropy = shard.sums(
            torch.stack(sums)
        ).unbind()

    def cross_entropy(self) -> torch.Tensor:
        """Return CE [R]."""
        return self.student_sum.log() - self.cross / self.teacher_sum

    def teacher_entropy(self) -> torch.Tensor:
        """Return H [R]."""
        return self.teacher_sum.log() - self.entropy / self.teacher_sum


def _scaled(sums: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the sums scaled: what a higher maximum makes vanish is 0, even where it is -inf."""
    return torch.where(scale == 0, 0.0, sums * scale)
