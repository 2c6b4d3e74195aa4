"""Mixed rows: a batch read once, and taken apart by whose its rows are.

Refuses what no server would score before any teacher is asked: rows, prefixes, windows and ids that
do not belong to one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits_client.rows.flat_rows import UNREADABLE, flatten, invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.rows.flat_rows import FlatRows, Mask, Numbers, Rows
    from teacher_logits_client.scoring.chosen_ids import Ids


@dataclass(frozen=True, kw_only=True)
class Rowed:
    """Some rows of a batch, as a session takes them; ``rows`` are their places in the batch."""

    rows: Sequence[int]
    ids: list[torch.Tensor]
    prefix: list[torch.Tensor] | None
    windows: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class MixedRows:
    """A batch, row by row; ``read_mixed`` makes it."""

    ids: list[torch.Tensor]
    prefix: list[torch.Tensor] | None
    windows: torch.Tensor | None

    @property
    def row_count(self) -> int:
        """Rows of the batch."""
        return len(self.ids)

    def take(self, rows: Sequence[int]) -> Rowed:
        """Return some of the rows, in the order given."""
        return Rowed(
            rows=rows,
            ids=[self.ids[row] for row in rows],
            prefix=None if self.prefix is None else [self.prefix[row] for row in rows],
            windows=None if self.windows is None else self.windows[list(rows)],
        )

    def split_ids(self, ids: Ids) -> Sequence[torch.Tensor | Sequence[Sequence[int]]]:
        """Return chosen ids, in any form that ``Session.scored_ids`` takes, row by row.

        Raises:
            PayloadInvalidError: they are of other rows or positions, or no array.
        """
        if isinstance(ids, torch.Tensor) or hasattr(ids, "__array__"):
            return self._of_array(torch.as_tensor(ids))
        listed = list(ids)
        if len(listed) != self.row_count:
            raise self._other_rows(len(listed))
        return listed

    def _of_array(self, ids: torch.Tensor) -> list[torch.Tensor]:
        lengths = [len(row) for row in self.ids]
        firsts, counts = [0] * len(lengths), lengths
        if self.windows is not None:
            firsts, counts = self.windows.T.tolist()
        if ids.dim() == 2 and len(ids) == sum(counts):
            return list(ids.split(counts))
        if ids.dim() != 3:
            raise invalid(
                f"ids have shape {tuple(ids.shape)}, and {sum(counts)} positions are wanted: give "
                f"integers [{sum(counts)}, M], or [rows, positions, M] in whole rows",
                positions=sum(counts),
            )
        if len(ids) != self.row_count:
            raise self._other_rows(len(ids))
        # Of a rectangle a row has its wanted positions; one that is too narrow is refused there.
        return [
            row[first : first + count]
            for row, first, count in zip(ids, firsts, counts, strict=True)
        ]

    def _other_rows(self, given: int) -> Exception:
        return invalid(
            f"ids are of {given} rows and input_ids of {self.row_count}: give those of every row",
            id_rows=given,
            rows=self.row_count,
        )


def read_mixed(
    input_ids: Rows,
    lengths: Numbers | None,
    *,
    attention_mask: Mask | None,
    prefix_ids: Rows | None,
    prefix_lengths: Numbers | None,
    windows: torch.Tensor | Sequence[Sequence[int]] | None,
) -> MixedRows:
    """Return a batch as rows; for the arguments see ``Session.score``.

    Raises:
        PayloadInvalidError: rows that no server would score.
    """
    rows = flatten(input_ids, lengths, attention_mask, what="input_ids", shortest=1)
    prefix = None
    if prefix_ids is not None:
        prefix = flatten(prefix_ids, prefix_lengths, what="prefix_ids", shortest=0)
    elif prefix_lengths is not None:
        raise invalid("prefix_lengths came without prefix_ids")
    return MixedRows(
        ids=_each(rows),
        prefix=_each_of(prefix, "prefix_ids", rows.row_count),
        windows=_windows(windows, rows.row_count),
    )


def _each(rows: FlatRows) -> list[torch.Tensor]:
    return list(rows.ids.split(rows.lengths.tolist()))


def _each_of(rows: FlatRows | None, what: str, row_count: int) -> list[torch.Tensor] | None:
    if rows is not None and rows.row_count != row_count:
        raise invalid(
            f"{what} has {rows.row_count} rows and input_ids {row_count}: give every row one",
            prefix_rows=rows.row_count,
            rows=row_count,
        )
    return None if rows is None else _each(rows)


def _windows(
    windows: torch.Tensor | Sequence[Sequence[int]] | None, row_count: int
) -> torch.Tensor | None:
    if windows is None:
        return None
    try:
        pairs = torch.as_tensor(windows)
    except UNREADABLE as error:
        raise invalid(f"windows cannot be read ({error}): give integers [rows, 2]") from None
    whole = not (pairs.dtype.is_floating_point or pairs.dtype.is_complex)
    if pairs.shape != (row_count, 2) or not whole or bool((pairs < 0).any()):
        raise invalid(
            f"windows has shape {tuple(pairs.shape)} and is {pairs.dtype}: give integers from 0 on "
            f"[{row_count}, 2]",
            rows=row_count,
        )
    return pairs
