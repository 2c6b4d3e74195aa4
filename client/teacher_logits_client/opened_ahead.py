"""Opened ahead: grants that wait in a mailbox, opened while nobody waits for them.

    slabs      on the thread of the returns: mapped, and extents looked up, in no time
    streams    on a thread of their own, since returns must not wait for bytes; it reads the
               line too, so that a step is sent for as soon as it is granted

Whoever acquires such a step finds it open and its batch made, or waits for the rest of it. That
thread is started with the first step of the session of which something is streamed. Where a
batch is closed, what lies in slabs that are mapped is opened as well.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError
from teacher_logits_client.step_grants import OpenedGrant
from teacher_logits_client.step_thread import StepThread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.terms import StepGrant
    from teacher_logits_client.batch import Batch
    from teacher_logits_client.line import Line
    from teacher_logits_client.mailbox import Mailbox
    from teacher_logits_client.reader import OpenedLease, Reader
    from teacher_logits_client.step_batches import BatchMaker

_SLAB_SECONDS = 5.0
"""How long the slabs of one grant may take to be opened."""
_A_WHILE = 3600.0


class _Entry:
    """A grant that is being opened while ``lock`` is held, and has been after that."""

    def __init__(self, grant: StepGrant) -> None:
        self.grant = grant
        self.lock = threading.Lock()
        self.lock.acquire()
        self.opened = OpenedGrant(grant=grant)
        self.is_dropped = False


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
        for grant in self._mailbox.grants():
            if _streams(grant) or (
                at_once and not all(map(self._reader.opens_at_once, grant.leases))
            ):
                continue
            self._open(grant, _SLAB_SECONDS)

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
        entry = self._entries.pop(grant.step, None)
        if entry is None:
            return OpenedGrant(grant=grant)
        started = time.monotonic()
        if not entry.lock.acquire(timeout=max(0.0, until - started)):
            self._entries[grant.step] = entry
            raise DeadlinePassedError(
                f"the slabs or streams of step {grant.step} had not come after "
                f"{span_text(time.monotonic() - started)}: they are large, or the server is "
                "stopped or gone",
                facts={"step": grant.step},
            )
        if entry.grant is grant:
            return entry.opened
        self._put_away(entry.opened)
        return OpenedGrant(grant=grant)

    def close(self) -> None:
        """Let go of what was opened and not taken; its leases stay the session's, unread.

        Streams under way end with the session, and are let go of then.
        """
        self._stop()
        for step in list(self._entries):
            entry = self._entries.pop(step, None)
            if entry is not None:
                with self._lock:
                    entry.is_dropped = True
                    opened, entry.opened = entry.opened, OpenedGrant(grant=entry.grant)
                self._put_away(opened)
        for left in self._mailbox.take_all_opened():
            if isinstance(left, OpenedGrant):
                self._put_away(left)

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
            leases = tuple(self._reader.open_bytes(grant.leases, until=until, keep=True))
            batch = self._make(grant, leases)
            self._keep(entry, OpenedGrant(grant=grant, leases=leases, batch=batch))
        except TeacherLogitsError:
            return  # who takes it tries again, and is told
        finally:
            entry.lock.release()

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
                if self._mailbox.put_opened(opened):
                    self._entries.pop(entry.grant.step, None)
                return
        self._put_away(opened)


def _streams(grant: StepGrant) -> bool:
    return any(lease.extent is None for lease in grant.leases)
