"""Driver threads: calls into a driver that may hang, each on a thread of its own, by a deadline.

    done in time          what it brings
    late                  an error; what the call brings then is undone on its thread
    behind a late one     waited for a moment, and then the same error, with that call's name

Promises: nobody waits longer than he said. A driver that hangs for good has the threads of those
that were waiting for it when it began to hang, and no more: nothing is asked of it until it has
come back, and then it is used as ever.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError
from teacher_logits_client import threads

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")

_MOMENT_SECONDS = 1.0
"""How long a call waits for a late one to come back: a slow driver is no hanging one."""


@dataclass(eq=False)
class _Call:
    """A call that is out, or was."""

    what: str
    started: float
    has_ended: threading.Event = field(default_factory=threading.Event)


class DriverThreads:
    """The calls of one client into one driver. Any thread may make one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Calls that nobody waits for any more, as far as they are not over.
        self._late: list[_Call] = []

    def before(
        self, until: float, call: Callable[[], Found], *, undo: Callable[[Found], None], what: str
    ) -> Found:
        """Return what a call into the driver brings, on another thread, before a time.

        ``until`` is of ``time.monotonic``; ``undo`` is given what comes after that, ``what`` is
        what the call is about.

        Raises:
            DeadlinePassedError: it had not returned by then, or one that was late has not yet.
            NotAvailable: no thread can be had.
            Exception: what the call raises.
        """
        self._await_late(until)
        future: Future[Found] = Future()
        this = _Call(what, time.monotonic())

        def run() -> None:
            try:
                _bring(future, call, undo)
            finally:
                this.has_ended.set()

        threads.start(run, name="driver")
        try:
            return future.result(seconds_until(until))
        except NotYet:
            if not future.cancel():
                return future.result(0.0)  # in the very last moment
        except BaseException:
            if future.cancel():  # an interrupt: nobody waits for it any more
                self._note_late(this)
            raise
        self._note_late(this)
        raise late(what, time.monotonic() - this.started)

    def _note_late(self, call: _Call) -> None:
        with self._lock:
            self._late = [each for each in (*self._late, call) if not each.has_ended.is_set()]

    def _await_late(self, until: float) -> None:
        patient_until = min(until, time.monotonic() + _MOMENT_SECONDS)
        with self._lock:
            every = tuple(self._late)
        for each in every:
            if not each.has_ended.wait(seconds_until(patient_until)):
                raise _still_out(each)


def _bring(future: Future[Found], call: Callable[[], Found], undo: Callable[[Found], None]) -> None:
    try:
        found = call()
    except BaseException as error:
        with suppress(InvalidStateError):  # nobody waits to be told
            future.set_exception(error)
        return
    try:
        future.set_result(found)
    except InvalidStateError:
        undo(found)


def seconds_until(until: float) -> float:
    """Return the seconds that are left, as far as a thread can wait."""
    return min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)


def late(what: str, seconds: float) -> DeadlinePassedError:
    """Return the error for what the driver was not done with in time."""
    return DeadlinePassedError(
        f"the device's driver was not done with {what} after {span_text(seconds)}: it hangs, or "
        "the device is very busy; nvidia-smi says",
        facts={"seconds": round(seconds, 3)},
    )


def _still_out(call: _Call) -> DeadlinePassedError:
    seconds = time.monotonic() - call.started
    return DeadlinePassedError(
        f"the device's driver is not done with {call.what} yet, after {span_text(seconds)}, and "
        "nothing more is asked of it until it is: it hangs, or the device is very busy; "
        "nvidia-smi says",
        facts={"seconds": round(seconds, 3)},
    )
