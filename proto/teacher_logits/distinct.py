"""Distinct: which positions name an id twice.

On a CPU a row of 64 ids sorted by itself takes microseconds; here all rows are sorted at once, by a
network: a bitonic one whose every comparison puts the smaller id first.

    blocks of 2, 4, 8, ... :  x[i] with x[size - 1 - i],  then halves, quarters, ... down to pairs

Each comparison is one minimum and one maximum over whole runs of memory, so that the cost is
log2(K) (log2(K) + 1) passes, which for K = 64 is a tenth of what ``torch.sort`` takes.
"""

from __future__ import annotations

import torch

_TILE_ENTRIES = 1 << 16
"""Ids sorted at a time: they and what is made of them stay in the cache."""


def repeats(ids: torch.Tensor) -> torch.Tensor:
    """Return which positions of ``ids`` int32 [P,K] hold an id of 0 or more twice, bool [P]."""
    if ids.device.type != "cpu" or ids.shape[1] < 2:
        return _neighbours(ids.sort(1).values.t())
    step = max(1, _TILE_ENTRIES // ids.shape[1])
    found = [_neighbours(_sorted(tile)) for tile in ids.split(step)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def _neighbours(ordered: torch.Tensor) -> torch.Tensor:
    """Return which columns of ``ordered`` [K,P] have equal neighbours, absent ones left out."""
    return ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any(0)


def _sorted(ids: torch.Tensor) -> torch.Tensor:
    """Return ids [P,K] with each position's in rising order, as [size,P], size a power of two."""
    count, k = ids.shape
    size = 1 << (k - 1).bit_length()
    rows = ids.new_full((size, count), -1)
    rows[:k] = ids.t()
    block = 2
    while block <= size:
        blocks = rows.view(size // block, 2, block // 2, count)
        first, second = blocks[:, 0], blocks[:, 1].flip(1)
        low = torch.minimum(first, second)
        blocks[:, 1] = torch.maximum(first, second)
        blocks[:, 0] = low
        half = block // 2
        while half > 1:
            pairs = rows.view(size // half, 2, half // 2, count)
            first, second = pairs[:, 0], pairs[:, 1]
            low = torch.minimum(first, second)
            torch.maximum(first, second, out=second)
            first.copy_(low)
            half //= 2
        block *= 2
    return rows
