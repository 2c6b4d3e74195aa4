"""Asking: looks at a server on a thread of its own, again and again, whatever comes of each.

A server that does not answer is asked again. What asking again cannot mend (somebody who is not
allowed, an address of something else, a fault of this program) ends it, and is raised where the
answer is taken.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import ContractViolation, TeacherLogitsError
from teacher_logits_client import threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.views import ServerView


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of one look: a view, or the error in its place. ``at`` is monotonic."""

    at: float
    view: ServerView | None = None
    error: Exception | None = None

    @property
    def is_final(self) -> bool:
        """Whether it is an error that asking again cannot mend."""
        is_passing = isinstance(self.error, TeacherLogitsError) and not isinstance(
            self.error, ContractViolation
        )
        return self.error is not None and not is_passing


class Asking:
    """Asks until it is closed. A context manager.

    ``woken`` can be read from when there is something new, and ``waking`` be written to from
    elsewhere, a signal's handler too, so that it is.

    Args:
        ask: looks at the server once.
        interval: seconds from one look to the next.
    """

    def __init__(self, ask: Callable[[], ServerView], *, interval: float) -> None:
        self._ask = ask
        self._interval = interval
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._ended = threading.Event()
        self.woken, self.waking = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(self.waking, False)

    def __enter__(self) -> Asking:
        threads.start(self._run, name="top")
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended.set()
            os.close(self.woken)
            os.close(self.waking)

    def take(self) -> list[Answer]:
        """Return the answers since the last time, the oldest first; none waits."""
        try:
            os.read(self.woken, 1024)
        except BlockingIOError:
            pass
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def _wake(self) -> None:
        if self._ended.is_set():
            return
        try:
            os.write(self.waking, b".")
        except BlockingIOError:  # it is readable already
            pass

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            answer = self._look()
            with self._lock:
                self._answers.append(answer)
                self._wake()
            if answer.is_final:
                return
            self._ended.wait(max(0.0, began + self._interval - time.monotonic()))

    def _look(self) -> Answer:
        try:
            return Answer(view=self._ask(), at=time.monotonic())
        except Exception as error:
            return Answer(error=error, at=time.monotonic())
