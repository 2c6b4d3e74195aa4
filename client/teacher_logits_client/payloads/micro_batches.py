"""Micro batches: rows of a step as a training loop takes them, one forward pass at a time.

Nothing is made before it is asked for, and all that was made is emptied with the batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from teacher_logits.layout import ColumnKind
from teacher_logits_client.payloads.columns import NamedColumns
from teacher_logits_client.targets import make_targets
from teacher_logits_client.targets.leased_targets import LeasedTargets, lease_targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from teacher_logits_client.payloads.row_columns import RowColumns
    from teacher_logits_client.targets import Targets
    from teacher_logits_client.targets.leased_targets import Made


class RowTargets:
    """Columns of some rows, and the targets made from them, until their leases are closed.

    Args:
        temperatures: those of the columns.
        lengths: tokens of each row, 0 for padding, int64 [N]; None where the caller gave no ids.
        made: what ends with the leases.
    """

    def __init__(
        self,
        columns: RowColumns,
        *,
        temperatures: Sequence[float],
        lengths: torch.Tensor | None,
        made: Made,
    ) -> None:
        self._columns = columns
        self._named = NamedColumns(columns, made)
        self._temperatures = tuple(temperatures)
        self._lengths = lengths
        self._made = made
        self._at: dict[float, LeasedTargets] = {}

    def make_ahead(self, kinds: Sequence[ColumnKind]) -> None:
        """Make some columns before anybody asks for them."""
        for kind in kinds:
            self._columns[kind]

    @property
    def copied(self) -> bool:
        """Whether the rows lie in more than one payload, so that positions are copied."""
        return self._columns.copied

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns by name."""
        self._made.check_open()
        return self._named

    def at(self, temperature: float) -> Targets:
        """Return targets at a temperature; the same object each time."""
        self._made.check_open()
        if temperature not in self._at:
            # Temperatures travelled as fp32.
            near = (t for t in self._temperatures if math.isclose(t, temperature, rel_tol=1e-6))
            lengths = self._lengths
            if lengths is None and self._columns.whole_rows:
                lengths = self._columns[ColumnKind.ROW_OFFSETS].diff()
            targets = make_targets(
                self._columns,
                temperature=next(near, temperature),
                temperatures=self._temperatures,
                lengths=lengths,
                bound=self._columns.bound,
                vocab_size=self._columns.vocabulary_size,
            )
            self._at[temperature] = lease_targets(targets, self._made)
        return self._at[temperature]


class MicroBatch:
    """Some rows of a batch; good until the batch is closed.

    ``rows`` are their global numbers, padding included, and ``index`` is where those of them that
    are no padding, the first ones, stand in the rank's own arrays: ``input_ids[index]``.
    ``Batch.micro_batches`` makes them.
    """

    def __init__(self, rows_taken: RowTargets, *, rows: range, index: slice) -> None:
        self.rows = rows
        self.index = index
        self._taken = rows_taken

    @property
    def row_count(self) -> int:
        """Rows, padding included: as many as the targets have."""
        return len(self.rows)

    @property
    def real_row_count(self) -> int:
        """Rows that are no padding."""
        count: int = self.index.stop - self.index.start
        return count

    @property
    def copied(self) -> bool:
        """Whether the rows span shards: then tensors are one copy, else views."""
        return self._taken.copied

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns by name, e.g. ``topk_ids`` int32 [P,K]; see ``layout``."""
        return self._taken.columns

    @property
    def targets(self) -> Targets:
        """What a loss takes, [P,K] at temperature 1. The same object each time."""
        return self._taken.at(1.0)

    def targets_at(self, temperature: float) -> Targets:
        """Return targets at one of the payloads' temperatures.

        Raises:
            PayloadInvalidError: they have no such temperature; it says which they have.
            LeaseLostError: the batch is closed.
        """
        return self._taken.at(temperature)

    def __repr__(self) -> str:
        kind = "copied" if self.copied else "views"
        return f"<MicroBatch of rows {self.rows.start} to {self.rows.stop - 1} ({kind})>"
