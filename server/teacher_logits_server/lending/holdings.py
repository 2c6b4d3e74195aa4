"""Holdings: how much of a pool what was scored for each session takes, and who has had enough.

Pure. Extents count from when they are reserved until they are free, in quarantine as well.

    most of the pool       what one session may take while there are others (--max-session-share),
                           so that something is left for them; its first payload may be larger
    its share of the pool  what it may take while others wait for room: the budget by the number
                           of sessions that have some or wait for it

A session alone may take all of it. What a session has is never taken from it: who is above its
share gets nothing more until the others who wait are served, or it has returned some.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import PoolFullError
from teacher_logits.layout import round_up
from teacher_logits.pool import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import timedelta

    from teacher_logits.payload import Extent
    from teacher_logits.pool import Pool


@dataclass(frozen=True, kw_only=True)
class Held:
    """What each session has of one pool, at one moment: bytes by session.

    ``most_bytes`` is None where there is one session alone.
    """

    by_session: Mapping[str, int]
    budget_bytes: int
    most_bytes: int | None

    def above_share(self, waiting: Collection[str]) -> frozenset[str]:
        """Return the sessions that have more than their share while these wait for room.

        Never all of those that have some or wait, since shares add up to the budget.
        """
        count = len(self.by_session.keys() | set(waiting))
        return frozenset(
            session_id
            for session_id, size_bytes in self.by_session.items()
            if size_bytes * count > self.budget_bytes
        )

    def has_enough(self, session_id: str, size_bytes: int) -> bool:
        """Say whether a session cannot have so much more, however much is free."""
        has = self.by_session.get(session_id, 0)
        return self.most_bytes is not None and bool(has) and has + size_bytes > self.most_bytes


class Holdings:
    """What each session has of each pool.

    Args:
        share: of a pool, what one session may take while there are others.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._held: dict[str, Counter[str]] = {}
        self._holders: dict[tuple[str, int], tuple[str, str]] = {}

    def held(self, pool: Pool, *, is_shared: bool) -> Held:
        """Return what each session has of a pool; ``is_shared``: there are several sessions."""
        return Held(
            by_session={**self._held.get(pool.name, {})},
            budget_bytes=pool.budget_bytes,
            most_bytes=int(pool.budget_bytes * self._share) if is_shared else None,
        )

    def check(
        self, pool: Pool, session_id: str, size_bytes: int, *, retry_after: timedelta
    ) -> None:
        """Refuse what a session cannot have while there are others.

        Raises:
            PoolFullError: it has as much as one may.
        """
        held = self.held(pool, is_shared=True)
        need, has = round_up(size_bytes, PAGE_BYTES), held.by_session.get(session_id, 0)
        if held.most_bytes is None or not held.has_enough(session_id, need):
            return
        raise PoolFullError(
            f"{need} bytes are wanted, and this session has {has} of the {held.most_bytes} that "
            f"one may have of the {pool.name} while there are others: return its leases, or raise "
            "--max-session-share on the server",
            facts={
                "limit_name": "session_share",
                "need_bytes": need,
                "count": has,
                "limit": held.most_bytes,
                "flag": "--max-session-share",
            },
            retry_after=retry_after,
        )

    def take(self, pool: Pool, session_id: str, extent: Extent) -> None:
        """Count an extent that was reserved for a session."""
        self._holders[extent.slab_id, extent.slot] = pool.name, session_id
        counter = self._held.setdefault(pool.name, Counter())
        counter[session_id] += round_up(extent.size_bytes, PAGE_BYTES)

    def give_back(self, extent: Extent) -> None:
        """Count one no more; one that was reserved for no session is fine."""
        name, session_id = self._holders.pop((extent.slab_id, extent.slot), ("", ""))
        if not name:
            return
        counter = self._held[name]
        counter[session_id] -= round_up(extent.size_bytes, PAGE_BYTES)
        if not counter[session_id]:
            del counter[session_id]
