"""Row stores: what the data plane asks of whatever holds its rows, and how a step ends.

A row is there from its first write on, under a key minted once; workers add fields to it. What a
store answers is whole or an error: a row or a field that is not there is ``RowsMissingError``, and
never fewer rows, or zeros. Every call has a deadline.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import NotAvailable, TransportFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from teacher_logits_client.data_plane.row_meta import RowMeta

DEFAULT_TIMEOUT_SECONDS = 120.0


class RowsMissingError(NotAvailable):
    """A row or a field is not there: not written yet, or cleared."""

    reason = "ROWS_MISSING"


class StepNotClearedError(TransportFailure):
    """A step's rows could not be cleared at its end. ``cause`` is what had failed before, if any.

    ``__cause__`` is the same where there is one, and ``cleanup`` what failed at clearing.
    """

    reason = "STEP_NOT_CLEARED"
    cause: Exception | None
    cleanup: Exception


class RowStore(Protocol):
    """Where rows lie; ``transfer_queue`` has one. All times are in seconds.

    Raises:
        RowsMissingError: a row or a field that is asked for, or to be added to, is not there.
        PayloadConflictError: what is to be written is there already.
        DeadlinePassedError: no answer in time; a write may or may not have come through.
        TransportFailure: the store itself failed, or lost what it had.
    """

    def add_fields(
        self, meta: RowMeta, fields: Mapping[str, torch.Tensor], *, timeout: float
    ) -> None:
        """Add fields to rows that are there, which have none of them yet."""

    def read(
        self, meta: RowMeta, select_fields: Sequence[str], *, timeout: float
    ) -> dict[str, torch.Tensor]:
        """Return these fields of the rows, in their order; dense where rows have equal shapes."""

    def clear(self, partition_id: str, sample_ids: Sequence[str], *, timeout: float) -> None:
        """Let go of rows, with all their fields; one that is not there is no error."""


@contextmanager
def cleared_at_end(
    store: RowStore, meta: RowMeta, *, timeout: float = DEFAULT_TIMEOUT_SECONDS
) -> Iterator[None]:
    """Clear a step's rows when the block ends, however it ends.

    To be entered by one process, the driver, before the step's first row is written.

    Raises:
        StepNotClearedError: they could not be cleared: with that, and with what had failed in
            the block, if anything had. Otherwise the block's own error comes through.
    """
    try:
        yield
    except Exception as error:
        _clear(store, meta, timeout, error)
        raise
    except BaseException:
        # Nothing stands in for an interrupt or the end of the program.
        with suppress(Exception):
            store.clear(meta.partition_id, meta.sample_ids, timeout=timeout)
        raise
    _clear(store, meta, timeout, None)


def _clear(store: RowStore, meta: RowMeta, timeout: float, cause: Exception | None) -> None:
    try:
        store.clear(meta.partition_id, meta.sample_ids, timeout=timeout)
    except Exception as cleanup:
        first = "" if cause is None else f"the step failed ({_told(cause)}), and "
        error = StepNotClearedError(
            f"{first}{len(meta)} rows of partition {meta.partition_id} could not be cleared "
            f"({_told(cleanup)}): their memory stays taken, and the next step would find them; "
            "clear them, or end the store, before it begins",
            facts={"rows": len(meta), "partition_id": meta.partition_id},
        )
        error.cause, error.cleanup = cause, cleanup
        raise error from (cause or cleanup)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
