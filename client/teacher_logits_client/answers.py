"""Answers: how what the server granted a session becomes a payload that may be handed out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import LeaseTerms, SessionTerms
    from teacher_logits_client.calls.pending import PendingLease
    from teacher_logits_client.liveness import Liveness
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.reader import Reader
    from teacher_logits_client.returns import Returner
    from teacher_logits_client.rows import RowBatch


class Answers:
    """Takes the answers of one session: waits for them, opens them, checks them, gives them up."""

    def __init__(
        self,
        terms: SessionTerms,
        profile: StudentProfile,
        *,
        reader: Reader,
        liveness: Liveness,
        returner: Returner,
    ) -> None:
        self.default_seconds = terms.default_wait.total_seconds()
        self._profile = profile
        self._reader = reader
        self._liveness = liveness
        self._returner = returner

    def wait_for(self, pending: PendingLease, timeout: float | None) -> LeaseTerms:
        """Return the lease of a call under way; see ``PendingLease.result``."""
        with self._liveness.noting():
            return pending.result(timeout)

    def noting(self) -> AbstractContextManager[None]:
        """Note an error of the block that says that the session has ended."""
        return self._liveness.noting()

    def open(
        self, lease: LeaseTerms, *, until: float, batch: RowBatch | None, reject_bad_rows: bool
    ) -> LeasedPayload:
        """Open a lease before ``until``, and hold its payload against what was asked for.

        ``batch`` are the rows that were sent, None where they are not known. What does not
        pass is given back.

        Raises:
            SessionExpiredError, EpochChangedError: the session has ended meanwhile.
            TransportFailure, StalePayloadError, DeadlinePassedError: see ``Reader.open``.
            PayloadInvalidError, AlignmentError: see ``check_scored``.
        """
        try:
            self._liveness.check()
        except BaseException:
            self._reader.discard(lease.lease_id)
            raise
        with self._liveness.noting():
            leased = self._reader.open(lease, until=until)
        try:
            leased.check(batch, self._profile, reject_bad_rows=reject_bad_rows)
        except BaseException:
            leased.abandon()
            raise
        return leased

    def give_up(self, pending: PendingLease) -> None:
        """Cancel a call whose answer nobody wants; safe in a finaliser."""
        self._returner.later(partial(_give_up, pending, self._reader))

    def check_here(self) -> None:
        """Refuse to go on in a forked child."""
        self._returner.check_here("session")


def _give_up(pending: PendingLease, reader: Reader) -> None:
    pending.cancel()
    lease = pending.lease_if_granted()
    if lease is not None:  # it came before the cancellation
        reader.discard(lease.lease_id)
