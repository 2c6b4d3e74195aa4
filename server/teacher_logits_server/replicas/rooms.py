"""Room for payloads that stay in the object stores of the nodes where they are computed.

Pure. Every node has a budget. A payload's room is promised before anything of it is computed, when
nobody knows on which nodes; a pass takes room of the node that it is sent to, until its rows are
let go of.

Promises: what is promised is never more than all budgets together, nor what is taken of a node
more than its own. Refuses a payload that would not fit on every node: whatever becomes of the
others, each of its passes finds room somewhere once that is free.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.errors import PoolFullError

if TYPE_CHECKING:
    from collections.abc import Mapping

_RETRY_AFTER = timedelta(seconds=1)


class StoreRooms:
    """Who has taken what, by node."""

    def __init__(self) -> None:
        self._budgets: dict[str, int] = {}
        self._used: Counter[str] = Counter()
        self.promised_bytes = 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those that have a budget."""
        return tuple(self._budgets)

    @property
    def budget_bytes(self) -> int:
        """All budgets together."""
        return sum(self._budgets.values())

    def set_budgets(self, budgets: Mapping[str, int]) -> None:
        """Have these nodes and no others; what is taken elsewhere can still be given back."""
        self._budgets = dict(budgets)

    def budget(self, node: str) -> int:
        """Return a node's budget; 0 of one that has none."""
        return self._budgets.get(node, 0)

    def used(self, node: str) -> int:
        """Return what is taken of a node."""
        return self._used[node]

    def suits(self, size_bytes: int) -> bool:
        """Say whether a payload of so many bytes may stay on any node."""
        return bool(self._budgets) and size_bytes <= min(self._budgets.values())

    def promise(self, size_bytes: int) -> None:
        """Promise room for a payload, wherever it will lie.

        Raises:
            PoolFullError: so much is promised already that it may not find any.
        """
        free = self.budget_bytes - self.promised_bytes
        if size_bytes > free:
            raise PoolFullError(
                f"a payload of {size_bytes} bytes is to stay in the object stores of the replicas' "
                f"nodes, whose budgets are {self.budget_bytes} bytes together, {free} of them "
                "free: give leases back, or raise --ray-budget on the server",
                facts={
                    "need_bytes": size_bytes,
                    "free_bytes": free,
                    "budget_bytes": self.budget_bytes,
                    "nodes": len(self._budgets),
                },
                retry_after=_RETRY_AFTER,
            )
        self.promised_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        """Give promised room back."""
        self.promised_bytes -= size_bytes

    def fits(self, node: str, size_bytes: int) -> bool:
        """Say whether a node has so much room now; for nothing every node has."""
        return not size_bytes or self._used[node] + size_bytes <= self.budget(node)

    def take(self, node: str, size_bytes: int) -> None:
        """Take room of a node that has it."""
        self._used[node] += size_bytes

    def give_back(self, node: str, size_bytes: int) -> None:
        """Give room of a node back."""
        self._used[node] -= size_bytes
        if not self._used[node]:
            del self._used[node]
