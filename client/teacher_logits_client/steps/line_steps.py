"""Steps over a broker line: the server sends them ahead, and an acquire finds them waiting.

acquire(7)   ->  want 7, 8          with prefetch 1; sent, and not waited for
             <-  7, when it is announced or complete; and 8, when that is
                 7 is sealed: its slots say so
acquire(8)   ->  want 8, 9          8 lies in the socket, or is in the mailbox already
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError
from teacher_logits.terms import StepGrant
from teacher_logits_client.steps.grants import OpenedGrant, Recent
from teacher_logits_client.steps.mailbox import MAX_PREFETCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits_client.line import Line
    from teacher_logits_client.steps.grants import StepSource
    from teacher_logits_client.steps.mailbox import Mailbox, Opened
    from teacher_logits_client.steps.opened_ahead import OpenedAhead

_log = logging.getLogger("teacher_logits_client")
_AT_ONCE = 0.0
_NOT_SEALED = "its publishers have not sealed all of its rows"


class LineSteps:
    """The steps of one session with a line; any thread may take them.

    Args:
        mailbox: where the line's mail is put.
        ahead: opens what is in it.
        again: asks for a step that was taken before: over the line each comes once for as
            long as its leases are out.
        later: has something done soon on the thread of the returns, in order.
    """

    def __init__(
        self,
        line: Line,
        mailbox: Mailbox,
        *,
        session_id: str,
        ahead: OpenedAhead,
        again: StepSource,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._line = line
        self._mailbox = mailbox
        self._session_id = session_id
        self._ahead = ahead
        self._again = again
        self._later = later
        self._taken = Recent()
        #: The steps that were wanted last.
        self._wanted = range(0)
        #: The last step that the thread of the returns is about to want; none below 0.
        self._to_be_wanted = -1
        self._lock = threading.Lock()
        #: Steps that threads wait for, by thread. One that asks anew was interrupted as it waited.
        self._awaited: dict[int, int] = {}
        self._closed = False
        ahead.when_given_up = lambda step: later(partial(self._want_again, step))

    def take(self, step: int, *, until: float, seconds: float) -> OpenedGrant:
        """Return a step's grant, opened where it waited here; wait for it until ``until``.

        What was sent ahead is found without a wait, and without waking another thread: torch
        lets go of the interpreter now and then, and would wait for that thread to give it back.

        Raises:
            DeadlinePassedError: it was not complete within ``seconds``, or the server is stopped.
            ServerUnreachableError: the line has ended.
            CancelledError: the session was closed meanwhile.
            TeacherLogitsError: why the step cannot be had.
        """
        try:
            self._awaited.pop(threading.get_ident(), None)
            found = self._find(step, until=until, seconds=seconds)
        except BaseException:  # of an interrupt too: what was taken is sent no second time
            self._put_back()
            raise
        if found is None:
            return self._again.take(step, until=until, seconds=seconds)
        self._note_taken(step)
        self._ahead.note_taken(found.grant)
        return found

    def take_ready(self, step: int) -> OpenedGrant | None:
        """Return a step if its batch was made ahead."""
        opened = self._mailbox.take_opened(step)
        if not isinstance(opened, OpenedGrant):
            return None
        self._note_taken(step)
        self._move_on(step)
        return opened

    def read_ahead(self, step: int) -> None:
        """Have the steps behind one that is being closed come, and open those that have.

        They are wanted before the leases of this one are returned, and by the thread that
        returns them: a step is sent again only when it has come back.
        """
        self.look_ahead(at_once=True)
        prefetch = self._mailbox.prefetch
        if prefetch:
            behind = min(1, MAX_PREFETCH - prefetch)
            self._to_be_wanted = step + prefetch + behind
            self._later(partial(self._want_behind, step, behind))

    def look_ahead(self, *, at_once: bool = False) -> None:
        """Read and open what was sent ahead, or only what takes no wait."""
        try:
            self._line.drain()
            self._ahead.open_all(at_once=at_once)
        except TeacherLogitsError as error:
            _log.debug("session %s: not opened ahead: %s", self._session_id, error.message)

    def finish(self, step: int) -> None:
        """Note that a step that was taken is open, or given back: it is sent no second time."""
        if self._mailbox.is_in_hand:
            self._mailbox.let_go()
        else:
            self._again.finish(step)

    def put_back(self, grant: StepGrant) -> bool:
        """Keep a grant that could not be opened in time, for the next who asks.

        One that was asked for by a call is asked for again: others may be had of its step.
        """
        if not self._again.put_back(grant):
            self._put_back()
        return True

    def close(self) -> None:
        """Leave what was sent and not taken, which goes back with the session, and wait no more."""
        self._closed = True
        self._line.wake()
        self._ahead.close()
        self._again.close()

    def _find(self, step: int, *, until: float, seconds: float) -> OpenedGrant | None:
        """Take a step that comes over the line, open or not; None where it does not."""
        grant = self._mailbox.take(step)
        if grant is None:
            self._line.drain()
            grant = self._mailbox.take(step)
        if grant is not None:
            self._move_on(step)
        elif step not in self._taken:
            grant = self._wait(step, until=until, seconds=seconds)
        if grant is None or isinstance(grant, OpenedGrant):
            return grant
        if not isinstance(grant, StepGrant):
            raise TypeError(f"a mailbox holds a {type(grant).__name__}")
        return self._ahead.take(grant, until=until)

    def _note_taken(self, step: int) -> None:
        """Note that who else wants a step must ask for it by a call."""
        self._taken.add(step)
        if self._awaited:
            self._line.wake()

    def _put_back(self) -> None:
        self._mailbox.put_back()
        if self._awaited:
            self._line.wake()

    def _wait(self, step: int, *, until: float, seconds: float) -> StepGrant | Opened | None:
        def refuse(error: TeacherLogitsError) -> None:
            self._mailbox.fail(step, error)

        try:
            with self._lock:
                if not self._fits(step):
                    return None  # it is asked for by a call
                self._awaited[threading.get_ident()] = step
                self._to_be_wanted = -1
                call_id = self._want(step, until=until, on_refusal=refuse)
            while self._line.wait(partial(self._is_over, step), until):
                if self._closed:
                    raise CancelledError(f"the wait for step {step} ended with its session")
                found = self._mailbox.take(step)
                if found is not None or not self._mailbox.awaits_opening(step):
                    return found  # None where another thread was quicker
                self._ahead.open_announced(step, until=until)
                if time.monotonic() > until:
                    break
        finally:
            self._awaited.pop(threading.get_ident(), None)
        answers = call_id is not None and self._line.has_answered(call_id)
        why = "the broker did not answer: the server is stopped, or gone"
        if answers:
            lacking = self._line.waits_for(self._session_id, step)
            why = f"it is not complete: {lacking or _NOT_SEALED}"
        raise DeadlinePassedError(
            f"waited {span_text(seconds)} for step {step}, and {why}",
            facts={"step": step, "deadline_seconds": seconds, "server_answers": answers},
        )

    def _is_over(self, step: int) -> bool:
        mailbox = self._mailbox
        is_here = step in mailbox or mailbox.awaits_opening(step)
        return is_here or step in self._taken or self._closed

    def _want_again(self, step: int) -> None:
        """Ask anew, behind the leases that go back, for a step that could not be opened ahead."""
        with self._lock:
            if self._fits(step):
                self._want(step, until=_AT_ONCE, on_refusal=_ignore)

    def _want_behind(self, step: int, behind: int) -> None:
        if self._to_be_wanted == step + self._mailbox.prefetch + behind:  # nothing newer since
            self._to_be_wanted = -1
            self._move_on(step, behind=behind)

    def _move_on(self, step: int, *, behind: int = 0) -> None:
        """Have the steps behind one that was taken come, unless they are wanted, or will be.

        ``behind`` of them will be taken before it is said again.
        """
        last = step + self._mailbox.prefetch + behind
        if last in self._wanted or last <= self._to_be_wanted or last - step > MAX_PREFETCH:
            return
        if self._lock.locked():  # a newer request is on its way
            return
        with self._lock:
            if self._fits(step):  # others wait for what this would forget
                self._want(step, until=_AT_ONCE, on_refusal=_ignore, behind=behind)

    def _fits(self, step: int) -> bool:
        """Say whether a step can be wanted beside those that threads wait for; lock held.

        A request names steps in a row, and takes the place of the one before.
        """
        wanted = {step, *list(self._awaited.values())}
        return max(wanted) - min(wanted) <= MAX_PREFETCH

    def _want(
        self,
        step: int,
        *,
        until: float,
        on_refusal: Callable[[TeacherLogitsError], None],
        behind: int = 0,
    ) -> int | None:
        """Want a step, those that other threads wait for, and those behind them; lock held."""
        wanted = {step, *list(self._awaited.values())}
        first = min(wanted)
        ahead = self._mailbox.prefetch + behind
        count = min(max(wanted) - first + 1 + ahead, 1 + MAX_PREFETCH)
        self._wanted = range(first, first + count)
        return self._line.want_steps(
            self._session_id, first, count, until=until, on_refusal=on_refusal
        )


def _ignore(error: TeacherLogitsError) -> None:
    """Leave a refusal to the next request: the step that was asked for is here."""
