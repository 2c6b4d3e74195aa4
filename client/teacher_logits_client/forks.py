"""Forks: a client belongs to the process that made it, and a child reads its memory all the same.

A forked child has the parent's mappings and none of its threads. So in a child nothing of a
client works (``Home``), nothing is returned, and nothing is torn down: objects whose end would
touch the parent's sockets are kept for as long as the child lives. In the parent, whatever a
child may read is held until that child ends, which a pipe tells: its write end is left with
the child alone, and closes when the child ends or runs another program.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, NoReturn, Protocol

from teacher_logits.errors import ForkedClientError, RequestInvalidError

if TYPE_CHECKING:
    from collections.abc import Callable

_IN_THE_CHILD = (
    "make the client inside the child (for a DataLoader: in worker_init_fn, or on first use in "
    "the worker)"
)
#: The name that ``multiprocessing`` gives the thread which pickles what is put on a queue.
_FEEDER = "QueueFeederThread"


class Home:
    """The process that an object was made in."""

    # Kept by the class: the interpreter's end takes the names of a module, one module after
    # the other, while objects that are told of their own end are still about.
    _is_ending = staticmethod(sys.is_finalizing)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and no fork of it, and it has not come to its end.

        Finalisers ask this first, and do nothing where it is not so: our threads have ended by
        then (``exits``), and what a finaliser calls may be gone. A warning is left unsaid too.
        """
        return not self._is_ending() and os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Refuse to go on in a forked child.

        Raises:
            ForkedClientError: naming ``what``, both processes and the way out.
        """
        if os.getpid() != self._pid:
            raise ForkedClientError(
                f"this {what} belongs to process {self._pid}, and process {os.getpid()} is a fork "
                f"of it, which has none of its threads and connections: {_IN_THE_CHILD}",
                facts={"pid": self._pid, "child_pid": os.getpid()},
            )


def refuse_to_travel(
    what: str, way: str = f"hand on the server's address, and {_IN_THE_CHILD}"
) -> tuple[Callable[[str, int], NoReturn], tuple[str, int]]:
    """Refuse to be copied or pickled; for ``__reduce__``, which returns what this does.

    On the thread that feeds a queue of ``multiprocessing`` an error is only printed, and who
    reads the queue, such as a ``DataLoader``, waits for ever. There the refusal itself is what
    travels, and it is raised where it arrives.

    Raises:
        RequestInvalidError: naming ``what`` and the ``way`` out.
    """
    text = (
        f"{what} cannot be pickled or copied, since connections and leased memory belong to one "
        f"process: {way}"
    )
    if threading.current_thread().name != _FEEDER:
        raise_refusal(text, os.getpid())
    return raise_refusal, (text, os.getpid())


def raise_refusal(text: str, pid: int) -> NoReturn:
    """Raise what ``refuse_to_travel`` says; ``pid`` is the process that it speaks of."""
    raise RequestInvalidError(text, facts={"pid": pid})


class Forkable(Protocol):
    """What must know of forks. Called on the thread that forks."""

    def before_fork(self, child: int) -> bool:
        """Stand still; hold for ``child`` (a number of our own) what it will read, if anything."""

    def after_fork(self) -> None:
        """Go on; called in the parent and in the child."""

    def child_ended(self, child: int) -> None:
        """Let go of what ``child`` held; called in the parent, on another thread."""


_watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
_numbers = itertools.count(1)
_one_fork = threading.Lock()
#: Of the fork under way: who was told, and the pipe if any of them holds something.
_told: list[Forkable] = []
_holders: list[tuple[int, list[Forkable]]] = []
_pipe: list[int] = []
#: In a child: descriptors and objects that live as long as it does.
_kept: list[object] = []


def watch(forkable: Forkable) -> None:
    """Tell an object of the forks of this process, for as long as it lives."""
    with _one_fork:  # a fork under way goes through them
        _watched.add(forkable)


def _before() -> None:
    _one_fork.acquire()
    _told[:] = _watched
    child = next(_numbers)
    held = [each for each in _told if each.before_fork(child)]
    if held:
        _pipe[:] = os.pipe()
        _holders[:] = [(child, held)]


def _in_parent() -> None:
    try:
        for each in _told:
            each.after_fork()
        if _pipe:
            os.close(_pipe[1])
            threading.Thread(
                target=_await_end,
                args=(_pipe[0], *_holders[0]),
                name="teacher-logits-fork",
                daemon=True,
            ).start()
    finally:  # no thread may be had: what the child reads is then held for good, and forks go on
        _forget()


def _in_child() -> None:
    if _pipe:
        os.close(_pipe[0])
        _kept.append(_pipe[1])
    _kept.extend(_told)
    for each in _told:
        each.after_fork()
    _forget()


def _forget() -> None:
    _told.clear()
    _pipe.clear()
    _holders.clear()
    _one_fork.release()


def _await_end(fd: int, child: int, holders: list[Forkable]) -> None:
    os.read(fd, 1)  # nobody writes: this returns at the end of the last process that could
    os.close(fd)
    for each in holders:
        each.child_ended(child)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
