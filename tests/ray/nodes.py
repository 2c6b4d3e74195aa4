"""A second node of a cluster, whose workers do not see a folder of the first one's."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ray.cluster_utils import Cluster

PATIENCE_SECONDS = 120.0
#: Runs what comes behind it where an empty folder lies over the one that is named first.
HIDING = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')


STORE_BYTES = 300_000_000


@contextmanager
def one_node(**settings: object) -> Iterator[Cluster]:
    """A cluster of one node, to which this process is connected.

    Args:
        settings: of Ray itself, for all nodes.
    """
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "node_ip_address": "127.0.0.1",
            "_system_config": settings,
        },
    )
    try:
        ray.init(made.address, namespace="tests", logging_level=logging.ERROR, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@dataclass
class Node:
    """A node that can be killed, with all that runs there."""

    node_id: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it; twice is fine."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def second_node(cluster: Cluster, hides: Path | str) -> Iterator[Node]:
    """Start it, and end it behind the block."""
    known = {node["NodeID"] for node in ray.nodes()}
    process = subprocess.Popen(
        [
            *(*HIDING, str(hides), sys.executable, "-m", "ray.scripts.scripts", "start"),
            *("--block", f"--address={cluster.address}", "--node-ip-address=127.0.0.1"),
            *("--num-cpus=2", "--object-store-memory=100000000"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    node = Node("", process)
    try:
        node.node_id = _joined(known)
        yield node
    finally:
        node.kill()


def _joined(known: set[str]) -> str:
    """Wait for a node that was not there before."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if new := {node["NodeID"] for node in ray.nodes() if node["Alive"]} - known:
            return str(new.pop())
        threading.Event().wait(0.05)
    raise AssertionError("no second node came")
