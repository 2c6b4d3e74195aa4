"""Tiles: how [R,V] is cut into positions by columns, and which of the K ids lie in each.

             columns ->
    positions +------+------+----+
        |     |  0   |  2   | 4  |      numbered as they are gone through: all positions of
        v     +------+------+----+      some columns before the next columns
              |  1   |  3   | 5  |
              +------+------+----+

Promises: every id that is there lies in exactly one tile; one look at the device for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Elements of a tile of logits, and of the weight's: 4 MiB of fp32 each suit a CPU's caches.
_CPU_LOGITS, _CPU_WEIGHT, _CPU_POSITIONS = 1 << 20, 1 << 20, 512
_GPU_LOGITS, _GPU_WEIGHT, _GPU_POSITIONS = 1 << 26, 1 << 26, 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class Tile:
    """One tile: ``positions`` of [R] by ``columns`` of [V].

    ``entries`` int64 [m] are the ids in it, as places in [R*K]; ``places`` int64 [m] is where
    they are in the tile itself, laid out flat.
    """

    positions: slice
    columns: slice
    entries: torch.Tensor
    places: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """How many positions by how many columns."""
        return (
            self.positions.stop - self.positions.start,
            self.columns.stop - self.columns.start,
        )


def tile_shape(count: int, width: int, hidden_width: int, device: torch.device) -> tuple[int, int]:
    """Return the positions and the columns of a tile, for [R,V] and hidden states of [R,H]."""
    on_cpu = device.type == "cpu"
    logits, weight, most = (
        (_CPU_LOGITS, _CPU_WEIGHT, _CPU_POSITIONS)
        if on_cpu
        else (_GPU_LOGITS, _GPU_WEIGHT, _GPU_POSITIONS)
    )
    positions = max(1, min(count, most))
    columns = min(logits // positions, weight // max(1, hidden_width), width)
    return positions, max(1, columns)


def tiles_of(ids: torch.Tensor, width: int, shape: tuple[int, int]) -> list[list[Tile]]:
    """Return the tiles of [R,V] with V = ``width``, a list for each run of columns.

    ``ids`` int64 [R,K], -1 where absent; ``shape`` is that of a tile, as ``tile_shape`` has it.
    """
    count, k = ids.shape
    down = [slice(at, min(at + shape[0], count)) for at in range(0, count, shape[0])]
    across = [slice(at, min(at + shape[1], width)) for at in range(0, width, shape[1])]
    entries = (ids >= 0).view(-1).nonzero().squeeze(1)
    columns = ids.reshape(-1)[entries]
    positions = entries // max(1, k)
    numbers = (columns // shape[1]) * len(down) + positions // shape[0]
    order = numbers.argsort()
    sizes = numbers.bincount(minlength=len(down) * len(across)).tolist()
    entries, columns, positions = (each[order] for each in (entries, columns, positions))
    widths = (width - columns // shape[1] * shape[1]).clamp_max(shape[1])
    places = positions % shape[0] * widths + columns % shape[1]
    parts = zip(entries.split(sizes), places.split(sizes), strict=True)
    tiles: list[list[Tile]] = []
    for some in across:
        tiles.append([])
        for part in down:
            inside, at = next(parts)
            tiles[-1].append(Tile(positions=part, columns=some, entries=inside, places=at))
    return tiles
