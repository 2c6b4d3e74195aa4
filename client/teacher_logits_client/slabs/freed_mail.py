"""Mail of a publisher's: the room that the server says is free, until somebody looks at it.

It is put here by whichever thread reads the line, which must wait for nothing; whoever holds
the publisher's table takes it, in its order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from teacher_logits.terms import RoomFreed

if TYPE_CHECKING:
    from teacher_logits.terms import Mail


class FreedMail:
    """What the server said of freed room and nobody has looked at yet; see ``Exchange``."""

    def __init__(self) -> None:
        self._mail: deque[RoomFreed] = deque()
        #: Another object after everything that may have made room.
        self.news = object()

    def put(self, mail: Mail) -> None:
        """Take mail from whichever thread reads the line; waits for nothing."""
        if isinstance(mail, RoomFreed):
            self._mail.append(mail)
            self.tell()

    def tell(self) -> None:
        """Have whoever waits for room look again."""
        self.news = object()

    @property
    def oldest(self) -> RoomFreed | None:
        """The oldest, until it is dropped; None where there is none."""
        return self._mail[0] if self._mail else None

    def drop_oldest(self) -> None:
        """Drop the oldest, which was acted on; where that was interrupted it is acted on again."""
        self._mail.popleft()
