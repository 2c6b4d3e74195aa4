"""Leaving: lines whose process is watched, for its end shows on its pidfd.

Those that hung up while it lived: a dying process closes its sockets a moment before its end
shows. So a line that hangs up is looked at once more: by the pidfd's word, or when the grace is
over. Where room went into quarantine with it, its process is watched on, for as long as that
lives. And those that have not ended: a child may hold the line of a process that is no more.
"""

from __future__ import annotations

import math
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits_server.broker.lines import Line

EXITING_GRACE_SECONDS = 60.0
UNKNOWN_GRACE_SECONDS = 2.0


class Leaving:
    """Lines, by the pidfd that the selector watches."""

    def __init__(self, poll: select.epoll) -> None:
        self._poll = poll
        self._lines: dict[int, tuple[Line, float]] = {}

    def __contains__(self, pidfd: int) -> bool:
        return pidfd in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def next_time(self) -> float | None:
        """When the first grace is over; None where none will be."""
        first = min((give_up for _, give_up in self._lines.values()), default=math.inf)
        return None if first == math.inf else first

    def add(self, line: Line, *, is_exiting: bool | None, now: float) -> None:
        """Watch the process of a line."""
        grace = EXITING_GRACE_SECONDS if is_exiting else UNKNOWN_GRACE_SECONDS
        self._lines[line.peer.pidfd] = (line, now + grace)
        self._poll.register(line.peer.pidfd, select.EPOLLIN)

    def add_for_good(self, line: Line) -> None:
        """Watch the process of a line for as long as it lives, where one is known."""
        if not line.peer.is_proven:
            return
        self._lines[line.peer.pidfd] = (line, math.inf)
        self._poll.register(line.peer.pidfd, select.EPOLLIN)

    def take(self, pidfd: int) -> Line:
        """Watch a process no more; return its line."""
        line, _ = self._lines.pop(pidfd)
        self._poll.unregister(pidfd)
        return line

    def discard(self, pidfd: int) -> None:
        """Watch a process no more, if it was."""
        if pidfd in self._lines:
            self.take(pidfd)

    def take_late(self, now: float) -> list[Line]:
        """Return the lines whose grace is over, and watch them no more."""
        late = [pidfd for pidfd, (_, give_up) in self._lines.items() if give_up <= now]
        return [self.take(pidfd) for pidfd in late]

    def close(self) -> None:
        """Forget all of them."""
        for line, _ in self._lines.values():
            line.peer.close()
        self._lines.clear()
