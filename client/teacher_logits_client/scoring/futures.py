"""Futures of scored payloads. One that is dropped or cancelled gives its room back."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from copy import copy
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError
from teacher_logits_client.config import check_timeout
from teacher_logits_client.forks import refuse_to_travel

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from teacher_logits.terms import LeaseTerms
    from teacher_logits_client.calls.pending import PendingLease
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.rows import RowBatch
    from teacher_logits_client.scoring.answers import Answers


class ScoreFuture:
    """Scores that were asked for, with ``Session.score``. Several may be under way.

    ``result`` waits for them; so does ``await future``, while an event loop goes on.
    """

    _is_owed = False

    def __init__(
        self,
        answers: Answers,
        pending: PendingLease,
        batch: RowBatch,
        *,
        reject_bad_rows: bool,
        owner: object,
    ) -> None:
        """Take over a call under way; ``Session``, its owner, does this."""
        self._answers = answers
        self._owner = owner
        self._pending = pending
        self._batch = batch
        self._reject_bad_rows = reject_bad_rows
        self._lock = threading.RLock()  # whoever was interrupted with it has it still
        self._payload: LeasedPayload | None = None
        self._failure: BaseException | None = None
        self._is_owed = True

    def result(self, timeout: float | None = None) -> LeasedPayload:
        """Return the payload once the teacher has scored it and it has passed its checks.

        The same object each time; its owner closes it, best as ``with future.result() as
        payload``. ``timeout`` is in seconds; without one, the request's own deadline counts.

        Raises:
            DeadlinePassedError: it was not scored, or its bytes were not here, within
                ``timeout``, and may be asked for again; or the request's own deadline has passed.
            CancelledError: the future was cancelled.
            PayloadInvalidError, AlignmentError: the payload is not what was asked for.
            TeacherLogitsError: whatever the server refused it for.
        """
        self._answers.check_here()
        seconds = None if timeout is None else check_timeout(timeout, what="result")
        started = time.monotonic()
        with self._turn(seconds) as left_to_wait:
            if self._failure is not None:
                raise copy(self._failure)  # anew: what is raised holds its caller's frames
            if self._payload is None:
                if not self._is_owed:
                    raise CancelledError("the future was cancelled, and its lease given back")
                lease: LeaseTerms | None = None
                try:
                    lease = self._answers.wait_for(self._pending, left_to_wait)
                    self._is_owed = False  # too late for `cancel`
                    left = self._answers.default_seconds if seconds is None else seconds
                    until = (time.monotonic() if seconds is None else started) + left
                    self._payload = self._open(lease, until)
                except BaseException as error:
                    self._note_failed(error, lease)
                    raise
            return self._payload

    def _open(self, lease: LeaseTerms, until: float) -> LeasedPayload:
        return self._answers.open(
            lease,
            until=until,
            batch=self._batch,
            reject_bad_rows=self._reject_bad_rows,
            keep_if_late=True,
        )

    def _note_failed(self, error: BaseException, lease: LeaseTerms | None) -> None:
        if lease is None or isinstance(error, DeadlinePassedError):
            self._pending.is_taken = False
            if lease is not None:
                self._is_owed = True  # its lease is still ours, to be opened or given up
            return
        self._is_owed = False
        if isinstance(error, TeacherLogitsError):
            # A copy: the traceback of this one holds tensors, and they the room.
            self._failure = copy(error)
        elif not isinstance(error, Exception):  # an interrupt: the lease may have had no owner
            self._answers.give_up(self._pending)

    def __await__(self) -> Generator[object, None, LeasedPayload]:
        """Wait on an event loop, which goes on meanwhile, until it is scored; then as ``result``.

        What comes over ``stream`` is read on the loop's own thread, and holds it up.
        """
        loop = asyncio.get_running_loop()
        scored: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not scored.done():  # whoever waited may have been cancelled
                scored.set_result(None)

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(wake)

        self._answers.check_here()
        self._pending.when_done(tell)
        yield from scored.__await__()
        return self.result()

    @property
    def asked(self) -> RowBatch:
        """The rows that were sent."""
        return self._batch

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until ``result`` would not have to wait for the teacher; return whether it is so.

        ``timeout`` is in seconds; without one, the request's own deadline counts.
        """
        self._answers.check_here()
        return self._pending.wait(timeout)

    def has_failed(self) -> bool:
        """Whether the request has ended without a payload."""
        self._answers.check_here()
        return self._failure is not None or self._pending.has_failed()

    def done(self) -> bool:
        """Whether ``result`` would not have to wait for the teacher."""
        self._answers.check_here()
        return self._pending.done()

    def cancel(self) -> None:
        """Give up, and give back what comes all the same. Too late once a result was handed out."""
        self._answers.check_here()
        if self._is_owed:
            self._is_owed = False
            self._answers.give_up(self._pending)

    @contextmanager
    def _turn(self, seconds: float | None) -> Iterator[float | None]:
        """Be the one thread that asks; what is left of ``seconds`` by then comes out."""
        started, left = time.monotonic(), seconds
        if not self._lock.acquire(blocking=False):
            if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
                raise DeadlinePassedError(
                    f"waited {span_text(seconds or 0.0)} for scores that another thread waits for "
                    "too: allow more time, or ask in one thread",
                    facts={"deadline_seconds": seconds or 0.0},
                )
            left = None if seconds is None else max(0.0, started + seconds - time.monotonic())
        try:
            yield left
        finally:
            self._lock.release()

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a future")

    def __del__(self) -> None:
        if self._is_owed:
            self._answers.give_up(self._pending)
