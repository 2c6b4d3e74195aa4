"""Batches of steps: a grant whose leases are open, as the batch that a rank is handed.

Made by whoever acquires, or ahead of that, while nobody waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.payloads.assembled import assemble
from teacher_logits_client.payloads.batch import Batch
from teacher_logits_client.payloads.step_guards import check_shape, check_tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import StepGrant
    from teacher_logits_client.openers import OpenedLease
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.payloads.row_columns import Part
    from teacher_logits_client.sessions.reader import Reader


class BatchMaker:
    """Makes the batches of one session."""

    def __init__(self, profile: StudentProfile, *, reader: Reader, returner: Returner) -> None:
        self._profile = profile
        self._reader = reader
        self._returner = returner
        #: Called with the step of a batch before its leases go back.
        self.when_closing: Callable[[int], None] = lambda step: None
        #: The rank's rows of every step, padding included.
        self.rows = rows_of_rank(profile)

    def make(self, grant: StepGrant, leases: Sequence[OpenedLease]) -> Batch:
        """Return the batch of a step, to be adopted or dropped.

        Raises:
            PayloadInvalidError: the payloads are not what the session asked for, or not the
                rank's rows.
        """
        payloads = [self._reader.payload_of(lease) for lease in leases]
        for each in payloads:
            check_shape(each.payload, self._profile)
        real = real_rows_of(self.rows, grant.real_rows)
        parts = assemble([part for each in payloads if (part := _part(each, real)) is not None])
        check_tiling(parts, real)
        return Batch(
            grant,
            parts,
            payloads,
            rows=self.rows,
            profile=self._profile,
            returner=self._returner,
            when_closing=self.when_closing,
        )

    def make_ahead(self, grant: StepGrant, leases: Sequence[OpenedLease]) -> Batch:
        """Do so with the tensors that will be asked for first. Raises the same."""
        batch = self.make(grant, leases)
        batch.make_ahead()
        return batch


def rows_of_rank(profile: StudentProfile) -> range:
    """Return the global rows of every step that a data-parallel rank reads."""
    grid = profile.batch_grid
    size = grid.global_batch_size // grid.data_parallel_size
    return range(profile.data_parallel_rank * size, (profile.data_parallel_rank + 1) * size)


def real_rows_of(rows: range, real_rows: int) -> range:
    """Return those of a rank's rows that are no padding: the step's first ``real_rows`` are."""
    return range(rows.start, min(rows.stop, max(real_rows, rows.start)))


def _part(payload: LeasedPayload, rows: range) -> Part | None:
    """Return what a payload holds of the rank's rows; None where it holds none."""
    first = max(rows.start, payload.payload.first_row)
    stop = min(rows.stop, payload.payload.first_row + payload.payload.row_count)
    if first >= stop:
        return None
    return payload.part(first - payload.payload.first_row, stop - first)
