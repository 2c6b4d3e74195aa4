"""Caps: how many of something one client, or all of them together, may have at a time.

Pure. Whoever has a cap asks it before one more is taken, with how many there are: it holds no
count. What it refuses with is ``LimitReachedError``, which names the cap, both numbers, and the
flag that raises it. docs/limits.md has the table of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from teacher_logits.errors import LimitReachedError

RETRY_AFTER = timedelta(seconds=1)
"""Hint to whoever was refused: about one training step."""


@dataclass(frozen=True, kw_only=True)
class Cap:
    """The most of something.

    Args:
        name: stable, in the facts of the error as ``limit_name``.
        most: how many there may be.
        flag: what raises it.
        what: what is counted, for messages: "scoring requests of one session".
        way_out: what the caller can do about it, besides.
    """

    name: str
    most: int
    flag: str
    what: str
    way_out: str

    def check(self, count: int) -> None:
        """Refuse one more than there may be, where ``count`` are there.

        Raises:
            LimitReachedError: there are as many as may be.
        """
        if count < self.most:
            return
        raise LimitReachedError(
            f"there are {count} {self.what}, and there may be {self.most}: {self.way_out}, or "
            f"raise {self.flag} on the server",
            facts={
                "limit_name": self.name,
                "count": count,
                "limit": self.most,
                "flag": self.flag,
            },
            retry_after=RETRY_AFTER,
        )
