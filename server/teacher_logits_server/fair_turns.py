"""Fair turns: whose tokens run next, where several sessions wait for the same teacher.

Pure; start-time fair queueing (Goyal, Vin and Cheng, 1996) by tokens. Each session has an account
of the tokens that ran for it, and whoever has had least comes first:

    position of a request = its session's account + tokens of that session's that wait before it
    charge                  the account grows by the tokens that run
    join                    who had nothing waiting begins where those are who run now: what it
                            did not use is no credit, and what it has had is not forgotten

Promises: between sessions that have something waiting, tokens that ran differ by the largest
request at most, however many requests each has; within a session the order is that of arrival.
A session alone is served as it comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class FairTurns:
    """The accounts of the sessions that wait, or did and are ahead of the others."""

    def __init__(self) -> None:
        self._accounts: dict[str, int] = {}
        self._now = 0

    def join(self, session_id: str) -> None:
        """Learn that a session which had nothing waiting has something now."""
        self._accounts[session_id] = max(self._accounts.get(session_id, 0), self._now)

    def account(self, session_id: str) -> int:
        """Return a session's account; positions are counted from there."""
        return self._accounts.get(session_id, self._now)

    def charge(self, session_id: str, tokens: int, *, position: int) -> None:
        """Learn that tokens of a request at this position run now."""
        self._accounts[session_id] = self.account(session_id) + tokens
        self._now = max(self._now, position)

    def refund(self, session_id: str, tokens: int) -> None:
        """Learn that tokens which were charged wait again."""
        self._accounts[session_id] = self.account(session_id) - tokens

    def forget(self, waiting: Collection[str]) -> None:
        """Forget whoever has nothing waiting and is not ahead; all, where nobody waits."""
        if not waiting:
            self._accounts.clear()
            self._now = 0
            return
        self._accounts = {
            session_id: account
            for session_id, account in self._accounts.items()
            if account > self._now or session_id in waiting
        }
