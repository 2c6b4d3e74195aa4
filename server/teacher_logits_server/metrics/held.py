"""Held: what a server's tables hold, read off them at a scrape and kept nowhere else.

A scrape takes the ledger's lock once, as ``inspect`` does, and what is not there yet, while the
teacher loads, is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from teacher_logits import __version__
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits_server.metrics import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import Metric as Family

    from teacher_logits.pool import PoolUsage
    from teacher_logits.views import ObjectStoreView, QueueView, ReplicaView, SessionView
    from teacher_logits_server.views import LedgerView


K = TypeVar("K", bound="tuple[str, ...]")


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What is read. ``queues`` are by the ids of the server's own teachers."""

    epoch: str
    view: Callable[[], LedgerView]
    queues: Callable[[], Mapping[str, QueueView]]
    replicas: Callable[[], Iterable[ReplicaView]]
    objects: Callable[[], ObjectStoreView | None]
    line_calls: Callable[[], Mapping[str, int]]
    line_count: Callable[[], int]


class Held(Collector):
    """Reads the tables of one server, from ``watch`` on; before, whether it serves alone."""

    def __init__(self, *, is_serving: Callable[[], bool]) -> None:
        self._is_serving = is_serving
        self._tables: Tables | None = None

    def watch(self, tables: Tables) -> None:
        """Read these from now on."""
        self._tables = tables

    def describe(self) -> Iterable[Family]:
        """Return nothing: what is collected is not looked at when it is registered."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield all families, as of now."""
        yield one(names.SERVING, float(self._is_serving()))
        tables = self._tables
        if tables is None:
            return
        yield family(names.BUILD_INFO, {(__version__, str(PROTOCOL_VERSION), tables.epoch): 1})
        held, queues = tables.view(), tables.queues()
        yield from _who(held, own=len(queues))
        yield from _payloads(held)
        yield one(names.LINES, tables.line_count())
        calls = {(call,): count for call, count in tables.line_calls().items()}
        yield family(names.LINE_CALLS, calls)
        yield from _queues(queues)
        yield from _replicas(tuple(tables.replicas()))
        store = tables.objects()
        if store is not None:
            yield from _objects(store)


def _who(held: LedgerView, *, own: int) -> Iterator[Family]:
    counts = Counter((each.kind, transport_of(each), each.state) for each in held.sessions)
    yield family(names.SESSIONS, counts)
    yield one(names.DRAINING, float(held.draining))
    yield family(names.TEACHERS, {("own",): own, ("published",): len(held.teachers) - own})
    stages = dict.fromkeys(("open", "complete", "lost", "deserted"), 0)
    stages.update(Counter(step.stage for step in held.steps))
    yield family(names.STEPS, {(stage,): count for stage, count in stages.items()})
    yield one(names.AWAITED_READERS, sum(step.waiting_ranks for step in held.steps))


def _payloads(held: LedgerView) -> Iterator[Family]:
    leases, leased = {("held",): 0, ("quarantined",): 0}, {("held",): 0, ("quarantined",): 0}
    for lease in held.leases:
        state = "quarantined" if lease.quarantined else "held"
        leases[state,] += 1
        leased[state,] += lease.size_bytes
    yield family(names.LEASES, leases)
    yield family(names.LEASED_BYTES, leased)
    granted = {transport.value: tally for transport, tally in held.granted.items()}
    yield family(names.GRANTED, {(name,): each.leases for name, each in granted.items()})
    yield family(names.GRANTED_BYTES, {(name,): each.size_bytes for name, each in granted.items()})
    pools = {"host": (held.pool, held.reserved_bytes)}
    if held.device_pool is not None:
        pools["device"] = (held.device_pool, held.device_reserved_bytes)
    states = {(n, s): v for n, pool in pools.items() for s, v in _room(*pool).items()}
    yield family(names.POOL_BYTES, states)
    yield family(names.POOL_SLABS, {(n,): pool.slab_count for n, (pool, _) in pools.items()})
    registered = held.registered
    yield one(names.REGISTERED, registered.payload_count)
    yield one(names.REGISTERED_BYTES, registered.payload_bytes)
    taken = registered.used_bytes + registered.quarantined_bytes
    slabs = {
        ("free",): registered.committed_bytes - taken,
        ("used",): registered.used_bytes,
        ("quarantined",): registered.quarantined_bytes,
    }
    yield family(names.PUBLISHER_BYTES, slabs)
    yield one(names.PUBLISHER_SLABS, registered.slab_count)


def _room(usage: PoolUsage, reserved_bytes: int) -> dict[str, float]:
    return {
        "free": usage.free_bytes,
        "used": usage.used_bytes - reserved_bytes,
        "reserved": reserved_bytes,
        "quarantined": usage.quarantined_bytes,
    }


def _queues(queues: Mapping[str, QueueView]) -> Iterator[Family]:
    requests: dict[tuple[str, ...], float] = {}
    for teacher, queue in queues.items():
        requests[teacher, "waiting"] = queue.waiting_requests
        requests[teacher, "running"] = queue.running_requests
    yield family(names.QUEUE_REQUESTS, requests)
    yield family(names.QUEUE_TOKENS, {(t,): q.waiting_tokens for t, q in queues.items()})
    yield family(names.SCORED_REQUESTS, {(t,): q.scored_requests for t, q in queues.items()})
    yield family(names.SCORED_TOKENS, {(t,): q.scored_tokens for t, q in queues.items()})


def _replicas(replicas: tuple[ReplicaView, ...]) -> Iterator[Family]:
    if not replicas:
        return
    yield family(names.REPLICAS, Counter((each.teacher_id, each.state) for each in replicas))
    passes: Counter[tuple[str, ...]] = Counter()
    restarts: Counter[tuple[str, ...]] = Counter()
    for each in replicas:
        passes[each.teacher_id,] += each.outstanding_passes
        restarts[each.teacher_id,] += each.restarts
    yield family(names.REPLICA_PASSES, passes)
    yield family(names.REPLICA_RESTARTS, restarts)


def _objects(store: ObjectStoreView) -> Iterator[Family]:
    yield one(names.OBJECT_JOINED, float(store.state == "joined"))
    yield one(names.OBJECTS, store.object_count)
    free = store.budget_bytes - store.used_bytes
    yield family(names.OBJECT_BYTES, {("free",): free, ("used",): store.used_bytes})
    yield one(names.OBJECT_WAITING, store.waiting_count)
    yield one(names.OBJECT_SPILLED, store.spilled_bytes)
    yield one(names.HOLDER_RESTARTS, store.holder_restarts)


def one(metric: names.Metric, value: float) -> Family:
    """Return a metric without labels."""
    return family(metric, {(): value})


def family(metric: names.Metric, samples: Mapping[K, float]) -> Family:
    """Return one metric with the samples that there are."""
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made = make(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples.items():
        made.add_metric(labels, value)
    return made


def transport_of(session: SessionView) -> str:
    """Return what a session's writers are read over: one transport, ``several`` or ``none``."""
    used = {each.transport.value for each in session.settlements if each.transport is not None}
    return used.pop() if len(used) == 1 else "several" if used else "none"
