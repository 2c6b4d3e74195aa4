"""The stores of the replicas' nodes: who hands out the payloads that lie there, and until when.

    replica --return value--> object in its node's store       (this process owns it)
    this process --keep([ref])--> holder of that node <--take(object, lease, token)-- reader

A node has one holder. One that dies is replaced when something is computed there next; what the
dead one had is not handed out any more, and is fetched by the server, whose references are its own.
Nothing here waits for Ray but ``fetch``.

Promises: a ticket is given once the holders have all that it is for; what a payload had is let go
of when it is dropped, in the cluster too. Refuses (``ProducerLostError``) what was lost with its
node.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, ProducerLostError
from teacher_logits.terms import ObjectTicket, PartTicket, StoredTicket
from teacher_logits.views import NodeStoreView
from teacher_logits_server.exporters.ray_holder import token_of
from teacher_logits_server.exporters.ray_store import SPILLS_ABOVE
from teacher_logits_server.replicas.holders import Holders

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from concurrent.futures import Future

    from teacher_logits.errors import Fact
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines.passes import PassEngine
    from teacher_logits_server.engines.stored import StoredAnswer, StoredPart
    from teacher_logits_server.replicas.holders import Holding
    from teacher_logits_server.replicas.stored import StoredObject

DEFAULT_SHARE = 0.3
"""Part of a node's store that is its budget where none is given. With what the server itself puts
into the store of its own node, by default half, that comes to what Ray spills above."""


@dataclass(kw_only=True, eq=False)
class _Object:
    """Some rows of a payload, and who hands them out: once it has said so, and while it lives."""

    object_id: str
    part: StoredPart
    reference: ray.ObjectRef[object]
    holder: Holding
    is_kept: bool = False


@dataclass(kw_only=True, eq=False)
class _Payload:
    answer: StoredAnswer
    objects: list[_Object] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)


class Stores:
    """What stays on the nodes of one server's replicas.

    Args:
        namespace, epoch: of the holders' names.
        budget_bytes: of each node; 0 for a part of its store.
    """

    def __init__(self, *, namespace: str, epoch: str, budget_bytes: int) -> None:
        self._epoch = epoch
        self._budget_bytes = budget_bytes
        self._key = os.urandom(32)
        self._made = count(1)
        self._payloads: dict[str, _Payload] = {}
        self._of_leases: dict[str, str] = {}
        self._holders = Holders(
            namespace=namespace, epoch=epoch, key=self._key, on_gone=lambda: self._tell()
        )
        self._tell: Callable[[], None] = lambda: None
        self._engines: tuple[PassEngine, ...] = ()
        self._lock = threading.Lock()

    def use(self, engines: Collection[PassEngine]) -> None:
        """Have what these engines compute stay; once. Waits for Ray."""
        self._engines = tuple(engines)
        for each in engines:
            each.use_stores(self, sharers=len(engines))

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when a ticket may have come; it should only wake."""
        self._tell = callback

    def budgets(self, nodes: Collection[str]) -> dict[str, int]:
        """Return the budget of each node, and have holders there; one that is gone has none."""
        found = {}
        for node in ray.nodes():
            if node["NodeID"] not in nodes or not node["Alive"]:
                continue
            store = int(node["Resources"].get("object_store_memory", 0))
            most = self._budget_bytes or int(store * DEFAULT_SHARE)
            found[node["NodeID"]] = min(most, int(store * SPILLS_ABOVE))
        for node_id in found:
            self._holders.of(node_id)
        return found

    # Payloads

    def put(self, payload_id: str, answer: StoredAnswer) -> None:
        """Hand a payload out from now on; it is this one's until it is dropped."""
        made = _Payload(answer=answer)
        for part in answer.parts:
            stored = cast("StoredObject", part.stored)
            made.objects.append(
                _Object(
                    object_id=f"r-{self._epoch}-{next(self._made)}",
                    part=part,
                    reference=stored.reference,
                    holder=self._holders.of(stored.node_id),
                )
            )
        with self._lock:
            self._payloads[payload_id] = made
        for each in made.objects:
            asked = each.holder.actor.keep.remote(each.object_id, [each.reference], [])
            asked.future().add_done_callback(partial(self._on_kept, each))

    def ticket(self, payload_id: str, lease_id: str) -> StoredTicket | None:
        """Return what a lease's reader shows the holders; None while they have not all of it."""
        with self._lock:
            found = self._payloads[payload_id]
            if not all(each.is_kept for each in found.objects):
                return None
            self._of_leases[lease_id] = payload_id
            found.leases.add(lease_id)
            return StoredTicket(
                parts=tuple(
                    PartTicket(
                        ticket=ObjectTicket(
                            holder=each.holder.terms,
                            object_id=each.object_id,
                            token=token_of(self._key, each.object_id, lease_id),
                        ),
                        rows=each.part.rows,
                        positions=each.part.positions,
                    )
                    for each in found.objects
                )
            )

    def is_handed_out(self, payload_id: str) -> bool:
        """Whether all holders of a payload live."""
        with self._lock:
            return not any(each.holder.is_gone for each in self._payloads[payload_id].objects)

    def revoke(self, lease_ids: Iterable[str]) -> None:
        """Hand nothing out for leases that have ended."""
        due: list[tuple[_Object, str]] = []
        with self._lock:
            for lease_id in lease_ids:
                found = self._payloads.get(self._of_leases.pop(lease_id, ""))
                if found is not None:
                    found.leases.discard(lease_id)
                    due += [(each, lease_id) for each in found.objects]
        for each, lease_id in due:
            each.holder.actor.revoke.remote(each.object_id, lease_id)

    def drop(self, payload_ids: Iterable[str]) -> None:
        """Let go of payloads, and of the room that they take; what is gone is fine."""
        with self._lock:
            found = [self._payloads.pop(each) for each in payload_ids if each in self._payloads]
            for lease_id in [lease for payload in found for lease in payload.leases]:
                self._of_leases.pop(lease_id, None)
        for payload in found:
            for each in payload.objects:
                each.holder.actor.drop.remote(each.object_id)
            payload.objects.clear()
            payload.answer.drop()

    def fetch(self, payload_id: str, *, seconds: float) -> list[tuple[StoredPart, memoryview]]:
        """Return a payload's parts with their bytes, brought to this node.

        Raises:
            ProducerLostError: some of it is lost with its node.
            DeadlinePassedError: it did not come in time.
        """
        with self._lock:
            objects = list(self._payloads[payload_id].objects)
        facts: dict[str, Fact] = {
            "payload_id": payload_id,
            "nodes": len({o.holder.terms.node_id for o in objects}),
        }
        try:
            found = ray.get([each.reference for each in objects], timeout=max(0.0, seconds))
        except GetTimeoutError:
            raise DeadlinePassedError(
                f"payload {payload_id} did not come from the object stores that it lies in within "
                f"{span_text(seconds)}",
                facts={**facts, "waited_seconds": seconds},
            ) from None
        except RayError as error:
            said = (str(error).splitlines() or [""])[0][:300]
            raise ProducerLostError(
                f"payload {payload_id} lay where replicas had computed it, and is lost with a node "
                f"of theirs ({type(error).__name__}: {said}): score the rows again",
                facts={**facts, "error": type(error).__name__},
            ) from error.with_traceback(None)  # its frames, in a cycle with it, keep the others
        arrays = [memoryview(cast("bytes", each)) for each in found]
        return [(each.part, data) for each, data in zip(objects, arrays, strict=True)]

    def view(self) -> tuple[NodeStoreView, ...]:
        """Describe the nodes that have replicas, at this instant."""
        used: Counter[str] = Counter()
        budgets: Counter[str] = Counter()
        for engine in self._engines:
            for node, (taken, budget) in engine.store_use().items():
                used[node] += taken
                budgets[node] += budget
        found = {node: self._holders.known(node) for node in budgets}
        holders = {node: each for node, each in found.items() if each is not None}
        with self._lock:
            objects = [each for payload in self._payloads.values() for each in payload.objects]
            counts = Counter(each.holder.terms.node_id for each in objects)
            return tuple(
                NodeStoreView(
                    node_id=node,
                    budget_bytes=budget,
                    used_bytes=used[node],
                    object_count=counts[node],
                    holder=holders[node].terms.name,
                    holder_restarts=holders[node].restarts,
                )
                for node, budget in budgets.items()
                if node in holders
            )

    def close(self) -> None:
        """Hand out nothing more; the holders end with this process's connection, or before."""
        self.drop(list(self._payloads))
        self._holders.close()

    # Within

    def _on_kept(self, kept: _Object, future: Future[object]) -> None:
        if future.exception() is None:
            kept.is_kept = True
        else:
            kept.holder.is_gone = True
        self._tell()


def make_stores(config: ServerConfig, *, epoch: str, engines: Collection[PassEngine]) -> Stores:
    """Return the stores of one server's engines, each of which has what it computes stay there."""
    stores = Stores(
        namespace=config.ray_namespace, epoch=epoch, budget_bytes=config.ray_budget_bytes
    )
    stores.use(engines)
    return stores
