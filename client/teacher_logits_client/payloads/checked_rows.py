"""Checked rows: what is known of the rows of a batch before it is handed out, and after.

A batch that was made before its seal is looked at twice: what the seal may have changed is read
anew, and rows that have moved since are refused. Nothing is compared twice, nor before it is
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.payloads.guards import check_statuses
from teacher_logits_client.payloads.step_guards import (
    check_step,
    tokens_of,
    unchecked_step,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from teacher_logits.terms import Check
    from teacher_logits_client.payloads.row_parts import RowPart
    from teacher_logits_client.rows import RowBatch


class CheckedRows:
    """The checks of one batch.

    Args:
        rows: the rank's global rows, padding included.
        is_sealed: whether all of the parts are, so that what they say is what they will say.

    Raises:
        PayloadInvalidError: what is sealed has a status that is none.
    """

    def __init__(self, parts: Sequence[RowPart], *, rows: range, is_sealed: bool) -> None:
        self._parts = parts
        self._rows = rows
        #: Where the statuses lie: they are looked at while somebody waits for the rows.
        self._status = [part.status for part in parts]
        self._statuses = b"".join(self._status)
        if is_sealed:  # before that there may be anything
            check_statuses(self._statuses, first_row=rows.start)
        self._checks: tuple[Check, ...] = ()
        self._lengths: torch.Tensor | None = None

    @property
    def checks(self) -> tuple[Check, ...]:
        """What was compared, and what could not be."""
        self._checks = self._checks or unchecked_step(self._statuses)
        return self._checks

    def look_again(self) -> None:
        """Take in what the seal has said, of rows that were looked at before it.

        Raises:
            PayloadInvalidError: rows have moved meanwhile, or a status is none.
        """
        for part in self._parts:
            part.look_again()
        if any(part.is_copy for part in self._parts):  # what several payloads say is read anew
            self._status = [part.status for part in self._parts]
        self._statuses = b"".join(self._status)
        check_statuses(self._statuses, first_row=self._rows.start)

    def compare(self, own: RowBatch) -> None:
        """Hold the rows against the rank's own.

        Raises:
            PayloadInvalidError, AlignmentError: see ``check_step``.
        """
        self._checks = check_step(self._parts, rows=self._rows, batch=own)
        real = sum(part.row_count for part in self._parts)
        self._lengths = tokens_of(own, row_count=len(self._rows), real_row_count=real)

    def lengths_of(self, first: int, count: int) -> torch.Tensor | None:
        """Return the tokens of some rows, 0 for padding, int64 [N]; None without the rank's ids."""
        return None if self._lengths is None else self._lengths[first : first + count]

    def let_go(self) -> None:
        """Keep what was found, and nothing that ends with the batch."""
        self._parts, self._status = (), []
