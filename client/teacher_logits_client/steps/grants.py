"""Grants of steps on their way from whoever brings them to whoever acquires."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.terms import StepGrant
    from teacher_logits_client.openers import OpenedLease
    from teacher_logits_client.payloads.batch import Batch

_MOST = 4096


@dataclass(frozen=True, kw_only=True)
class OpenedGrant:
    """A grant, with its leases opened, and the batch of them, where that was done ahead.

    ``seals`` say of each payload that an announced step awaits whether it is sealed.
    """

    grant: StepGrant
    leases: tuple[OpenedLease, ...] | None = None
    batch: Batch | None = None
    seals: tuple[Callable[[], bool], ...] = ()

    @property
    def is_made(self) -> bool:
        """Whether its batch is."""
        return self.batch is not None

    @property
    def is_sealed(self) -> bool:
        """Whether it may be handed out."""
        for is_sealed in self.seals:
            if not is_sealed():
                return False
        return True


class StepSource(Protocol):
    """Brings one session its steps."""

    def take(self, step: int, *, until: float, seconds: float) -> OpenedGrant:
        """Return a step, and wait for it until ``until`` (``time.monotonic`` seconds).

        It is in this thread's hands until it is put back or finished. Where it was neither, since
        an interrupt came, the next take of this thread finds it again.

        Raises:
            DeadlinePassedError: it had not come within ``seconds``.
            TeacherLogitsError: why the step cannot be had.
        """

    def finish(self, step: int) -> None:
        """Note that a step that was taken is open, or given back."""

    def take_ready(self, step: int) -> OpenedGrant | None:
        """Return a step if its batch was made ahead, as ``take``; never waits."""

    def read_ahead(self, step: int) -> None:
        """Have the steps behind one that is being closed come, and open those that have.

        Waits for nothing.
        """

    def put_back(self, grant: StepGrant) -> bool:
        """Keep a grant that could not be opened in time, for the next who asks.

        Returns whether it is kept: False of one that this thread did not take from here.
        """

    def close(self) -> None:
        """Bring nothing more."""


class StepRequests:
    """The requests for steps of one session; any thread may use them.

    Each is in one thread's hands, or asks ahead: what it is granted has one owner. One that ended
    without an answer may have been granted all the same, so it is left behind, and who asks next
    for its step goes on with it. One of them a step is enough: any other is given up.

    Args:
        give_up: gives back what a request was granted, or will be; waits for nothing.
    """

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self._give_up = give_up
        self._lock = threading.Lock()
        #: By step and thread. A thread that asks again for a step was interrupted amid it.
        self._in_hand: dict[tuple[int, int], str] = {}
        self._left: dict[int, str] = {}
        self._closed = False

    def ask_ahead(self, step: int) -> str:
        """Return the request of a step that no thread has asked for yet."""
        with self._lock:
            return self._left.pop(step, "") or secrets.token_hex(12)

    def ask(self, step: int) -> str:
        """Return this thread's request of a step, which is in its hands from now on."""
        here = (step, threading.get_ident())
        with self._lock:
            if here not in self._in_hand:
                self._in_hand[here] = self._left.pop(step, "") or secrets.token_hex(12)
            return self._in_hand[here]

    def hand_over(self, step: int, request_id: str) -> None:
        """Put a request that asked ahead into this thread's hands."""
        here = (step, threading.get_ident())
        with self._lock:
            older = self._in_hand.pop(here, "")
            self._in_hand[here] = request_id
        self.give_up(older)

    def finish(self, step: int) -> None:
        """Forget this thread's request: what it was granted is open, or given back."""
        with self._lock:
            self._in_hand.pop((step, threading.get_ident()), None)

    def put_down(self, step: int) -> bool:
        """Leave this thread's request behind; False where it has none."""
        surplus = ""
        with self._lock:
            request_id = self._in_hand.pop((step, threading.get_ident()), "")
            if request_id and self._left.setdefault(step, request_id) != request_id:
                surplus = request_id
            elif len(self._left) > _MOST:
                surplus = self._left.pop(next(iter(self._left)))
        self.give_up(surplus)
        return bool(request_id)

    def close(self) -> None:
        """Give up nothing more: all goes back with the session."""
        self._closed = True

    def give_up(self, request_id: str) -> None:
        """Give up a request that is in nobody's hands, if it is one."""
        if request_id and not self._closed:
            self._give_up(request_id)


class Recent:
    """The last few thousand steps that were added. Each method needs no lock."""

    def __init__(self) -> None:
        self._steps: dict[int, None] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def add(self, step: int) -> None:
        """Add a step."""
        self._steps[step] = None
        if len(self._steps) > _MOST:
            self._steps.pop(next(iter(self._steps)), None)
