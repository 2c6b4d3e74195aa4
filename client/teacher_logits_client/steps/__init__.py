"""Steps: how a registered step becomes a batch that may be handed out.

One of these a session. What brings the steps (``StepSource``) is the session's broker line, or
calls where it has none; what is done with them is the same.
"""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import SessionExpiredError
from teacher_logits_client.openers import is_failure_of_leases
from teacher_logits_client.steps.called_steps import CalledSteps
from teacher_logits_client.steps.line_steps import LineSteps
from teacher_logits_client.steps.opened_ahead import OpenedAhead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.terms import SessionTerms, StepGrant
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.openers import OpenedLease
    from teacher_logits_client.payloads.batch import Batch
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.rows import RowBatch
    from teacher_logits_client.sessions.liveness import Liveness
    from teacher_logits_client.sessions.reader import Reader
    from teacher_logits_client.steps.batches import BatchMaker
    from teacher_logits_client.steps.grants import OpenedGrant, StepSource
    from teacher_logits_client.steps.mailbox import Mailbox


class Steps:
    """Takes the steps of one session: waits for them, opens them, checks them."""

    def __init__(
        self,
        source: StepSource,
        *,
        session_id: str,
        reader: Reader,
        maker: BatchMaker,
        liveness: Liveness,
    ) -> None:
        self._session_id = session_id
        self._source = source
        self._reader = reader
        self._maker = maker
        self._liveness = liveness
        self._closed = False
        maker.when_closing = source.read_ahead

    def acquire_ready(self, step: int) -> Batch | None:
        """Return a step's batch if it was made ahead, without any check of the rank's rows."""
        taken = self._source.take_ready(step)
        if taken is None or taken.batch is None:
            return None
        return self._hand_out(taken, taken.batch, taken.leases or (), None)

    def acquire(self, step: int, *, batch: RowBatch | None, seconds: float) -> Batch:
        """Wait for a step for at most ``seconds``, and hold it against the rank's own rows.

        ``batch`` are those rows, None where they are not known. A step that does not pass its
        checks is given back unread: it may be asked for again, with other rows, and is not
        retired before.

        Raises:
            DeadlinePassedError: it was not complete, or not here, by then. It may be asked for
                again.
            SessionExpiredError, EpochChangedError: the session has ended.
            TransportFailure: see ``Reader.open_bytes``.
            StalePayloadError: likewise, or bytes that did not pass were overwritten meanwhile.
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
            if taken.batch is not None:
                made, leases = taken.batch, taken.leases or ()
            else:
                leases = self._open(taken, until)
                made = self._make(taken.grant, leases)
        return self._hand_out(taken, made, leases, batch)

    def close(self) -> None:
        """Bring no more steps; those that were sent ahead go back unread with the session."""
        self._closed = True
        self._source.close()

    def _hand_out(
        self,
        taken: OpenedGrant,
        made: Batch,
        leases: Sequence[OpenedLease],
        own: RowBatch | None,
    ) -> Batch:
        try:
            self._source.finish(taken.grant.step)  # the batch gives its leases back from here on
            made.adopt()
            made.check(own)
        except BaseException as error:
            self._source.finish(taken.grant.step)  # which may be what was interrupted
            self._note_unread(leases)
            if not isinstance(error, Exception):  # an interrupt: it may have adopted only some
                self._discard(leases)
            with ExitStack() as given_back:
                given_back.push(made)  # which says so where overwritten bytes explain the error
                raise
        return made

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
            except BaseException as error:
                if is_failure_of_leases(error):
                    self._source.finish(grant.step)
                else:
                    self._source.put_back(grant)
                raise
        return leases

    def _make(self, grant: StepGrant, leases: tuple[OpenedLease, ...]) -> Batch:
        try:
            return self._maker.make(grant, leases)
        except BaseException:
            self._source.finish(grant.step)
            self._note_unread(leases)
            with ExitStack() as given_back:
                for each in leases:
                    given_back.push(self._reader.adopt(each))
                raise

    def _discard(self, leases: Sequence[OpenedLease]) -> None:
        for each in leases:
            self._reader.discard(each.lease.lease_id)

    def _note_unread(self, leases: Sequence[OpenedLease]) -> None:
        for each in leases:
            self._reader.note_unread(each.lease.lease_id)


def make_source(
    terms: SessionTerms,
    *,
    calls: Calls,
    reader: Reader,
    returner: Returner,
    mailbox: Mailbox,
    maker: BatchMaker,
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
        give_up=lambda request_id: returner.later(partial(reader.give_up, request_id)),
        wait_seconds=wait_seconds,
    )
    if reader.line is None:
        return called
    steps = LineSteps(
        reader.line,
        mailbox,
        session_id=terms.session_id,
        ahead=OpenedAhead(mailbox, reader, reader.line, maker, stream_seconds=wait_seconds),
        again=called,
        later=returner.later,
    )
    reader.when_returned = steps.look_ahead
    return steps
