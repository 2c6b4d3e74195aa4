"""Steps without a broker line: calls that wait on the server, some of them ahead.

While one step is read, the next ones are asked for, and their bytes come in the background
into buffers that are used again: one thread opens what the calls ahead were granted, in the
order in which it comes.

    acquire(7)   7 is asked for and opened by who acquires     8 is asked for
                 ... training on 7 ...                         8 comes, and is opened
    acquire(8)   8 is here                                     9 is asked for

At most ``prefetch`` steps lie ahead. What was asked for and never taken goes back unread: where
its step lies ahead no more, or with the session.

Threads that take one step at the same time have a request each, and leases each. A retry goes on
with the request that was left behind, so that nothing is granted twice (``StepRequests``).
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError
from teacher_logits_client.openers import is_failure_of_leases
from teacher_logits_client.sessions.step_thread import StepThread
from teacher_logits_client.steps.grants import OpenedGrant, StepRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.terms import StepGrant
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.calls.steps import PendingStep
    from teacher_logits_client.openers import OpenedLease

    Open = Callable[[StepGrant, float], list[OpenedLease]]


class _Ahead:
    """A step that was asked for ahead; ``ready`` once its call and its bytes are there.

    ``request_id`` is empty once what it was granted was given back.
    """

    def __init__(self, step: int, request_id: str, pending: PendingStep) -> None:
        self.step = step
        self.request_id = request_id
        self.pending = pending
        self.has_come = False
        self.is_dropped = False
        self.ready: Future[OpenedGrant] = Future()


class CalledSteps:
    """The steps of one session without a line; any thread may take them.

    Args:
        open_bytes: opens a grant's leases before a time; those that cannot be are given back
            (``is_failure_of_leases``).
        put_away: lets go of opened leases that nobody took.
        give_up: gives back what a request was granted, or will be; waits for nothing.
        wait_seconds: how long a call ahead may wait for its step.
    """

    def __init__(
        self,
        calls: Calls,
        *,
        session_id: str,
        prefetch: int,
        open_bytes: Open,
        put_away: Callable[[Sequence[OpenedLease]], None],
        give_up: Callable[[str], None],
        wait_seconds: float,
    ) -> None:
        self._calls = calls
        self._session_id = session_id
        self._prefetch = prefetch
        self._open_bytes = open_bytes
        self._put_away = put_away
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._ahead: dict[int, _Ahead] = {}
        self._requests = StepRequests(give_up)
        #: Calls that somebody holds; those that are done are cancelled in vain.
        self._pending: WeakSet[PendingStep] = WeakSet()
        self._granted: queue.SimpleQueue[_Ahead | None] = queue.SimpleQueue()
        self._thread: StepThread | None = None
        weakref.finalize(self, self._granted.put, None).atexit = False
        self._closed = False

    def take(self, step: int, *, until: float, seconds: float) -> OpenedGrant:
        """Return a step's grant, opened where it was asked for ahead; wait until ``until``.

        Raises:
            DeadlinePassedError: it was not complete, or its bytes not here, within ``seconds``.
            CancelledError: the session was closed meanwhile.
            TeacherLogitsError: why the step cannot be had.
        """
        with self._lock:
            ahead = self._ahead.pop(step, None)
        try:
            if ahead is not None:
                found = self._await(ahead, until=until, seconds=seconds)
                if found is not None:
                    return found
            # Not asked for ahead, or in vain: why, a call of its own tells anew.
            pending = self._ask(step, self._requests.ask(step), until - time.monotonic())
            if ahead is None:
                self._look_ahead(step)
            return OpenedGrant(grant=pending.result(max(0.0, until - time.monotonic())))
        except BaseException:
            self._requests.put_down(step)
            raise

    def finish(self, step: int) -> None:
        """Note that a step's grant was opened, or given back: asked again, it is granted anew."""
        self._requests.finish(step)

    def take_ready(self, step: int) -> OpenedGrant | None:
        """Return None: what was asked for ahead is opened and no more."""

    def read_ahead(self, step: int) -> None:
        """Do nothing: what was asked for ahead comes by itself."""

    def put_back(self, grant: StepGrant) -> bool:
        """Leave the request behind: who asks again is granted the same."""
        return self._requests.put_down(grant.step)

    def close(self) -> None:
        """Cancel what is under way, and let go of what was opened and not taken."""
        with self._lock:
            self._closed = True
            left = list(self._ahead.values())
            self._ahead.clear()
            pending = list(self._pending)
        self._requests.close()
        self._granted.put(None)
        for ahead in left:
            self._drop(ahead)
        for call in pending:
            call.cancel()

    def _ask(self, step: int, request_id: str, seconds: float) -> PendingStep:
        pending = self._calls.acquire_step(
            self._session_id, request_id=request_id, step=step, timeout=seconds
        )
        with self._lock:
            self._pending.add(pending)
            if self._closed:
                pending.cancel()
        return pending

    def _look_ahead(self, step: int) -> None:
        """Ask for the steps behind one that is taken, and for no others."""
        wanted = range(step + 1, step + 1 + self._prefetch)
        with self._lock:
            dropped = [self._ahead.pop(each) for each in list(self._ahead) if each not in wanted]
            missing = [each for each in wanted if each not in self._ahead and not self._closed]
            if missing and self._thread is None:
                # It knows this object weakly: one that is dropped unclosed ends it all the same.
                work = partial(_open_granted, weakref.ref(self), self._granted)
                self._thread = StepThread(work, stop=partial(self._granted.put, None))
        for each in dropped:
            self._drop(each)
        for number in missing:
            request_id = self._requests.ask_ahead(number)
            pending = self._ask(number, request_id, self._wait_seconds)
            ahead = _Ahead(number, request_id, pending)
            self._keep(ahead)
            pending.when_done(partial(self._note_come, ahead))

    def _keep(self, ahead: _Ahead) -> None:
        """Keep what was asked for ahead; what another thread has asked for meanwhile goes."""
        with self._lock:
            other = self._ahead.get(ahead.step)
            self._ahead[ahead.step] = ahead
        if other is not None:
            self._drop(other)

    def _note_come(self, ahead: _Ahead) -> None:
        ahead.has_come = True
        with self._lock:
            closed = self._closed
            if not closed:
                self._granted.put(ahead)
        if closed:  # that thread has ended
            self._finish(ahead, CancelledError(f"step {ahead.step} was asked for ahead"))

    def _await(self, ahead: _Ahead, *, until: float, seconds: float) -> OpenedGrant | None:
        """Return what was asked for ahead; None where that failed."""
        found = None
        try:
            self._look_ahead(ahead.step)
        except BaseException:
            self._keep(ahead)
            raise
        try:
            found = ahead.ready.result(max(0.0, until - time.monotonic()))
        except NotYet:
            self._keep(ahead)
            raise _too_late(ahead, seconds) from None
        except BaseException as error:
            # What failed there, a call of its own tells anew; what came up here is no such failure.
            if not ahead.ready.done() or error is not ahead.ready.exception():
                self._keep(ahead)
                raise
        if ahead.request_id:
            self._requests.hand_over(ahead.step, ahead.request_id)
        return found

    def open_granted(self, ahead: _Ahead) -> None:
        """Open what a call ahead was granted; on the thread."""
        try:
            found = self._opened(ahead)
        except Exception as error:  # no memory, for one: the thread goes on with the next
            self._finish(ahead, error)
        except BaseException as error:
            self._finish(ahead, error)
            raise
        else:
            self._finish(ahead, found)

    def _opened(self, ahead: _Ahead) -> OpenedGrant:
        grant = ahead.pending.result(0.0)
        try:
            leases = self._open_bytes(grant, time.monotonic() + self._wait_seconds)
        except TeacherLogitsError as error:
            if not is_failure_of_leases(error):
                return OpenedGrant(grant=grant)  # who asks for it tries again
            ahead.request_id = ""  # its leases were given back
            raise
        return OpenedGrant(grant=grant, leases=tuple(leases))

    def _finish(self, ahead: _Ahead, outcome: OpenedGrant | BaseException) -> None:
        with self._lock:
            if not ahead.is_dropped:
                if isinstance(outcome, BaseException):
                    ahead.ready.set_exception(outcome)
                else:
                    ahead.ready.set_result(outcome)
                return
        if isinstance(outcome, OpenedGrant):
            self._put_away(outcome.leases or ())

    def _drop(self, ahead: _Ahead) -> None:
        with self._lock:
            ahead.is_dropped = True
        ahead.pending.cancel()
        if not ahead.ready.cancel() and ahead.ready.exception() is None:
            self._put_away(ahead.ready.result().leases or ())
        self._requests.give_up(ahead.request_id)


def _too_late(ahead: _Ahead, seconds: float) -> DeadlinePassedError:
    """Return the error of who waited for a step that was asked for ahead."""
    step, waited = ahead.step, span_text(seconds)
    why = (
        f"step {step} is complete, and its bytes have not all come after {waited}: wait longer, or "
        "see how busy the way to the server is"
        if ahead.has_come
        else f"step {step} is not complete after {waited}, or the server is stopped: the call that "
        "asks for it ahead has no answer yet; `teacher-logits inspect` says what it lacks"
    )
    return DeadlinePassedError(
        why, facts={"step": step, "deadline_seconds": seconds, "has_come": int(ahead.has_come)}
    )


def _open_granted(
    known: weakref.ref[CalledSteps], granted: queue.SimpleQueue[_Ahead | None]
) -> None:
    """Be a session's thread, while its steps are there."""
    while (ahead := granted.get()) is not None:
        steps = known()
        if steps is None:
            return
        steps.open_granted(ahead)
        del ahead, steps
