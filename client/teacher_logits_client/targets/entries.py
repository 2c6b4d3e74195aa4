"""Entries: which columns of a payload have its ids and their log-probabilities, whatever they are.

    topk_ids, topk_logprobs, log_tail      the K best
    scored_ids, scored_logprobs, log_tail  ids of the client's choice
    sampled_ids, sampled_weights           a sample: its weights' logs, and nothing outside

Targets are made of the first form, where a payload has it. The others are brought into it without
a copy but for the logs, and nothing else tells them apart but that a sample says so: not every loss
may be fed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from teacher_logits.layout import ColumnKind

if TYPE_CHECKING:
    from collections.abc import Iterator


class Entries(Mapping[ColumnKind, torch.Tensor]):
    """A payload's columns, its entries under the names of the K best.

    ``is_sample`` says whether their log-probabilities are those of unbiased weights.
    """

    def __init__(self, columns: Mapping[ColumnKind, torch.Tensor]) -> None:
        self._columns = columns
        # By what it lists: of rows of padding alone, any column can be had.
        self._kinds = frozenset(columns)
        has_best = ColumnKind.TOPK_IDS in self._kinds
        self.is_sample = ColumnKind.SAMPLED_IDS in self._kinds and not has_best
        self._names: dict[ColumnKind, ColumnKind] = {}
        if self.is_sample:
            self._names = {ColumnKind.TOPK_IDS: ColumnKind.SAMPLED_IDS}
        elif ColumnKind.SCORED_IDS in self._kinds and not has_best:
            self._names = {
                ColumnKind.TOPK_IDS: ColumnKind.SCORED_IDS,
                ColumnKind.TOPK_LOGPROBS: ColumnKind.SCORED_LOGPROBS,
            }

    @property
    def is_renamed(self) -> bool:
        """Whether they are not the K best, but stand under their names."""
        return bool(self._names)

    def __getitem__(self, kind: ColumnKind) -> torch.Tensor:
        if self.is_sample and kind is ColumnKind.TOPK_LOGPROBS:
            return self._columns[ColumnKind.SAMPLED_WEIGHTS].float().log()
        if self.is_sample and kind is ColumnKind.LOG_TAIL:
            weights = self._columns[ColumnKind.SAMPLED_WEIGHTS]
            return weights.new_full((len(weights), 1), -torch.inf, dtype=torch.float32)
        return self._columns[self._names.get(kind, kind)]

    def __iter__(self) -> Iterator[ColumnKind]:
        return iter(kind for kind in ColumnKind if kind in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, kind: object) -> bool:
        made = (ColumnKind.TOPK_LOGPROBS, ColumnKind.LOG_TAIL)
        if self.is_sample and kind in made:
            return True
        return isinstance(kind, ColumnKind) and self._names.get(kind, kind) in self._kinds
