"""Two nodes of a cluster, and a process of none: all learn the same, each over the transport that
the rule says.

The second node sees no sockets of the first, nor does the stranger: each has a mount namespace of
its own, in which an empty folder lies over the server's.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.client.publishing.a_publisher import ROWS, a_teacher, flat, some_rows
from tests.ray.learning import PATIENCE_SECONDS, STEPS, Learned, Learning
from tests.ray.nodes import HIDING, second_node

import teacher_logits_client as tl
from teacher_logits_client import testing
from teacher_logits_client.testing import ServerProcess

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def server(cluster: "Cluster", tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with testing.serve(
        listen=["127.0.0.1:0"],
        insecure=True,
        broker=tmp_path_factory.mktemp("sockets") / "broker",
        ray_address=cluster.address,
    ) as server:
        yield server


def folder_of(server: ServerProcess) -> str:
    """Where its sockets are."""
    return str(Path(str(server.readiness["broker"])).parent)


@pytest.fixture(scope="module")
def elsewhere(cluster: "Cluster", server: ServerProcess) -> Iterator[str]:
    """The id of a node whose workers do not see the server's folder."""
    with second_node(cluster, folder_of(server)) as node:
        yield node.node_id


def student_on(node: str, address: str) -> "ActorHandle[Learning]":
    """A student in a worker of a node, admitted soon; its id is the node's."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    made = ray.remote(Learning).options(num_cpus=1, scheduling_strategy=there)
    student = made.remote(address, teacher_id="theirs", student_id=node)
    return cast("ActorHandle[Learning]", student)


def test_all_learn_the_same_each_over_its_own_transport(
    server: ServerProcess, elsewhere: str
) -> None:
    here = ray.get_runtime_context().get_node_id()
    stranger = subprocess.Popen(
        [
            *(*HIDING, folder_of(server), sys.executable, "-m", "tests.ray.learning"),
            *(server.address, "theirs", "stranger"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with (
        tl.connect(server.address) as client,
        client.open_publisher(a_teacher("theirs")) as teacher,
    ):
        students = [student_on(node, server.address) for node in (here, elsewhere)]
        for student in students:
            ray.get(student.admitted.remote(), timeout=PATIENCE_SECONDS)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "admitted\n"
        learning = [student.learn.remote() for student in students]
        for step in range(STEPS):
            ids, lengths, logits = some_rows(step)
            with teacher.reserve(
                step=step, rows=range(ROWS), input_ids=ids, lengths=lengths
            ) as draft:
                draft.select(flat(logits, lengths))
        local, remote = ray.get(learning, timeout=PATIENCE_SECONDS)
        streamed = Learned(**json.loads(stranger.communicate(timeout=PATIENCE_SECONDS)[0]))

    assert local.transport == "shared_memory"
    assert remote.transport == "ray_object"
    assert streamed.transport == "stream"
    assert len(local.losses) == STEPS * ROWS
    assert local.losses == remote.losses == streamed.losses
    assert local.weights == remote.weights == streamed.weights
