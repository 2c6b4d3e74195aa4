"""The way back of leases: one thread that vacates memory and gives room back.

Finalisers and owners only put events on a queue; the thread asks the table (``leased``) what they
come to, waits for devices, drops dirtied pages, and then tells the server, in that order. What
cannot be delivered is tried again; what the server no longer knows is done with. A forked child
returns nothing. At the end of the program the thread does, briefly, what was put before.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from teacher_logits.device_memory import DeviceError
from teacher_logits.errors import NotAvailable
from teacher_logits_client import exits, threads
from teacher_logits_client.forks import Home, watch
from teacher_logits_client.leased import ClientStatistics, Lease, LeaseTable, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from teacher_logits_client.leased import Due
    from teacher_logits_client.openers import OpenedPayload, View

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.5
_LAST_TRIES_SECONDS = 10.0
_FORK_SECONDS = 0.5


@dataclass(frozen=True, eq=False)
class _Way:
    """How one lease goes back."""

    opened: OpenedPayload
    give_back: Callable[[], None]


class Expected(NamedTuple):
    """A lease before it is adopted."""

    lease_id: str
    way: _Way
    lease: Lease


class Returner:
    """Takes back what one client leased.

    Its thread ends with ``stop`` and the last lease, or with the process.

    Args:
        finish: called last of all, on the thread. What it belongs to is kept in a forked
            child, which must not tear it down.
        hang_up: breaks off the calls that ``give_back`` may be in, at the end of the program.
    """

    def __init__(
        self,
        *,
        finish: Callable[[], None] = lambda: None,
        hang_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._finish = finish
        self._hang_up = hang_up
        self._home = Home()
        #: Refuses to go on in a forked child; see ``Home.check``.
        self.check_here = self._home.check
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._table = LeaseTable()
        self._ways: dict[str, _Way] = {}
        self._counts: Counter[str] = Counter()
        #: Returns that found no server, to be tried again. The thread's own.
        self._undelivered: list[Callable[[], None]] = []
        self._stopped_at: float | None = None
        self._leaving = False
        watch(self)
        self._thread = threads.start(self._run, name="returns")
        exits.watch(self)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that leased, and no fork of it."""
        return self._home.is_here

    # What owners and finalisers call

    def expect(
        self,
        lease_id: str,
        opened: OpenedPayload,
        *,
        give_back: Callable[[], None],
        views: Iterable[str] = (),
    ) -> Expected:
        """Make ready for a lease that will be adopted, or not.

        ``give_back`` tells the server, on this object's thread. ``views`` names the columns
        that are watched already (``watch_ahead``).
        """
        lease = Lease(views=set(views), copied=opened.copied)
        return Expected(lease_id, _Way(opened, give_back), lease)

    def adopt(self, expected: Expected) -> None:
        """Take charge of a lease that its owner has open."""
        with self._lock:
            self._ways[expected.lease_id] = expected.way
            self._table.enter(expected.lease_id, expected.lease)

    def watch(self, lease_id: str, name: str, view: View) -> weakref.ref[View] | None:
        """Learn when the last tensor over ``view``, of the column ``name``, is gone.

        The caller may ask the reference; None where the lease is not open any more.
        """
        unwatch = self._when_gone(lease_id, name, view)  # first: an interrupt may come between
        with self._lock:
            if self._table.viewed(lease_id, name):
                return weakref.ref(view)
        unwatch()
        return None

    def watch_ahead(self, lease_id: str, name: str, view: View) -> weakref.ref[View]:
        """Do so for a lease that is adopted later, or never."""
        self._when_gone(lease_id, name, view)
        return weakref.ref(view)

    def _when_gone(self, lease_id: str, name: str, view: View) -> Callable[[], object]:
        gone = partial(self._apply, lambda: self._table.view_gone(lease_id, name))
        ended = weakref.finalize(view, self._put, gone)
        ended.atexit = False
        return ended.detach

    def close(self, lease_id: str, *, outlived: bool) -> None:
        """Note that the owner is done with a lease, twice too; the thread does what follows."""
        with self._lock:
            self._table.note_closed(lease_id, outlived=outlived)
        self._put(lambda: self._apply(lambda: self._table.close(lease_id)))

    def drop(self, lease_id: str) -> None:
        """Note that a lease was dropped without being closed; safe in a finaliser."""
        self._put(lambda: self._apply(lambda: self._table.close(lease_id, dropped=True)))

    def later(self, job: Callable[[], None]) -> None:
        """Do something on the thread, behind all that was put before; safe in a finaliser."""
        self._put(lambda: self._try(job))

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of the counts of ``ClientStatistics``."""
        with self._lock:
            self._counts[name] += by

    def wait(self, timeout: float) -> bool:
        """Wait until all that was put is done, but not at the program's end; False if late."""
        if self._leaving:
            return True
        done = threading.Event()
        self._put(done.set)
        return done.wait(timeout)

    def stop(self) -> None:
        """End the thread once nothing is left to be returned, or can be."""
        self._put(self._stop)

    def statistics(self) -> ClientStatistics:
        """Return the counts as they are now."""
        with self._lock:
            return replace(self._table.statistics(), **self._counts)

    # Forks (see ``forks.Forkable``)

    def before_fork(self, child: int) -> bool:
        """Hold all shared room for a child; what was closed before goes back first."""
        if self._home.is_here and self._thread.is_alive():
            if threading.current_thread() is not self._thread:
                self.wait(_FORK_SECONDS)
        self._lock.acquire()
        return self._home.is_here and self._table.forked(child)

    def after_fork(self) -> None:
        """Go on."""
        self._lock.release()

    def child_ended(self, child: int) -> None:
        """Let go of what a child held."""
        self._put(lambda: self._apply(lambda: self._table.child_ended(child)))

    # The end of the program (see ``exits.Stoppable``)

    def stop_at_exit(self) -> None:
        """Have the thread end behind what was put; what it belongs to is left as it is."""
        self._put(self._leave)

    def tear_loose(self) -> None:
        """Have it end now."""
        self._leave()
        self._put(self._leave)
        self._hang_up()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    # On the thread

    def _put(self, event: Callable[[], None]) -> None:
        # A finaliser may run anywhere, even inside this queue's own put: SimpleQueue allows it.
        if self._home.is_here:
            self._events.put(event)

    def _run(self) -> None:
        retry_at = 0.0
        while not self._is_finished():
            left = max(0.0, retry_at - time.monotonic()) if self._undelivered else None
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                pass
            else:
                self._do(event)
                del event  # or it would keep alive what it speaks of until the next comes
            if self._undelivered and time.monotonic() >= retry_at:
                self._retry()
                retry_at = time.monotonic() + _RETRY_SECONDS
        if not self._leaving:  # or views may be left, which the line stands for
            self._finish()

    def _do(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception:
            if not self._leaving:  # a fault of ours in one return keeps no other from going back
                _log.exception("a return failed")

    def _is_finished(self) -> bool:
        if self._leaving or self._stopped_at is None:
            return self._leaving
        # Once stopped, no longer than this for a server that does not answer: the end of the
        # line, or the TTL, will tell it.
        wait_on = self._undelivered and time.monotonic() < self._stopped_at + _LAST_TRIES_SECONDS
        with self._lock:  # so that no close is between its change and its event
            return not (self._ways or wait_on or not self._events.empty())

    def _apply(self, change: Callable[[], Due]) -> None:
        with self._lock:
            steps = self._steps(change())
        self._carry_out(steps)

    def _steps(self, due: Due) -> list[tuple[_Way, Step]]:
        """Return the steps with their ways; a lease whose memory is to be vacated is forgotten."""
        steps = [(self._ways[lease_id], step) for lease_id, step in due]
        for lease_id, step in due:
            if step is Step.VACATE:
                del self._ways[lease_id]
        return steps

    def _carry_out(self, steps: list[tuple[_Way, Step]]) -> None:
        kept: list[_Way] = []
        for way, step in steps:
            if self._leaving:
                return
            if step is Step.RETURN and way not in kept:
                self._try(way.give_back)
            elif step is Step.VACATE and not self._vacate(way):
                kept.append(way)

    def _vacate(self, way: _Way) -> bool:
        try:
            self.count("dirtied_bytes", way.opened.vacate())
        except (OSError, DeviceError):
            # What is not known to be clean must not be written into and read anew.
            _log.exception("the room of a lease stays taken until the session ends")
            return False
        return True

    def _try(self, job: Callable[[], None]) -> None:
        try:
            job()
        except NotAvailable as error:
            _log.debug("not delivered, will be tried again: %s", error.message)
            self._undelivered.append(job)

    def _retry(self) -> None:
        jobs, self._undelivered = self._undelivered, []
        for job in jobs:
            self._do(partial(self._try, job))

    def _leave(self) -> None:
        self._leaving = True

    def _stop(self) -> None:
        self._stopped_at = time.monotonic()
