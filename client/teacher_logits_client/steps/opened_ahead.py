"""Opened ahead: grants that wait in a mailbox, opened while nobody waits for them.

    slabs      on the thread of the returns: mapped, and extents looked up, in no time
    streams    on a thread of their own, since returns must not wait for bytes; it reads the
               line too, so that a step is sent for as soon as it is granted

A step that is announced is opened as one that is granted, and waits for its seal.

Whoever acquires such a step finds it open and its batch made, or waits for the rest of it. That
thread is started with the first step of the session of which something is streamed. Where a
batch is closed, what lies in slabs that are mapped is opened as well.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError
from teacher_logits_client.sessions.step_thread import StepThread
from teacher_logits_client.steps.grants import OpenedGrant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.terms import StepGrant
    from teacher_logits_client.line import Line
    from teacher_logits_client.openers import OpenedLease
    from teacher_logits_client.payloads.batch import Batch
    from teacher_logits_client.sessions.reader import Reader
    from teacher_logits_client.steps.batches import BatchMaker
    from teacher_logits_client.steps.mailbox import Mailbox, Opened

_SLAB_SECONDS = 5.0
"""How long the slabs of one grant may take to be opened."""
_A_WHILE = 3600.0


class _Entry:
    """A grant that is being opened, by the thread that made this, until that says so."""

    def __init__(self, grant: StepGrant) -> None:
        self.grant = grant
        self.opened = OpenedGrant(grant=grant)
        self.is_dropped = False
        self._is_open = False
        #: Held until it is open; for ever, where a thread that waited for it was interrupted then.
        self._opening = threading.Lock()
        self._opening.acquire()

    def finish(self) -> None:
        """Let whoever waits go on; once."""
        self._is_open = True
        self._opening.release()

    def wait(self, seconds: float) -> bool:
        """Wait until it is open; False where it is not by then."""
        if not self._is_open and self._opening.acquire(timeout=max(0.0, seconds)):
            self._opening.release()
        return self._is_open


class OpenedAhead:
    """The opened grants of one session's mailbox.

    Args:
        stream_seconds: how long the streams of one grant may take.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        reader: Reader,
        line: Line,
        maker: BatchMaker,
        *,
        stream_seconds: float,
    ) -> None:
        #: Called with an announced step whose leases are on their way back.
        self.when_given_up: Callable[[int], None] = lambda step: None
        self._mailbox = mailbox
        self._reader = reader
        self._line = line
        self._maker = maker
        self._stream_seconds = stream_seconds
        #: Each change is one step of the dictionary, and so needs no lock.
        self._entries: dict[int, _Entry] = {}
        #: Held for what becomes of an entry's leases, and for the start of the thread.
        self._lock = threading.Lock()
        self._thread: StepThread | None = None
        self._closed = False

    def open_all(self, *, at_once: bool = False) -> None:
        """Open what waits and lies in slabs.

        ``at_once``: only what needs no answer of the server's. What fails is left as it is.
        """
        self._drop_withdrawn()
        for grant in self._mailbox.grants():
            if _streams(grant) or (at_once and not self._reader.opens_at_once(grant)):
                continue
            self._open(grant, _SLAB_SECONDS)

    def open_announced(self, step: int, *, until: float) -> None:
        """Have a step that is announced open, or given up, when this returns in time.

        What was withdrawn is let go of first: its place is often where the next one lies.
        """
        self._drop_withdrawn()
        seconds = max(0.0, min(_SLAB_SECONDS, until - time.monotonic()))
        for grant in self._mailbox.grants():
            if grant.step == step:
                self._open(grant, seconds)
        entry = self._entries.get(step)  # another thread is at it
        if entry is None or not entry.wait(seconds):
            return
        if self._mailbox.awaits_opening(step):  # it was another grant of the step
            if self._entries.pop(step, None) is entry:
                self._put_away(entry.opened)

    def note_taken(self, grant: StepGrant) -> None:
        """Learn how a session's steps come: streams are opened from the first of them on."""
        if self._thread is not None or not self._mailbox.prefetch or not _streams(grant):
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = StepThread(self._open_streams, stop=self._stop)

    def take(self, grant: StepGrant, *, until: float) -> OpenedGrant:
        """Return a grant that was taken from the mailbox, with its leases if they are open.

        Raises:
            DeadlinePassedError: they were being opened when the deadline passed.
        """
        entry = self._entries.get(grant.step)
        if entry is None:
            return OpenedGrant(grant=grant)
        started = time.monotonic()
        if not entry.wait(until - started):
            raise DeadlinePassedError(
                f"the slabs or streams of step {grant.step} had not come after "
                f"{span_text(time.monotonic() - started)}: they are large, or the server is "
                "stopped or gone",
                facts={"step": grant.step},
            )
        if self._entries.pop(grant.step, None) is entry:  # else it was dropped at the close
            if entry.grant is grant:
                return entry.opened
            self._put_away(entry.opened)
        return OpenedGrant(grant=grant)

    def close(self) -> None:
        """Let go of what was opened and not taken; its leases stay the session's, unread.

        Those of announced steps go back, so that their seals find nobody here.

        Streams under way end with the session, and are let go of then.
        """
        self._stop()
        # Out of the mailbox first: what another thread takes meanwhile stays its own.
        for left in self._mailbox.take_all_opened():
            self._drop(left)
            if left.grant.awaited:
                self._give_back(left.grant)
        for grant in self._mailbox.announced():
            self._give_back(grant)
        for step in list(self._entries):
            entry = self._entries.pop(step, None)
            if entry is not None:
                with self._lock:
                    entry.is_dropped = True
                    opened, entry.opened = entry.opened, OpenedGrant(grant=entry.grant)
                self._put_away(opened)

    def _drop_withdrawn(self) -> None:
        for withdrawn in self._mailbox.take_withdrawn():
            self._drop(withdrawn)

    def _drop(self, opened: Opened) -> None:
        if isinstance(opened, OpenedGrant):
            self._put_away(opened)

    def _put_away(self, opened: OpenedGrant) -> None:
        if opened.batch is not None:
            opened.batch.drop()  # its tensors go before what they view
        self._reader.put_away(opened.leases or ())

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
        self._line.wake()

    def _open_streams(self) -> None:
        """Open what is streamed as soon as it is granted; the thread's own work."""
        try:
            while not self._closed:
                if self._line.wait(self._has_work, time.monotonic() + _A_WHILE):
                    for grant in self._waiting_streams():
                        self._open(grant, self._stream_seconds)
        except TeacherLogitsError:
            return  # the line has ended: who waits for a step is told

    def _has_work(self) -> bool:
        return self._closed or bool(self._waiting_streams())

    def _waiting_streams(self) -> list[StepGrant]:
        grants = self._mailbox.grants()
        return [each for each in grants if _streams(each) and each.step not in self._entries]

    def _open(self, grant: StepGrant, seconds: float) -> None:
        entry = _Entry(grant)
        try:
            if self._closed or self._entries.setdefault(grant.step, entry) is not entry:
                return
            if not self._mailbox.holds(grant):  # who took it meanwhile opens it too
                self._entries.pop(grant.step, None)
                return
            self._reader.settle(grant.settlements)
            until = time.monotonic() + seconds
            seals = self._reader.seals_of(grant, until=until)
            leases = self._reader.open_ahead(grant, until=until)
            made_of = grant
            if seals and all(is_sealed() for is_sealed in seals):
                seals, made_of = (), replace(grant, awaited=())
            batch = None if leases is None else self._make(made_of, leases)
            self._keep(entry, OpenedGrant(grant=grant, leases=leases, batch=batch, seals=seals))
        except TeacherLogitsError:
            if grant.awaited:
                self._give_up(grant)
            return  # who takes it tries again, and is told
        finally:
            entry.finish()

    def _give_up(self, grant: StepGrant) -> None:
        """Have an announced step granted as any other, since its seal cannot be seen from here."""
        self._mailbox.remove(grant)
        self._entries.pop(grant.step, None)
        self._give_back(grant)
        self.when_given_up(grant.step)

    def _give_back(self, grant: StepGrant) -> None:
        for lease in grant.leases:
            self._reader.discard(lease.lease_id)

    def _make(self, grant: StepGrant, leases: Sequence[OpenedLease]) -> Batch | None:
        try:
            return self._maker.make_ahead(grant, leases)
        except TeacherLogitsError:
            return None  # likewise

    def _keep(self, entry: _Entry, opened: OpenedGrant) -> None:
        """Keep what was opened for whoever takes it, in the mailbox if its grant is still there."""
        with self._lock:
            if not entry.is_dropped and not self._closed:
                entry.opened = opened
                is_here = self._mailbox.put_opened(opened)
                if is_here or entry.grant.awaited:
                    self._entries.pop(entry.grant.step, None)
                if is_here or not entry.grant.awaited:
                    return
        self._put_away(opened)  # nobody takes what was withdrawn meanwhile


def _streams(grant: StepGrant) -> bool:
    return any(lease.extent is None for lease in grant.leases)
