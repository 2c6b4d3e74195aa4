"""The object store of this process's node, as Ray shows it, and the making of a holder there."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol, cast

import ray
from ray._private.internal_api import node_stats
from ray._private.state import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from teacher_logits_server.exporters.ray_holder import Holder

SPILLS_ABOVE = 0.8
"""Part of the store above which Ray spills (``RAY_object_spilling_threshold``, where untouched)."""
_SMALL_BYTES = 1 << 20
"""Objects up to this size are let in by a look that is not quite new."""
_LOOK_LASTS_SECONDS = 0.25
_ROOM_POLL_SECONDS = 0.05
_RAYLET_SECONDS = 0.5
_HEAD_LAGS_SECONDS = 1.0
_MOST_PUTS = 4096
HOLDER_CALLS = 17
"""Calls that a holder answers at a time; one of them may be ``stay``."""


@dataclass(frozen=True, kw_only=True)
class StoreUse:
    """Bytes in the store, and bytes that were spilled since its start; whoever put them there."""

    used_bytes: int
    spilled_bytes: int


class Method(Protocol):
    """A method of an actor, as its callers have it."""

    def remote(self, *given: object) -> ray.ObjectRef[object]:
        """Call it; return the reference of what it will answer."""


class HolderActor(Protocol):
    """A ``Holder`` as its callers have it."""

    challenge: Method
    keep: Method
    revoke: Method
    drop: Method
    stay: Method


class _Stats(Protocol):
    """What a raylet says of its store."""

    object_store_bytes_used: int
    spilled_bytes_total: int


class StoreUnknown(Exception):
    """The node does not say what is in its store."""


class Store:
    """The store of the node on which this driver lives.

    Its raylet says what is in it, once every process of Ray's on that node has told it what it has:
    one that is stopped keeps all who ask waiting. So it is waited for briefly, and then the head is
    asked, which hears of each node some ten times a second: what was put here meanwhile is added.
    """

    def __init__(self) -> None:
        """Find it.

        Raises:
            ValueError: the cluster has no such node.
        """
        self.node_id = str(ray.get_runtime_context().get_node_id())
        node = next((each for each in ray.nodes() if each["NodeID"] == self.node_id), None)
        if node is None:
            raise ValueError(f"the cluster has no node {self.node_id}")
        self._place = (node["NodeManagerAddress"], node["NodeManagerPort"])
        self.capacity_bytes = int(node["Resources"].get("object_store_memory", 0))
        self.most_bytes = int(self.capacity_bytes * SPILLS_ABOVE)
        #: When the store was looked at last, what was in it, and what was put there since.
        self._seen = (0.0, 0, 0)
        self._spilled_bytes = 0
        self._late: threading.Thread | None = None
        self._put: deque[tuple[float, int]] = deque(maxlen=_MOST_PUTS)

    def look(self) -> StoreUse:
        """Ask the node's raylet, which takes it some milliseconds; or the head.

        Raises:
            StoreUnknown: neither says so.
        """
        asked_at = time.monotonic()
        used = self._ask_raylet()
        if used is None:
            since = time.monotonic() - _HEAD_LAGS_SECONDS
            used = self._ask_head() + sum(size for at, size in list(self._put) if at >= since)
        self._seen = (asked_at, used, 0)
        return StoreUse(used_bytes=used, spilled_bytes=self._spilled_bytes)

    def _ask_raylet(self) -> int | None:
        """Return the bytes in the store; None while some process keeps the raylet waiting."""
        if self._late is not None and self._late.is_alive():
            return None
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(node_stats(*self._place, include_memory_info=False).store_stats)
            except Exception as error:  # of gRPC, which is Ray's own affair
                answers.put(error)

        thread = threading.Thread(target=ask, name="teacher-logits-raylet", daemon=True)
        thread.start()
        try:
            found = answers.get(timeout=_RAYLET_SECONDS)
        except queue.Empty:
            self._late = thread
            return None
        if isinstance(found, Exception):
            raise StoreUnknown(f"the raylet of node {self.node_id} does not answer") from found
        stats = cast("_Stats", found)
        self._spilled_bytes = int(stats.spilled_bytes_total)
        return int(stats.object_store_bytes_used)

    def _ask_head(self) -> int:
        """Return the bytes of the objects in the store that were made on this node."""
        try:
            free = state.available_resources_per_node()[self.node_id]
        except Exception as error:  # of Ray's, or a node that is dead to the head
            raise StoreUnknown(f"the head knows no store of node {self.node_id}") from error
        return self.capacity_bytes - int(free.get("object_store_memory", 0))

    def lacks(self, size_bytes: int) -> int | None:
        """Return what is in the store where so many bytes more would have it spill; else None.

        Raises:
            StoreUnknown: as for ``look``.
        """
        seen_at, used, since = self._seen
        is_fresh = time.monotonic() - seen_at < _LOOK_LASTS_SECONDS
        is_small = size_bytes <= _SMALL_BYTES
        if is_small and is_fresh and used + since + size_bytes <= self.most_bytes:
            return None
        used = self.look().used_bytes
        return used if used + size_bytes > self.most_bytes else None

    def await_room(self, size_bytes: int, *, seconds: float) -> int | None:
        """Wait until so many bytes more do not have it spill; as ``lacks`` where that takes longer.

        The threshold is for all that is in the store, whoever put it there.
        """
        until = time.monotonic() + seconds
        while (used := self.lacks(size_bytes)) is not None and time.monotonic() < until:
            time.sleep(_ROOM_POLL_SECONDS)
        return used

    def note_put(self, size_bytes: int) -> None:
        """Count what was put since the last look."""
        self._put.append((time.monotonic(), size_bytes))
        seen_at, used, since = self._seen
        self._seen = (seen_at, used, since + size_bytes)


def make_holder(
    name: str, *, namespace: str, node_id: str, arguments: tuple[bytes, bytes]
) -> HolderActor:
    """Start a holder on a node. It is not detached: it ends with the driver that made it."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    made = (
        ray.remote(Holder)
        .options(
            name=name,
            namespace=namespace,
            num_cpus=0,
            max_concurrency=HOLDER_CALLS,
            max_restarts=0,
            scheduling_strategy=there,
        )
        .remote(*arguments)
    )
    return cast("HolderActor", made)
