"""Held rows: the runs of positions that a context-parallel rank holds (``shard_rows``)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    Index = slice | tuple[int | slice, slice]
    #: Where something of a caller's array belongs: (its place there, positions of the rows).
    Piece = tuple[Index, slice]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldRows:
    """What a context-parallel rank holds of N rows, in R runs each. Tensors are int64.

    ``spans`` [N,R,2] are start and length of the parts of the padded rows, ``runs`` [N,R,2] those
    of their positions that are written; ``places`` [P] is where each position stands in its row.
    """

    spans: torch.Tensor
    runs: torch.Tensor
    places: torch.Tensor

    def part(self, index: slice, positions: slice) -> HeldRows:
        """Return some of the rows."""
        return HeldRows(
            spans=self.spans[index], runs=self.runs[index], places=self.places[positions]
        )

    def pieces(self, lead: tuple[int, ...], row_counts: tuple[int, ...]) -> list[Piece] | None:
        """Return which part of an array belongs to which positions; None for another's shape.

        ``lead`` are its axes before entries: [N, W], a row's spans one behind the other, or all
        rows' [sum of W].
        """
        widths: list[int] = self.spans[:, :, 1].sum(1).tolist()
        if len(lead) == 1 and lead[0] == sum(widths):
            starts = list(accumulate(widths, initial=0))
            found = self._pieces()
            return [
                (slice(starts[row] + run.start, starts[row] + run.stop), positions)
                for row, run, positions in found
            ]
        if len(lead) != 2 or lead[0] not in row_counts or set(widths) != {lead[1]}:
            return None
        if torch.equal(self.spans, self.runs):
            return [((slice(0, len(widths)), slice(None)), slice(0, len(self.places)))]
        return [((row, run), positions) for row, run, positions in self._pieces()]

    def _pieces(self) -> list[tuple[int, slice, slice]]:
        """Return each run that is not empty: its row, its place in the row's spans, positions."""
        found, done = [], 0
        for row, (spans, runs) in enumerate(
            zip(self.spans.tolist(), self.runs.tolist(), strict=True)
        ):
            before = 0
            for (start, length), (first, count) in zip(spans, runs, strict=True):
                if count:
                    at = before + first - start
                    found.append((row, slice(at, at + count), slice(done, done + count)))
                before, done = before + length, done + count
        return found
