"""The order of an epoch's rows as a function of the epoch, so that a resumed run has it too.

A sampler that goes on drawing from one generator gives its n-th order to whoever iterates it the
n-th time. A run that is resumed in its third epoch iterates it for the first time, and would see
the first epoch's order again: some rows twice, and others not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class EpochOrder(Sampler[int]):
    """A sampler in the order that it would have in the epoch that ``epoch`` says.

    The order is the sampler's own, drawn by one permutation of all its rows an epoch from a
    ``generator`` that starts at its ``seed``, as TRL's is; where it has none, nothing changes.
    """

    def __init__(self, sampler: Sampler[int], epoch: Callable[[], int]) -> None:
        self._sampler = sampler
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        chance, seed = (getattr(self._sampler, name, None) for name in ("generator", "seed"))
        if isinstance(chance, torch.Generator) and isinstance(seed, int):
            chance.manual_seed(seed)
            for _ in range(self._epoch()):
                torch.randperm(self._sampler.num_samples, generator=chance)  # type: ignore[attr-defined]
        return iter(self._sampler)
