"""The cast over a Ray cluster: students are drivers of it, the server computes by replicas there.

What is not a role is a process of the server's in the cluster: its replicas, the holders of its
objects, and its Ray process. They are found, harmed by pid, and come back by themselves.
"""

import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray._private.internal_api import node_stats
from ray._private.state import state
from tests.processes.faults.cast import Cast, Role, forked
from tests.processes.faults.oracle import NOTHING, Oracle, Owed
from tests.processes.faults.workers import PATIENCE_SECONDS
from tests.ray.faults.scenarios import OF_REPLICAS, OF_SERVER, RAY_PROCESS
from tests.stopping import await_stopped

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

REPLICAS = 2
INLINE_BYTES = 4096
"""What is larger, as all of these payloads are, lies in a store."""
_NOTHING_BYTES = 4096
"""What Ray itself has in a store."""


class Helper:
    """A process of the server's in the cluster, by its pid."""

    def __init__(self, kind: str, pid: int) -> None:
        self.kind, self.pid = kind, pid
        self._pidfd = os.pidfd_open(pid)

    def __repr__(self) -> str:
        return f"{self.kind} {self.pid}"

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return not select.select([self._pidfd], [], [], 0)[0]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stop is waited for, and an end."""
        signal.pidfd_send_signal(self._pidfd, number)
        if number is signal.SIGSTOP:
            await_stopped(self.pid)
        elif number is signal.SIGKILL:
            ended, _, _ = select.select([self._pidfd], [], [], PATIENCE_SECONDS)
            assert ended, f"{self} lives on"

    def close(self) -> None:
        """Have no more to do with it."""
        os.close(self._pidfd)


class RayCast(Cast):
    """A server that has joined a cluster, and those who use it."""

    def __init__(self, folder: Path, cluster: "Cluster") -> None:
        settings = {
            "engine": "ray",
            "replica-engine": "tests.transport_suite.dense_teacher:make",
            "replicas": str(REPLICAS),
            "replica-cpus": "0.5",
            "ray-address": cluster.address,
            "ray-budget": "4MiB",
            "session-ttl": "3s",
        }
        super().__init__(folder, **settings)
        self._ray_address = cluster.address

    def make(self, name: str, kind: str) -> Role:
        """Return a new role; students are drivers of the cluster."""
        joins = [self._ray_address] if kind == "student" else []
        return forked(kind, self.place.logs / name, joins)

    def helper(self, kind: str) -> Helper:
        """Return the process of the server's that is called so in ``scenarios``."""
        if kind == "replica":
            return Helper(kind, self.inspect().replicas[0].pid)
        if kind == RAY_PROCESS:
            return Helper(kind, self._ray_process())
        store = self.inspect().object_store
        assert store is not None
        name = {OF_REPLICAS: store.nodes[0].holder, OF_SERVER: store.holder}[kind]
        [actor] = [each for each in state.actor_table(None).values() if each["Name"] == name]
        return Helper(kind, actor["Pid"])

    def _ray_process(self) -> int:
        children = Path(f"/proc/{self.server.pid}/task").glob("*/children")
        pids = [int(pid) for each in children for pid in each.read_text().split()]
        [found] = [p for p in pids if b"ray_process" in Path(f"/proc/{p}/cmdline").read_bytes()]
        return found

    def is_whole(self) -> bool:
        """Whether everything of the server's in the cluster is there, and answers."""
        view = self.inspect()
        store = view.object_store
        return (
            all(each.state == "ready" for each in view.replicas)
            and store is not None
            and store.state == "joined"
        )


class RayOracle(Oracle):
    """Holds the cluster's stores against nothing too.

    Ray's own connections come and go as it likes, with threads that are none of Python's.
    """

    uncounted = frozenset({"socket", "anon_inode", "pipe"})

    def server_wrong(self, owed: Owed = NOTHING) -> list[str]:
        """Say in what the server, and the store of each node, differ from what is owed."""
        wrong = super().server_wrong(owed)
        store = self._cast.inspect().object_store
        assert store is not None
        counts = {
            "objects": store.object_count,
            "bytes of objects": store.used_bytes,
            "leases that wait for a store": store.waiting_count,
            "spilled bytes": store.spilled_bytes,
        }
        for node in store.nodes:
            counts[f"objects on node {node.node_id}"] = node.object_count
            counts[f"bytes on node {node.node_id}"] = node.used_bytes
        wrong += [f"server: {now} {what}" for what, now in counts.items() if now]
        return wrong + [f"store: {each}" for each in map(_left_in, ray.nodes()) if each]


def _left_in(node: dict[str, object]) -> str:
    """Say what a node's raylet has in its store, by its own word."""
    if not node["Alive"]:
        return ""
    place = node["NodeManagerAddress"], node["NodeManagerPort"]
    stats = node_stats(*place, include_memory_info=False).store_stats
    used, spilled = int(stats.object_store_bytes_used), int(stats.spilled_bytes_total)
    return f"{used} bytes, {spilled} spilled" if used > _NOTHING_BYTES or spilled else ""
