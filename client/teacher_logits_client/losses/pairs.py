"""Pairs: the logits of the K ids alone, each a position and a column of the head.

Where both sides are renormalised on the ids, nothing else has a say or a gradient: K products
of two vectors a position, and not V. On a GPU sums over pairs come in no fixed order.

Promises: a few pairs at a time, so that their vectors are no larger than a tile of logits; no
other column of the head is looked at, whatever it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from teacher_logits_client.losses.tiles import Tile


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Some of a tile's ids, [m] each: ``entries`` as the tile has them, the ``positions`` of
    [R] and the ``columns`` of the tile that they are at."""

    entries: torch.Tensor
    positions: torch.Tensor
    columns: torch.Tensor


def pairs_of(tile: Tile, hidden_width: int) -> Iterator[Pairs]:
    """Yield the ids in a tile, so many at a time that vectors of [m,H] are no larger than it."""
    count, width = tile.shape
    step = max(1, count * width // max(1, hidden_width))
    for entries, places in zip(tile.entries.split(step), tile.places.split(step), strict=True):
        yield Pairs(
            entries=entries,
            positions=places // width + tile.positions.start,
            columns=places % width,
        )
