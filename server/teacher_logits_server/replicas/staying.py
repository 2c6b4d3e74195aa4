"""What stays on the nodes of one engine's replicas: how much may, and what was promised.

The dispatch table has the room; here are its lock and the nodes' stores, which are all of a
server's engines' together.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from teacher_logits_server.replicas.stored import StoredObject

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Sequence

    import ray

    from teacher_logits.clock import Clock
    from teacher_logits_server.engines.stored import NodeStores
    from teacher_logits_server.replicas.dispatch import Dispatch
    from teacher_logits_server.replicas.instructions import Instruction, Send
    from teacher_logits_server.replicas.packing import PackedPart


class Staying:
    """The part of a ``ReplicaEngine`` that is about rows which stay.

    Args:
        lock: the table's.
        do: has instructions obeyed; called under the lock.
    """

    def __init__(
        self,
        table: Dispatch,
        *,
        lock: threading.Lock,
        do: Callable[[list[Instruction]], None],
        clock: Clock,
    ) -> None:
        self._table = table
        self._lock = lock
        self._do = do
        self._clock = clock
        self._stores: NodeStores | None = None
        self._sharers = 1

    def use(self, stores: NodeStores, *, sharers: int) -> None:
        """Have rows stay in these stores, of whose budgets so many engines have a part each."""
        self._stores, self._sharers = stores, sharers

    def look(self, nodes: Collection[str]) -> None:
        """Look at the stores of the nodes that there are now. Waits for Ray."""
        if self._stores is None:
            return
        budgets = {
            node: budget // self._sharers for node, budget in self._stores.budgets(nodes).items()
        }
        with self._lock:
            self._do(self._table.opened(budgets, now=self._clock.now()))

    def suits(self, size_bytes: int) -> bool:
        """See ``engines.passes.Passes.may_stay``."""
        with self._lock:
            return self._stores is not None and self._table.rooms.suits(size_bytes)

    def promise(self, size_bytes: int) -> Callable[[], None]:
        """See ``engines.passes.Passes.promise_room``."""
        with self._lock:
            self._table.rooms.promise(size_bytes)
        return partial(self._leave, size_bytes)

    def used(self) -> dict[str, tuple[int, int]]:
        """Return of each node what is taken of its budget, and the budget."""
        with self._lock:
            rooms = self._table.rooms
            return {node: (rooms.used(node), rooms.budget(node)) for node in rooms.nodes}

    def rows(
        self,
        sent: Send,
        packed: Sequence[PackedPart],
        statuses: Sequence[bytes],
        references: Sequence[ray.ObjectRef[object]],
    ) -> tuple[StoredObject, ...]:
        """Return what came of a pass whose rows stay: their room goes with them."""
        sizes = [part.lay_out()[1] for part in packed]
        return tuple(
            StoredObject(
                reference,
                node_id=sent.node,
                status=status,
                free=partial(self._free, sent.node, size),
            )
            for reference, status, size in zip(references, statuses, sizes, strict=True)
        )

    def _leave(self, size_bytes: int) -> None:
        with self._lock:
            self._table.rooms.leave(size_bytes)

    def _free(self, node: str, size_bytes: int) -> None:
        with self._lock:
            self._do(self._table.freed(node, size_bytes, now=self._clock.now()))
