"""Opened ahead: grants that wait in a mailbox, opened while nobody waits for them.

Works on the thread of the returns. Whoever acquires such a step finds its slabs mapped and its
extents looked up. What would be streamed is left alone: returns must not wait for bytes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError

if TYPE_CHECKING:
    from teacher_logits.terms import StepGrant
    from teacher_logits_client.mailbox import Mailbox
    from teacher_logits_client.reader import OpenedLease, Reader

_SECONDS = 5.0
"""How long one grant may take to be opened."""


class _Entry:
    """A grant that is being opened while ``lock`` is held, and has been after that."""

    def __init__(self, grant: StepGrant) -> None:
        self.grant = grant
        self.lock = threading.Lock()
        self.lock.acquire()
        self.leases: tuple[OpenedLease, ...] | None = None


class OpenedAhead:
    """The opened grants of one session's mailbox."""

    def __init__(self, mailbox: Mailbox, reader: Reader) -> None:
        self._mailbox = mailbox
        self._reader = reader
        self._entries: dict[int, _Entry] = {}
        self._closed = False

    def open_all(self) -> None:
        """Open whatever waits; one thread at a time does this. What fails is left as it is."""
        for grant in self._mailbox.grants():
            if self._closed or any(lease.extent is None for lease in grant.leases):
                continue
            if grant.step not in self._entries:
                entry = self._entries[grant.step] = _Entry(grant)
                try:
                    self._open(entry)
                finally:
                    entry.lock.release()

    def take(self, grant: StepGrant, *, until: float) -> tuple[OpenedLease, ...] | None:
        """Return the leases of a grant that was taken from the mailbox, if they are open.

        Raises:
            DeadlinePassedError: they were being opened when the deadline passed.
        """
        entry = self._entries.pop(grant.step, None)
        if entry is None:
            return None
        started = time.monotonic()
        if not entry.lock.acquire(timeout=max(0.0, until - started)):
            self._entries[grant.step] = entry
            raise DeadlinePassedError(
                f"the slabs of step {grant.step} had not come after "
                f"{span_text(time.monotonic() - started)}: the server is stopped, or gone",
                facts={"step": grant.step},
            )
        if entry.grant is grant:
            return entry.leases
        self._reader.put_away(entry.leases or ())
        return None

    def close(self) -> None:
        """Let go of what was opened and not taken; its leases stay the session's, unread."""
        self._closed = True
        for step in list(self._entries):
            entry = self._entries.pop(step, None)
            if entry is not None and entry.lock.acquire(timeout=_SECONDS):
                self._reader.put_away(entry.leases or ())

    def _open(self, entry: _Entry) -> None:
        grant = entry.grant
        if not self._mailbox.holds(grant):  # who took it meanwhile opens it too
            self._entries.pop(grant.step, None)
            return
        try:
            self._reader.settle(grant.settlements)
            until = time.monotonic() + _SECONDS
            entry.leases = tuple(self._reader.open_bytes(grant.leases, until=until, keep=True))
        except TeacherLogitsError:
            entry.leases = None  # who takes it tries again, and is told
