"""Mailbox: the steps that were sent ahead to one session, until they are asked for.

A step that is announced lies here as any other, and can be taken once it is open and sealed; it
goes, untaken, where the server withdraws it.

Put by whichever thread reads the broker line, taken by whoever acquires; each step once. What
was never asked for stays, and goes back unread with the session.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakMethod

from teacher_logits.errors import RequestInvalidError
from teacher_logits.grid import is_whole
from teacher_logits.terms import (
    SlabsGone,
    StepFailure,
    StepGrant,
    StepWithdrawn,
    WritersCame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.terms import Mail

News = TypeVar("News")

MAX_PREFETCH = 15
"""Steps that a session may want ahead, beside the one that it asks for."""


class Opened(Protocol):
    """A grant that was opened ahead."""

    @property
    def grant(self) -> StepGrant:
        """As it came."""

    @property
    def is_sealed(self) -> bool:
        """Whether it may be handed out."""

    @property
    def is_made(self) -> bool:
        """Whether nothing is left to be done for that."""


class Mailbox:
    """Steps by their number.

    Args:
        prefetch: steps wanted ahead of the one that is asked for.
    """

    def __init__(self, prefetch: int = 1) -> None:
        """Take in nothing yet.

        Raises:
            RequestInvalidError: no session may want so many steps ahead.
        """
        if not is_whole(prefetch) or not 0 <= prefetch <= MAX_PREFETCH:
            raise RequestInvalidError(
                f"prefetch={prefetch!r}: give how many steps are asked for ahead, 0 to "
                f"{MAX_PREFETCH}",
                facts={"prefetch": str(prefetch), "limit": MAX_PREFETCH},
            )
        self.prefetch = int(prefetch)
        self._steps: dict[int, StepGrant | StepFailure | Opened] = {}
        #: By thread, what it took and has not let go of. One that takes again was interrupted.
        self._in_hand: dict[int, StepGrant | Opened] = {}
        #: What was put last: the line says it twice, where it was interrupted.
        self._newest: StepGrant | StepFailure | None = None
        self._lock = threading.Lock()
        self._came: _Bulletin[DeviceProbe] = _Bulletin()
        self._gone: _Bulletin[str] = _Bulletin()
        self._withdrawn: list[Opened] = []

    def __contains__(self, step: int) -> bool:
        found = self._steps.get(step)
        return found is not None and _can_be_taken(found)

    def put(self, mail: Mail) -> None:
        """Take in what was sent ahead."""
        if isinstance(mail, StepGrant | StepFailure):
            with self._lock:
                if mail is not self._newest:
                    self._steps[mail.step] = self._newest = mail
        elif isinstance(mail, SlabsGone):
            self._gone.post(mail.slab_ids)
        elif isinstance(mail, StepWithdrawn):
            self._withdraw(mail.step)
        elif isinstance(mail, WritersCame):
            self._came.post(mail.probes)

    def hear_of_writers(self, listener: Callable[[Sequence[DeviceProbe]], None]) -> None:
        """Have a method told of device memory that came, by the thread that reads the line.

        Its object is not kept alive by that.
        """
        self._came.listen(listener)

    def hear_of_gone_slabs(self, listener: Callable[[Sequence[str]], None]) -> None:
        """Have a method told of slabs where nothing will lie again; as ``hear_of_writers``."""
        self._gone.listen(listener)

    def take_withdrawn(self) -> list[Opened]:
        """Return what was opened of steps that were withdrawn, each once."""
        if not self._withdrawn:
            return []
        with self._lock:
            found, self._withdrawn = self._withdrawn, []
        return found

    def awaits_opening(self, step: int) -> bool:
        """Say whether a step is announced, and nobody has opened it yet."""
        found = self._steps.get(step)
        return isinstance(found, StepGrant) and bool(found.awaited)

    def remove(self, grant: StepGrant) -> None:
        """Remove a grant that waits here and cannot be had."""
        with self._lock:
            if self.holds(grant):
                del self._steps[grant.step]

    def fail(self, step: int, error: TeacherLogitsError) -> None:
        """Take in that a step was refused, unless it came all the same."""
        with self._lock:
            self._steps.setdefault(step, StepFailure(step=step, error=error))

    def take(self, step: int) -> StepGrant | Opened | None:
        """Return a step that can be had; None where there is none, or none yet.

        It is in this thread's hands then, until it lets go of it or puts it back.

        Raises:
            TeacherLogitsError: why it cannot be had.
        """
        with self._lock:
            if self._in_hand:
                self._put_back_mine()
            found = self._steps.get(step)
            if found is None or not _can_be_taken(found):
                return None
            if not isinstance(found, StepFailure):
                self._in_hand[threading.get_ident()] = found
            del self._steps[step]
        if isinstance(found, StepFailure):
            raise found.error
        return found

    @property
    def is_in_hand(self) -> bool:
        """Whether this thread has something in its hands."""
        return threading.get_ident() in self._in_hand

    def let_go(self) -> None:
        """Note that what this thread took has found its owner."""
        self._in_hand.pop(threading.get_ident(), None)

    def put_back(self) -> None:
        """Put back what is in this thread's hands, for the next who asks."""
        with self._lock:
            self._put_back_mine()

    def take_opened(self, step: int) -> Opened | None:
        """Return a step that is here, made and sealed, as ``take``; what else is here stays."""
        with self._lock:
            if self._in_hand:
                self._put_back_mine()
            found = self._steps.get(step)
            if found is None or isinstance(found, StepGrant | StepFailure):
                return None
            if not (found.is_made and found.is_sealed):
                return None
            self._in_hand[threading.get_ident()] = found
            del self._steps[step]
        return found

    def take_all_opened(self) -> list[Opened]:
        """Return every step that is here and open, sealed or not."""
        with self._lock:
            self._put_back_mine()
            all_here = list(self._steps.values())
            opened = [e for e in all_here if not isinstance(e, StepGrant | StepFailure)]
            for each in opened:
                del self._steps[each.grant.step]
        return [*opened, *self.take_withdrawn()]

    def grants(self) -> list[StepGrant]:
        """Return what waits to be opened, the lowest step first."""
        waiting = [each for each in list(self._steps.values()) if isinstance(each, StepGrant)]
        return sorted(waiting, key=lambda grant: grant.step)

    def announced(self) -> list[StepGrant]:
        """Return what waits here for its seal, opened or not."""
        here = [each for each in list(self._steps.values()) if not isinstance(each, StepFailure)]
        grants = [each if isinstance(each, StepGrant) else each.grant for each in here]
        return [grant for grant in grants if grant.awaited]

    def holds(self, grant: StepGrant) -> bool:
        """Say whether this very grant waits to be taken."""
        return self._steps.get(grant.step) is grant

    def put_opened(self, opened: Opened) -> bool:
        """Put a grant that waits here in its opened form; False where it was taken meanwhile."""
        with self._lock:
            if not self.holds(opened.grant):
                return False
            self._steps[opened.grant.step] = opened
            return True

    def _put_back_mine(self) -> None:
        here = threading.get_ident()
        mine = self._in_hand.get(here)
        if mine is not None:
            step = mine.step if isinstance(mine, StepGrant) else mine.grant.step
            self._steps.setdefault(step, mine)
            self._in_hand.pop(here, None)

    def _withdraw(self, step: int) -> None:
        with self._lock:
            found = self._steps.get(step)
            if found is None or isinstance(found, StepFailure):
                return
            grant = found if isinstance(found, StepGrant) else found.grant
            if grant.awaited:
                del self._steps[step]
            if grant.awaited and not isinstance(found, StepGrant):
                self._withdrawn.append(found)


def _can_be_taken(found: StepGrant | StepFailure | Opened) -> bool:
    if isinstance(found, StepGrant):
        return not found.awaited
    return isinstance(found, StepFailure) or found.is_sealed


class _Bulletin(Generic[News]):
    """News for one listener, each told once; what comes before there is one waits for it."""

    def __init__(self) -> None:
        self._waiting: list[News] = []
        self._lock = threading.Lock()
        self._listener: WeakMethod[Callable[[Sequence[News]], None]] | None = None

    def post(self, news: Sequence[News]) -> None:
        with self._lock:
            self._waiting += news
        self._tell()

    def listen(self, listener: Callable[[Sequence[News]], None]) -> None:
        self._listener = WeakMethod(listener)
        self._tell()

    def _tell(self) -> None:
        listener = self._listener() if self._listener is not None else None
        if listener is None:
            return
        with self._lock:
            news, self._waiting = self._waiting, []
        if news:
            listener(news)
