"""Openers: one a transport, each turns a lease into memory that tensors can view.

Every opener keeps this interface, and one conformance suite runs over all of them. An
opener says what it could not do as a ``TransportFailure``; what is tried then is decided
in ``fallback``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import SlabOpenError, StalePayloadError

if TYPE_CHECKING:
    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms
    from teacher_logits.transport import Transport


class OpenedPayload(Protocol):
    """The memory of one lease, as its reader has it."""

    buffer: memoryview
    """The payload's bytes, from its first to its last."""

    copied: bool
    """Whether the bytes are the reader's own, so that the writer may reuse its room."""

    def is_current(self) -> bool:
        """Say whether the bytes are still those of the lease: the exit check."""

    def vacate(self) -> int:
        """Make the memory fit for its next use, now that no tensor views it.

        Returns the bytes of dirtied pages that were dropped.
        """


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
