"""Gradients of a linear head, summed up over tiles: of hidden states, weight and bias.

Promises: sums in the type that all is computed in, each rounded once to the type of what it is
the gradient of. The weight's is made in place where it has that type, and else some columns at
a time. What is not wanted is not made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits_client.losses.products import add_product

if TYPE_CHECKING:
    from teacher_logits_client.losses.head_logits import HeadLogits
    from teacher_logits_client.losses.pairs import Pairs
    from teacher_logits_client.losses.tiled_head import Columns, TiledHead
    from teacher_logits_client.losses.tiles import Tile


class HeadGradients:
    """``weight`` [V,H] and ``bias`` [V], None each where ``wanted`` says no, as of hidden.

    ``wanted`` is of hidden states, weight and bias. Columns come one run after another, each
    run between ``begin`` and ``finish``.
    """

    def __init__(self, head: HeadLogits, tiled: TiledHead, wanted: tuple[bool, ...]) -> None:
        self._rows, self._dtype = tiled.hidden, tiled.dtype
        # Of no rows no tile comes that would write to them.
        blank = torch.empty_like if len(self._rows) else torch.zeros_like
        plain = torch.contiguous_format
        self._of_rows = None
        if wanted[0]:
            self._of_rows = self._rows.new_zeros(self._rows.shape, dtype=self._dtype)
        self.weight = blank(head.weight, memory_format=plain) if wanted[1] else None
        self.bias = None
        if head.bias is not None and wanted[2]:
            self.bias = blank(head.bias, memory_format=plain)
        self._of_weight: torch.Tensor | None = None
        self._of_bias: torch.Tensor | None = None

    def begin(self, columns: Columns) -> None:
        """Start the sums of these columns."""
        if self.weight is not None:
            part = self.weight[columns.part]
            in_place = part.dtype == self._dtype
            self._of_weight = part.zero_() if in_place else self._zeros(part)
        if self.bias is not None:
            self._of_bias = self._zeros(self.bias[columns.part])

    def add(self, tile: Tile, columns: Columns, gradient: torch.Tensor) -> None:
        """Add what a tile's gradient [c,n] comes to."""
        if self._of_bias is not None:
            self._of_bias.add_(gradient.sum(0))
        factor = gradient.to(self._rows.dtype)
        if self._of_rows is not None:
            add_product(factor, columns.weight, to=self._of_rows[tile.positions])
        if self._of_weight is not None:
            add_product(factor.t(), self._rows[tile.positions], to=self._of_weight)

    def add_pairs(self, pairs: Pairs, columns: Columns, gradient: torch.Tensor) -> None:
        """Add what the gradient of some pairs [m] comes to."""
        if self._of_bias is not None:
            self._of_bias.index_add_(0, pairs.columns, gradient)
        factor = gradient.unsqueeze(1)
        if self._of_rows is not None:
            self._of_rows.index_add_(0, pairs.positions, factor * columns.weight[pairs.columns])
        if self._of_weight is not None:
            self._of_weight.index_add_(0, pairs.columns, factor * self._rows[pairs.positions])

    def finish(self, columns: Columns) -> None:
        """Round the sums of these columns, where they are not in place."""
        if self.weight is not None and self._of_weight is not None:
            if self._of_weight.dtype != self.weight.dtype:
                self.weight[columns.part] = self._of_weight
        if self.bias is not None and self._of_bias is not None:
            self.bias[columns.part] = self._of_bias

    def of_hidden(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of all of ``hidden``, 0 but at ``rows``; None if not wanted."""
        if self._of_rows is None:
            return None
        whole = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        whole.view(-1, hidden.shape[-1])[rows] = self._of_rows.to(hidden.dtype)
        return whole

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(like, dtype=self._dtype)
