"""The stage itself: what runs here is alone with loopback, and has a Ray."""

import socket
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


def test_there_is_nothing_but_loopback() -> None:
    assert [name for _, name in socket.if_nameindex()] == ["lo"]


def test_a_cluster_answers(cluster: "Cluster") -> None:
    @ray.remote(num_cpus=1)
    def twice(x: int) -> int:
        return 2 * x

    assert ray.get(twice.remote(21), timeout=60) == 42
