"""Strangers: connections that have not said hello, each with its time to give up.

Pure. One that says nothing is dropped when its time has come. One user's processes have
``MAX_OF_A_USER`` of them: for one more the oldest of theirs is dropped, since who is honest says
hello at once. So whoever only connects keeps nobody out, of its own user or of others.
"""

from __future__ import annotations

MAX_OF_A_USER = 256


class Strangers:
    """By descriptor, oldest first.

    Args:
        seconds: after which one that says nothing is given up.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: User and time to give up.
        self._there: dict[int, tuple[int, float]] = {}

    def come(self, fd: int, *, uid: int, now: float) -> int | None:
        """Take one in; return the one that has to go for it, forgotten here."""
        own = [each for each, (user, _) in self._there.items() if user == uid]
        oldest = own[0] if len(own) >= MAX_OF_A_USER else None
        if oldest is not None:
            self.forget(oldest)
        self._there[fd] = uid, now + self._seconds
        return oldest

    def forget(self, fd: int) -> None:
        """Forget one that said hello, or is gone; one not known is fine."""
        self._there.pop(fd, None)

    @property
    def next_time(self) -> float | None:
        """When the oldest is given up; None where there is none."""
        return next((give_up for _, give_up in self._there.values()), None)

    def late(self, now: float) -> list[int]:
        """Return those whose time has come."""
        return [fd for fd, (_, give_up) in self._there.items() if give_up <= now]
