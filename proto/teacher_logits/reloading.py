"""Reloading: what files say, read anew when one of them changes, without a restart.

Promises: a change is seen at the next look, whether the file was written, replaced, or is a link
that leads elsewhere now; what was good stays until what is new is good; what is wrong with a
change is told once. What could not be read, as for want of descriptors, is read again at the next
look. Any thread may look, and be interrupted.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from teacher_logits.errors import TeacherLogitsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Stamp: TypeAlias = tuple[int, ...]

T = TypeVar("T")


class Reloading(Generic[T]):
    """What is made of some files.

    Args:
        read: makes it; raises an error of the tree where a file makes no sense.
        on_failure: told why a change was not taken; whoever looks gets what was good before.
        on_change: told what was made of a change; not of what was there at the start.
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[], T],
        *,
        on_failure: Callable[[TeacherLogitsError], None],
        on_change: Callable[[T], None] | None = None,
    ) -> None:
        """Read the files.

        Raises:
            TeacherLogitsError: what ``read`` raises.
        """
        self._paths = tuple(paths)
        self._read = read
        self._on_failure = on_failure
        self._on_change = on_change
        self._lock = threading.Lock()
        # Looked at before it is read: a change in between shows at the next look.
        self._stamps = self._look()
        self._made = read()
        #: What was told last: of which stamps, and why they were not taken.
        self._told: tuple[tuple[Stamp, ...], str] = ((), "")

    def current(self) -> T:
        """Return what the files say now, or said when they last made sense."""
        stamps = self._look()
        if stamps == self._stamps:
            return self._made
        with self._lock:
            if stamps != self._stamps:
                self._take(stamps)
            return self._made

    def _take(self, stamps: tuple[Stamp, ...]) -> None:
        try:
            made = self._read()
        except TeacherLogitsError as error:
            why = stamps, error.message
            is_told, self._told = why == self._told, why
            if not isinstance(error.__cause__, OSError):
                self._stamps = stamps
            if not is_told:
                self._on_failure(error)
            return
        self._made, self._stamps = made, stamps
        if self._on_change is not None:
            self._on_change(made)

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: str) -> Stamp:
    """Return what changes with a file; nothing where it is gone."""
    try:
        it = os.stat(path)
    except OSError:
        return ()
    return (it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns)
