"""A linear head over tiles: its weight some columns at a time, its logits a tile at a time.

Promises: no array of positions by columns but of one tile, in a buffer that is used over and
over, and a second where a soft cap is there; the weight cast for as many columns as a tile has,
and not even that where its type will do. The same logits each time that they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits_client.losses.products import factor_type, multiply
from teacher_logits_client.losses.tiles import Tile, tile_shape, tiles_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_client.losses.head_logits import HeadLogits
    from teacher_logits_client.losses.pairs import Pairs


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Some columns of the head: their weight [n,H], bias [n] or None, and ``tiles`` of them.

    The weight is in the type of factors, as ``TiledHead.hidden`` is (``products``).
    """

    part: slice
    weight: torch.Tensor
    bias: torch.Tensor | None
    tiles: list[Tile]


class TiledHead:
    """A head over the ``rows`` [R] of its hidden states that count, at one temperature.

    ``hidden`` [R,H] are those, in the type of factors; ``dtype`` is what all is summed in: fp64
    where anything of the head is, and fp32 else. ``ids`` int64 [R,K] are what its tiles know the
    places of.
    """

    def __init__(
        self, head: HeadLogits, rows: torch.Tensor, ids: torch.Tensor, temperature: float
    ) -> None:
        given = [head.hidden, head.weight] + ([] if head.bias is None else [head.bias])
        wide = any(each.dtype == torch.float64 for each in given)
        self.dtype = torch.float64 if wide else torch.float32
        self._factors = factor_type(head.hidden, head.weight, self.dtype)
        flat = head.hidden.reshape(-1, head.hidden.shape[-1])
        self.hidden = (flat if len(rows) == len(flat) else flat[rows]).to(self._factors)
        self._head = head
        self._temperature = temperature
        width = len(head.weight)
        shape = tile_shape(len(rows), width, flat.shape[1], flat.device)
        self._tiles = tiles_of(ids, width, shape)
        self._buffers: list[torch.Tensor] = []

    def columns(self) -> Iterator[Columns]:
        """Yield all columns, some at a time."""
        for tiles in self._tiles:
            if tiles:
                part = tiles[0].columns
                bias = None if self._head.bias is None else self._head.bias[part].to(self.dtype)
                weight = self._head.weight[part].to(self._factors)
                yield Columns(part=part, weight=weight, bias=bias, tiles=tiles)

    def logits(self, tile: Tile, columns: Columns) -> torch.Tensor:
        """Return the logits over temperature [c,n], in a buffer: good until the next call."""
        logits = self._buffer(0, tile)
        multiply(self.hidden[tile.positions], columns.weight.t(), into=logits)
        if columns.bias is not None:
            logits.add_(columns.bias)
        return self._scaled(logits)

    def logits_at(self, pairs: Pairs, columns: Columns) -> torch.Tensor:
        """Return the logits over temperature of some pairs [m]."""
        rows, weight = self.hidden[pairs.positions], columns.weight[pairs.columns]
        logits = (rows.to(self.dtype) * weight).sum(1)
        if columns.bias is not None:
            logits.add_(columns.bias[pairs.columns])
        return self._scaled(logits)

    def slopes(self, tile: Tile, logits: torch.Tensor) -> torch.Tensor | None:
        """Return what a soft cap has the gradient multiplied by [c,n], for a tile's ``logits``.

        None without a cap. In a buffer, as they are.
        """
        return None if self._head.soft_cap is None else self._slopes(logits, self._buffer(1, tile))

    def slopes_at(self, pairs: Pairs, columns: Columns) -> torch.Tensor | None:
        """Return the same for some pairs [m], whose logits are made again if there is a cap."""
        if self._head.soft_cap is None:
            return None
        logits = self.logits_at(pairs, columns)
        return self._slopes(logits, logits)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        cap, scale = self._head.soft_cap, self._head.scale
        if cap is None:
            return _times(logits, scale / self._temperature)
        return _times(_times(logits, scale / cap).tanh_(), cap / self._temperature)

    def _slopes(self, logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write 1 - tanh² to ``out``."""
        torch.mul(logits, self._temperature / (self._head.soft_cap or 1.0), out=out)
        return out.square_().neg_().add_(1.0)

    def _buffer(self, number: int, tile: Tile) -> torch.Tensor:
        size = tile.shape[0] * tile.shape[1]
        while len(self._buffers) <= number:  # The first tile is as large as any.
            self._buffers.append(self.hidden.new_empty(size, dtype=self.dtype))
        return self._buffers[number][:size].view(tile.shape)


def _times(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values if factor == 1.0 else values.mul_(factor)
