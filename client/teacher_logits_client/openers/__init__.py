"""Openers: one a transport, each turns a lease into memory that tensors can view.

Every opener keeps this interface, and one conformance suite runs over all of them. An
opener says what it could not do as a ``TransportFailure``; what is tried then is decided
in ``fallback``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from teacher_logits.device_memory import DeviceError
from teacher_logits.errors import (
    DeadlinePassedError,
    SlabOpenError,
    StalePayloadError,
    TeacherLogitsError,
)
from teacher_logits.layout import is_on_device, round_up
from teacher_logits.pool import PAGE_BYTES

if TYPE_CHECKING:
    import torch

    from teacher_logits.devices.views import DeviceView
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent, Payload
    from teacher_logits.terms import LeaseTerms
    from teacher_logits.transport import Transport

_log = logging.getLogger("teacher_logits_client")

View: TypeAlias = "memoryview | DeviceView"
"""An object over a column's memory, which dies with the last tensor over it."""


class ColumnMemory(Protocol):
    """Where a payload's columns are."""

    @property
    def device(self) -> torch.device:
        """Where its columns over positions are; those over rows are on the host."""

    def view_of(self, column: Column) -> View:
        """Return a new object over a column's memory, from the payload's first byte on.

        The tensors that are made over it keep it alive, and nothing else does.
        """

    def bytes_of(self, column: Column) -> memoryview:
        """Return a column's bytes as they are now; a copy where they lie on a device."""


class OpenedPayload(ColumnMemory, Protocol):
    """The memory of one lease, as its reader has it."""

    copied: bool
    """Whether the bytes are the reader's own, so that the writer may reuse its room."""

    def note_stream(self, stream: torch.cuda.Stream) -> None:
        """Have ``vacate`` wait for what was given to a stream too, besides the current one."""

    def finish(self, *, outlived: bool) -> None:
        """Note, on its thread, that the owner is done; ``outlived`` where some view is not.

        It is not called where the owner went without a word.
        """

    def is_current(self) -> bool:
        """Say whether the bytes are still those of the lease: the exit check."""

    def vacate(self) -> int:
        """Make the memory fit for its next use, now that no tensor views it.

        Waits until a device has done what it was given. Returns the bytes of dirtied pages that
        were dropped.

        Raises:
            OSError, DeviceError: it is not fit, and its room must not go back.
        """


@dataclass(frozen=True, kw_only=True)
class OpenedLease:
    """A lease with its memory, and how the bytes came."""

    lease: LeaseTerms
    memory: OpenedPayload
    transport: Transport


class Opener(Protocol):
    """Opens leases of one session over one transport."""

    transport: Transport

    def open(self, lease: LeaseTerms, *, until: float) -> OpenedPayload:
        """Return the lease's memory before ``until`` (``time.monotonic`` seconds).

        Raises:
            TransportFailure: the bytes did not come this way.
            StalePayloadError: the room was reused before it could be opened.
            DeadlinePassedError: it took too long.
        """

    def close(self) -> None:
        """Let go of whatever the opener keeps between leases."""


def is_failure_of_leases(error: BaseException) -> bool:
    """Whether leases cannot be opened at all, rather than too late or with an interrupt."""
    return isinstance(error, TeacherLogitsError) and not isinstance(error, DeadlinePassedError)


def is_vacated(opened: OpenedPayload) -> bool:
    """Vacate memory that nobody adopted; False where its room must not go back."""
    try:
        opened.vacate()
    except (OSError, DeviceError):
        # What is not known to be clean must not be written into and read anew.
        _log.exception("the room of a lease stays taken until this process ends")
        return False
    return True


def extent_of(lease: LeaseTerms, transport: Transport) -> Extent:
    """Return where the payload lies in its slab.

    Raises:
        SlabOpenError: the lease names no slab, or one with less room than the payload.
    """
    extent = lease.extent
    if extent is None:
        raise SlabOpenError(
            f"lease {lease.lease_id} names no slab, and {transport.value} reads from one",
            facts={"lease_id": lease.lease_id},
        )
    if extent.size_bytes < lease.payload.size_bytes:
        raise SlabOpenError(
            f"payload {lease.payload.payload_id} has {lease.payload.size_bytes} bytes, and its "
            f"extent {extent.size_bytes}",
            facts={
                "size_bytes": lease.payload.size_bytes,
                "extent_bytes": extent.size_bytes,
            },
        )
    return extent


def host_bytes_of(payload: Payload) -> tuple[int, int]:
    """Return the pages of a payload in device memory that it has on the host: offset and size.

    They are those of its columns over rows.
    """
    rows = [column for column in payload.columns if not is_on_device(column.kind)]
    start = min((column.offset_bytes for column in rows), default=0) // PAGE_BYTES * PAGE_BYTES
    end = max((column.end_bytes for column in rows), default=start)
    return start, round_up(end - start, PAGE_BYTES)


def stale(lease: LeaseTerms, *, expected: int, found: int) -> StalePayloadError:
    """Return the error for room that no longer holds the lease's bytes."""
    return StalePayloadError(
        f"the room of payload {lease.payload.payload_id} is in generation {found}, and lease "
        f"{lease.lease_id} is for generation {expected}: it was reused under its reader; "
        "discard everything that was computed from it",
        facts={
            "lease_id": lease.lease_id,
            "payload_id": lease.payload.payload_id,
            "generation": expected,
            "found_generation": found,
        },
    )


def taken_back(lease: LeaseTerms) -> StalePayloadError:
    """Return the error for a lease that an operator took back by force."""
    return StalePayloadError(
        f"lease {lease.lease_id} of payload {lease.payload.payload_id} was taken back by an "
        "operator's reclaim: its room may be reused; acquire or score again",
        facts={"lease_id": lease.lease_id, "payload_id": lease.payload.payload_id},
    )
