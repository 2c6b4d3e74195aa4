"""Answers: how what the server granted a session becomes a payload that may be handed out."""

from __future__ import annotations

import secrets
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from teacher_logits.errors import TeacherLogitsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import LeaseTerms, SessionTerms
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.calls.pending import PendingLease
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.rows import RowBatch
    from teacher_logits_client.sessions.liveness import Liveness
    from teacher_logits_client.sessions.reader import Reader


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
        self._session_id = terms.session_id
        self.default_seconds = terms.default_wait.total_seconds()
        self._profile = profile
        self._reader = reader
        self._liveness = liveness
        self._returner = returner
        self._pending: WeakSet[PendingLease] = WeakSet()

    def wait_for(self, pending: PendingLease, timeout: float | None) -> LeaseTerms:
        """Return the lease of a call under way; see ``PendingLease.result``.

        A call that ends without one may have been granted one all the same, which is given up.
        """
        try:
            with self._liveness.noting():
                return pending.result(timeout)
        except BaseException as error:
            if pending.has_failed():
                self.give_up(pending)
            if isinstance(error, CancelledError):
                self._liveness.check()  # a session that was closed gave its calls up
            raise

    def expect(self, pending: PendingLease) -> None:
        """Remember a call under way, to give it up with the session."""
        self._pending.add(pending)

    def give_up_all(self) -> None:
        """Give up every call whose answer nobody has taken."""
        for pending in list(self._pending):
            if not pending.is_taken:
                self.give_up(pending)

    def acquire(
        self,
        payload_id: str,
        *,
        batch: RowBatch | None,
        until: float,
        seconds: float,
        calls: Calls,
    ) -> LeasedPayload:
        """Lease a payload over the line, or by a call where there is none; see ``open``."""
        request_id = secrets.token_hex(12)
        with self.asking(request_id):
            lease = (self._reader.line or calls).acquire(
                self._session_id, request_id=request_id, payload_id=payload_id, timeout=seconds
            )
        return self.open(lease, until=until, batch=batch, reject_bad_rows=False)

    @contextmanager
    def asking(self, request_id: str) -> Iterator[None]:
        """Give a request up where the block that asks for its lease fails."""
        try:
            with self._liveness.noting():
                yield
        except BaseException:
            self._returner.later(partial(self._reader.give_up, request_id))
            raise

    def open(
        self,
        lease: LeaseTerms,
        *,
        until: float,
        batch: RowBatch | None,
        reject_bad_rows: bool,
        keep_if_late: bool = False,
    ) -> LeasedPayload:
        """Open a lease before ``until``, and hold its payload against what was asked for.

        ``batch`` are the rows that were sent, None where they are not known. What does not
        pass is given back; ``keep_if_late`` as for ``Reader.open``.

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
            leased = self._reader.open(lease, until=until, keep_if_late=keep_if_late)
        try:
            leased.check(batch, self._profile, reject_bad_rows=reject_bad_rows)
        except BaseException as error:
            problem, _ = leased.let_go()  # bytes that were overwritten do not pass, for one
            try:
                if problem is not None and isinstance(error, TeacherLogitsError):
                    raise problem from error
                raise
            finally:
                del problem  # which would keep itself, and with its frames all views
        return leased

    def give_up(self, pending: PendingLease) -> None:
        """Cancel a call whose answer nobody wants; safe in a finaliser."""
        if self._returner.is_here:
            self._returner.later(partial(_give_up, pending, self._reader))

    def check_here(self) -> None:
        """Refuse to go on in a forked child."""
        self._returner.check_here("session")


def _give_up(pending: PendingLease, reader: Reader) -> None:
    if pending.is_given_up:
        return
    pending.is_given_up = True
    pending.cancel()
    # By its request: the server may have granted a lease that never comes here.
    reader.give_up(pending.request_id)
