"""What is said when there is no room because of what is in quarantine, and when to ask again."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.errors import PoolFullError

if TYPE_CHECKING:
    from teacher_logits.pool import Pool

RETRY_AFTER = timedelta(seconds=1)
"""Hint to whoever found the pool full: about one training step."""


def check_quarantine(pool: Pool, size_bytes: int, *, most: float) -> None:
    """Refuse a payload while more than the share ``most`` of a pool is in quarantine.

    Raises:
        PoolFullError: it is, with the numbers.
    """
    most_bytes = int(pool.budget_bytes * most)
    if pool.quarantined_bytes <= most_bytes:
        return
    usage = pool.usage()
    raise PoolFullError(
        f"{usage.quarantined_bytes} of the {pool.name}'s {usage.budget_bytes} bytes are in "
        f"quarantine, and new payloads are refused above {most_bytes} (--max-quarantine): "
        "processes that may still read them dropped their line; end them (`teacher-logits "
        "inspect` shows them), or take their room by force (--reclaim quarantined)",
        facts={
            "need_bytes": size_bytes,
            "free_bytes": usage.free_bytes,
            "quarantined_bytes": usage.quarantined_bytes,
            "budget_bytes": usage.budget_bytes,
        },
        retry_after=RETRY_AFTER,
    )
