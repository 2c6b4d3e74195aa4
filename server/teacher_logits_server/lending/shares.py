"""Shares: how much of the pool the payloads of one teacher may take.

Pure. Extents count from when they are reserved until they are free, in quarantine as well. A
teacher without a share may take what there is; where the shares of all teachers fit into the
pool together, none of them waits for another's readers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError, PoolFullError
from teacher_logits.layout import round_up
from teacher_logits.pool import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from teacher_logits.payload import Extent


class Shares:
    """Who has taken what.

    Args:
        most: bytes that each teacher may take, by its id.
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        self._most = dict(most)
        self._taken: Counter[str] = Counter()
        self._takers: dict[tuple[str, int], str] = {}

    def check_fits(self, teacher_id: str, size_bytes: int) -> None:
        """Refuse a payload that can never fit.

        Raises:
            PayloadInvalidError: it is larger than its teacher's share.
        """
        most, need = self._most.get(teacher_id), round_up(size_bytes, PAGE_BYTES)
        if most is None or need <= most:
            return
        raise PayloadInvalidError(
            f"the payload takes {need} bytes, and those of teacher {teacher_id!r} may take {most} "
            "together: send fewer rows a request, or raise its pool_size on the server",
            facts={"teacher_id": teacher_id, "need_bytes": need, "share_bytes": most},
        )

    def check(self, teacher_id: str, size_bytes: int, *, retry_after: timedelta) -> None:
        """Refuse what does not fit now.

        Raises:
            PoolFullError: the share is taken.
            PayloadInvalidError: see ``check_fits``.
        """
        self.check_fits(teacher_id, size_bytes)
        most, taken = self._most.get(teacher_id), self._taken[teacher_id]
        need = round_up(size_bytes, PAGE_BYTES)
        if most is None or taken + need <= most:
            return
        raise PoolFullError(
            f"{need} bytes are wanted, and payloads of teacher {teacher_id!r} have taken {taken} "
            f"of the {most} that are its share of the pool: return its leases, or raise its "
            "pool_size on the server",
            facts={
                "teacher_id": teacher_id,
                "need_bytes": need,
                "free_bytes": most - taken,
                "budget_bytes": most,
            },
            retry_after=retry_after,
        )

    def take(self, teacher_id: str, extent: Extent) -> None:
        """Count an extent that was reserved."""
        if teacher_id in self._most:
            self._takers[extent.slab_id, extent.slot] = teacher_id
            self._taken[teacher_id] += round_up(extent.size_bytes, PAGE_BYTES)

    def give_back(self, extent: Extent) -> None:
        """Count one no more; one that nobody's share counts is fine."""
        teacher_id = self._takers.pop((extent.slab_id, extent.slot), None)
        if teacher_id is not None:
            self._taken[teacher_id] -= round_up(extent.size_bytes, PAGE_BYTES)
