"""Steps: how a registered step becomes a batch that may be handed out.

One of these a session. What brings the steps (``StepSource``) is the session's broker line, or
calls where it has none; what is done with them is the same.
"""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from teacher_logits.errors import DeadlinePassedError, SessionExpiredError
from teacher_logits_client.batch import Batch
from teacher_logits_client.called_steps import CalledSteps
from teacher_logits_client.line_steps import LineSteps
from teacher_logits_client.opened_ahead import OpenedAhead
from teacher_logits_client.step_guards import check_shape, check_step, check_tiling, tokens_of

if TYPE_CHECKING:
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import SessionTerms, StepGrant
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.liveness import Liveness
    from teacher_logits_client.mailbox import Mailbox
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.reader import OpenedLease, Reader
    from teacher_logits_client.returns import Returner
    from teacher_logits_client.row_columns import Part
    from teacher_logits_client.rows import RowBatch
    from teacher_logits_client.step_grants import OpenedGrant, StepSource


class Steps:
    """Takes the steps of one session: waits for them, opens them, checks them."""

    def __init__(
        self,
        profile: StudentProfile,
        source: StepSource,
        *,
        session_id: str,
        reader: Reader,
        liveness: Liveness,
        returner: Returner,
    ) -> None:
        self._session_id = session_id
        self._profile = profile
        self._source = source
        self._reader = reader
        self._liveness = liveness
        self._returner = returner
        self._closed = False
        #: The rank's rows of every step, padding included.
        self.rows = rows_of_rank(profile)

    def acquire(self, step: int, *, batch: RowBatch | None, seconds: float) -> Batch:
        """Wait for a step for at most ``seconds``, and hold it against the rank's own rows.

        ``batch`` are those rows, None where they are not known. A step that does not pass its
        checks is given back unread: it may be asked for again, with other rows, and is not
        retired before.

        Raises:
            DeadlinePassedError: it was not complete, or not here, by then. It may be asked for
                again.
            SessionExpiredError, EpochChangedError: the session has ended.
            TransportFailure, StalePayloadError: see ``Reader.open_bytes``.
            PayloadInvalidError, AlignmentError: see ``check_step``.
            TeacherLogitsError: why the step cannot be had.
        """
        until = time.monotonic() + seconds
        with self._liveness.noting():
            try:
                taken = self._source.take(step, until=until, seconds=seconds)
            except CancelledError:
                if self._closed:
                    raise self._was_closed() from None
                raise
            leases = self._open(taken, until)
        payloads = self._adopt(leases)
        try:
            return self._make_batch(taken.grant, payloads, batch)
        except BaseException:
            self._give_back_unread(payloads)
            raise

    def close(self) -> None:
        """Bring no more steps; those that were sent ahead go back unread with the session."""
        self._closed = True
        self._source.close()

    def _was_closed(self) -> SessionExpiredError:
        return SessionExpiredError(
            f"session {self._session_id} was closed by this client while a step was waited for",
            facts={"session_id": self._session_id},
        )

    def _open(self, taken: OpenedGrant, until: float) -> tuple[OpenedLease, ...]:
        grant = taken.grant
        leases = taken.leases
        if leases is None:
            self._reader.settle(grant.settlements)
            try:
                leases = tuple(self._reader.open_bytes(grant.leases, until=until))
            except DeadlinePassedError:
                self._source.put_back(grant)
                raise
            except BaseException:
                self._source.finish(grant.step)
                raise
        self._source.finish(grant.step)
        return leases

    def _adopt(self, leases: tuple[OpenedLease, ...]) -> list[LeasedPayload]:
        payloads: list[LeasedPayload] = []
        try:
            for lease in leases:
                payloads.append(self._reader.adopt(lease))
        except BaseException:
            for lease in leases[len(payloads) :]:
                self._reader.discard(lease.lease.lease_id)
            self._give_back_unread(payloads)
            raise
        return payloads

    def _give_back_unread(self, payloads: list[LeasedPayload]) -> None:
        for each in payloads:
            self._reader.note_unread(each.lease_id)
            each.abandon()

    def _make_batch(
        self, grant: StepGrant, payloads: list[LeasedPayload], rows: RowBatch | None
    ) -> Batch:
        for each in payloads:
            check_shape(each.payload, self._profile)
        real = real_rows_of(self.rows, grant.real_rows)
        parts = [part for each in payloads if (part := _part(each, real)) is not None]
        check_tiling(parts, real)
        checks = check_step(parts, rows=self.rows, batch=rows)
        lengths = None
        if rows is not None:
            lengths = tokens_of(rows, row_count=len(self.rows), real_rows=len(real))
        return Batch(
            grant,
            parts,
            payloads,
            rows=self.rows,
            profile=self._profile,
            checks=checks,
            lengths=lengths,
            returner=self._returner,
            when_closed=self._source.read_ahead,
        )


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


def make_source(
    terms: SessionTerms, *, calls: Calls, reader: Reader, mailbox: Mailbox
) -> StepSource:
    """Return what brings a session its steps: its line, where it has one."""
    wait_seconds = terms.default_wait.total_seconds()

    def open_bytes(grant: StepGrant, until: float) -> list[OpenedLease]:
        reader.settle(grant.settlements)
        return reader.open_bytes(grant.leases, until=until)

    called = CalledSteps(
        calls,
        session_id=terms.session_id,
        prefetch=0 if reader.line is not None else mailbox.prefetch,
        open_bytes=open_bytes,
        put_away=reader.put_away,
        wait_seconds=wait_seconds,
    )
    if reader.line is None:
        return called
    steps = LineSteps(
        reader.line,
        mailbox,
        session_id=terms.session_id,
        ahead=OpenedAhead(mailbox, reader, reader.line, stream_seconds=wait_seconds),
        again=called,
    )
    reader.when_returned = steps.look_ahead
    return steps
