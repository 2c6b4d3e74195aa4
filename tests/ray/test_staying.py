"""What replicas compute stays on their nodes, for who reads objects; two nodes, a replica on each.

The server runs in this process, which is a driver on the first node, as students here are; others
are workers of the second, which sees no socket of the server's folder.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, TypeAlias, cast

import pytest
import ray
from ray._private.internal_api import node_stats
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tests.ray.nodes import PATIENCE_SECONDS, Node, second_node
from tests.ray.test_pool import config_of
from tests.server.replicas.teacher import MOST, Teacher
from tests.transport_suite.writing import Embedded, a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.errors import PayloadInvalidError, PoolFullError, ProducerLostError
from teacher_logits.layout import ElementType
from teacher_logits.tensors import to_bytes
from teacher_logits_server.replicas.engine import ReplicaEngine, from_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ray.actor import ActorHandle
    from ray.cluster_utils import Cluster

    from teacher_logits_server.replicas.stores import Stores

RAY, STREAM = tl.Transport.RAY_OBJECT, tl.Transport.STREAM
pytestmark = pytest.mark.slow  # two nodes, and replicas on them

Content: TypeAlias = dict[str, str]
BUDGET_BYTES = 8 << 20
NOTHING_BYTES = 4096
"""What Ray itself has in a store."""
ROWS_A_PASS, TOKENS = 5, 64
"""Rows of so many tokens come to 140 kB: what is below 100 kB Ray carries to the server at once."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teacher")


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def elsewhere(cluster: Cluster, sockets: Path) -> Iterator[Node]:
    with second_node(cluster, sockets) as node:
        yield node


@pytest.fixture(scope="module")
def engine(cluster: Cluster, folder: Path, elsewhere: Node) -> ReplicaEngine:
    made = from_config(config_of(cluster, folder))
    assert {each.node_id for each in made.replicas()} == {here(), elsewhere.node_id}
    return made  # its server closes it


@pytest.fixture(scope="module")
def server(cluster: Cluster, sockets: Path, engine: ReplicaEngine) -> Iterator[Embedded]:
    with embedded_server(
        sockets,
        pool_bytes=8 << 20,
        engine=engine,
        listen=("127.0.0.1:0",),
        broker=str(sockets / "broker"),
        insecure=True,
        ray_address=cluster.address,
        ray_budget_bytes=BUDGET_BYTES,
        max_batch_tokens=ROWS_A_PASS * TOKENS,
    ) as server:
        yield server


def here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def stores(server: Embedded) -> Stores:
    assert server.core.stores is not None
    return server.core.stores


def stay(server: Embedded) -> dict[str, int]:
    """Bytes that stay on each node."""
    return {each.node_id: each.used_bytes for each in stores(server).view()}


def await_that(holds: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


def in_store(node_id: str) -> int:
    """What is in a node's store, by that node's own word; nothing where it is gone."""
    [node] = [each for each in ray.nodes() if each["NodeID"] == node_id]
    if not node["Alive"]:
        return 0
    stats = node_stats(
        node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
    ).store_stats
    assert not stats.spilled_bytes_total
    used = int(stats.object_store_bytes_used)
    return used if used > NOTHING_BYTES else 0


def some_rows(seed: int, passes: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(MOST) for _ in range(TOKENS)] for _ in range(passes * ROWS_A_PASS)]


ROWS = some_rows(0)


def a_student(*transports: tl.Transport) -> tl.StudentProfile:
    more = {"transports": transports} if transports else {}
    return a_profile(top_k=56, value_type=ElementType.FLOAT32, **more)


def content(leased: tl.LeasedPayload) -> Content:
    """The digest of each column: short, so that a student's answer is in no store itself."""
    columns = leased.columns.items()
    return {name: hashlib.sha256(to_bytes(column)).hexdigest() for name, column in columns}


@pytest.fixture(scope="module")
def expected(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[list[list[int]]], Content]]:
    """What the same engine says in a server of its own."""
    with (
        embedded_server(
            tmp_path_factory.mktemp("own"), pool_bytes=8 << 20, engine=Teacher(folder)
        ) as own,
        tl.connect(own.address) as client,
        client.open_session(a_student(STREAM)) as session,
    ):

        def score(rows: list[list[int]]) -> Content:
            with session.score(rows).result(timeout=PATIENCE_SECONDS) as leased:
                return content(leased)

        yield score


@pytest.fixture
def client(server: Embedded) -> Iterator[tl.Client]:
    """One that leaves nothing behind: not in the server's room, and not in any store."""
    with tl.connect(server.address) as made:
        yield made
    await_that(lambda: not any(stay(server).values()))
    await_that(lambda: not any(map(in_store, stay(server))))


def opened(
    client: tl.Client, *transports: tl.Transport, mode: tl.MapMode = tl.MapMode.COW
) -> tl.Session:
    return client.open_session(a_student(*(transports or (RAY,))), mode=mode)


def scored(session: tl.Session, rows: list[list[int]]) -> tl.LeasedPayload:
    return session.score(rows).result(timeout=PATIENCE_SECONDS)


class Student:
    """A rank in a worker of some node."""

    def __init__(self, address: str) -> None:
        self._client = tl.connect(address)
        self._session = self._client.open_session(a_student(), mode=tl.MapMode.READ_ONLY)

    def terms(self) -> tuple[str, list[str]]:
        """Return how it is served, and what it was refused before that."""
        settled = self._session.transport
        assert settled is not None
        return settled.value, [each.transport.value for each in self._session.refusals]

    def score(self, rows: list[list[int]]) -> Content:
        """Return what the teacher says of rows; its lease is kept."""
        self._leased = scored(self._session, rows)
        return content(self._leased)

    def give_back(self) -> None:
        """End the lease."""
        self._leased.close()

    def leave(self) -> None:
        """End the session."""
        self._client.close()


def student_on(node_id: str, server: Embedded) -> ActorHandle[Student]:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    made = ray.remote(Student).options(num_cpus=0, scheduling_strategy=there)
    return cast("ActorHandle[Student]", made.remote(server.address))


def objects(server: Embedded) -> list[tuple[str, str]]:
    """Of each object that stays: its holder and its node."""
    return [
        (each.holder.terms.name, each.holder.terms.node_id)
        for payload in stores(server)._payloads.values()
        for each in payload.objects
    ]


def on_the_first_node(session: tl.Session, server: Embedded) -> tl.LeasedPayload:
    """A payload that stays on the first node, where this process is."""
    leased = scored(session, ROWS)
    assert [node for _, node in objects(server)] == [here()]
    return leased


class TestWhatStays:
    def test_is_bit_by_bit_what_the_same_engine_writes_and_passes_by_the_server(
        self,
        server: Embedded,
        client: tl.Client,
        expected: Callable[[list[list[int]]], Content],
    ) -> None:
        with opened(client) as session:
            futures = [session.score(some_rows(seed)) for seed in range(6)]
            leased = [each.result(timeout=PATIENCE_SECONDS) for each in futures]
            assert [content(each) for each in leased] == [expected(some_rows(s)) for s in range(6)]
            assert {each.transport for each in leased} == {RAY}
            assert all(stay(server).values()), "on both nodes"
            assert server.usage.used_bytes == 0
            for each in leased:
                each.close()
        assert client.statistics().streamed_bytes == 0

    def test_of_several_passes_is_put_together_by_its_reader(
        self,
        server: Embedded,
        client: tl.Client,
        expected: Callable[[list[list[int]]], Content],
    ) -> None:
        rows = some_rows(1, passes=4)
        with opened(client, mode=tl.MapMode.READ_ONLY) as session, scored(session, rows) as leased:
            assert content(leased) == expected(rows)
            assert sum(each.object_count for each in stores(server).view()) > 2

    def test_of_one_pass_is_read_where_it_lies(self, server: Embedded, client: tl.Client) -> None:
        with (
            opened(client, mode=tl.MapMode.READ_ONLY) as session,
            scored(session, ROWS) as first,
            session.acquire(payload_id=first.payload.payload_id) as second,
        ):
            assert first.columns["topk_ids"].data_ptr() == second.columns["topk_ids"].data_ptr()

    def test_has_its_bad_rows_refused_or_masked(self, client: tl.Client) -> None:
        with opened(client) as session:
            with pytest.raises(PayloadInvalidError, match="a NaN at position 0"):
                scored(session, [[1, 2], [3, MOST]])
            future = session.score([[1, 2], [3, MOST]], bad_rows="mask")
            with future.result(timeout=PATIENCE_SECONDS) as leased:
                assert leased.columns["row_status"].tolist() == [0, 1]
                assert leased.columns["topk_ids"][2:].eq(-1).all()

    def test_leaves_the_stores_as_they_were(self, client: tl.Client) -> None:
        with opened(client) as session:
            for seed in range(40):
                scored(session, some_rows(seed)).close()
        # `client` looks whether they do.


class TestARankOnAReplicasNode:
    def test_reads_what_is_computed_beside_it_and_nothing_leaves_that_node(
        self,
        server: Embedded,
        client: tl.Client,
        elsewhere: Node,
        expected: Callable[[list[list[int]]], Content],
    ) -> None:
        student = student_on(elsewhere.node_id, server)
        transport, refused = ray.get(student.terms.remote(), timeout=PATIENCE_SECONDS)
        assert (transport, refused[-1]) == ("ray_object", "shared_memory")
        found = ray.get(student.score.remote(ROWS), timeout=PATIENCE_SECONDS)
        assert found == expected(ROWS)
        assert [node for _, node in objects(server)] == [elsewhere.node_id]
        assert not in_store(here())
        await_that(lambda: in_store(elsewhere.node_id))
        ray.get(student.leave.remote(), timeout=PATIENCE_SECONDS)


class TestAHolderThatIsKilled:
    def kill(self, server: Embedded) -> None:
        [(name, _)] = objects(server)
        holder = ray.get_actor(name, namespace="teacher-logits")
        ray.kill(holder)
        [found] = stores(server)._payloads.values()
        await_that(lambda: found.objects[0].holder.is_gone)

    @pytest.mark.parametrize("transports", [(RAY,), (RAY, STREAM)], ids=["objects alone", "both"])
    def test_costs_a_copy_here_and_another_takes_its_place(
        self,
        server: Embedded,
        client: tl.Client,
        expected: Callable[[list[list[int]]], Content],
        transports: tuple[tl.Transport, ...],
    ) -> None:
        with opened(client, *transports) as session:
            with on_the_first_node(session, server) as leased:
                self.kill(server)
                with session.acquire(payload_id=leased.payload.payload_id) as again:
                    assert content(again) == expected(ROWS)
                    assert again.transport is RAY
                    assert server.usage.used_bytes > 0  # brought here, and put here
            server.wait_until(lambda: server.usage.used_bytes == 0)
            with on_the_first_node(session, server) as leased:
                assert leased.transport is RAY
                assert server.usage.used_bytes == 0


def test_who_is_streamed_to_gets_a_payload_that_stays_all_the_same(
    server: Embedded,
    client: tl.Client,
    expected: Callable[[list[list[int]]], Content],
) -> None:
    rows = some_rows(3, passes=4)
    with opened(client) as owner, scored(owner, rows) as leased:
        with opened(client, STREAM) as other, opened(client, tl.Transport.SHARED_MEMORY) as third:
            with other.acquire(payload_id=leased.payload.payload_id) as theirs:
                assert theirs.transport is STREAM
                assert content(theirs) == expected(rows)
            brought = server.usage.used_bytes
            with third.acquire(payload_id=leased.payload.payload_id) as shared:
                assert shared.transport is tl.Transport.SHARED_MEMORY
                assert content(shared) == expected(rows)
            assert server.usage.used_bytes == brought > 0
    server.wait_until(lambda: server.usage.used_bytes == 0)


def test_who_finds_no_room_in_the_budgets_waits_for_it(
    server: Embedded, client: tl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    [engine] = cast("list[ReplicaEngine]", list(server.core.passes.values()))
    with opened(client) as session, scored(session, ROWS) as first:
        size = first.payload.size_bytes
        rooms, now = engine._table.rooms, {each.node_id: size for each in stores(server).view()}
        budgets = dict(rooms._budgets)
        rooms.set_budgets(now)
        second = scored(session, ROWS)
        late = session.score(ROWS, timeout=0.5)
        with pytest.raises(PoolFullError, match="--ray-budget"):
            late.result(timeout=PATIENCE_SECONDS)
        waiting = session.score(ROWS)
        await_that(lambda: server.core.scorers["teacher"].queue().waiting_requests == 1)
        second.close()
        with waiting.result(timeout=PATIENCE_SECONDS) as third:
            assert third.transport is RAY
        rooms.set_budgets(budgets)


def test_a_replica_that_is_killed_takes_nothing_along_that_it_had_answered(
    server: Embedded, client: tl.Client, expected: Callable[[list[list[int]]], Content]
) -> None:
    [engine] = cast("list[ReplicaEngine]", list(server.core.passes.values()))
    with opened(client) as session, on_the_first_node(session, server) as leased:
        [there] = [each for each in engine.replicas() if each.node_id == here()]
        os.kill(there.pid, signal.SIGKILL)
        await_that(lambda: engine.replicas()[there.number].restarts > there.restarts)
        with session.acquire(payload_id=leased.payload.payload_id) as again:
            assert content(again) == expected(ROWS)
        await_that(lambda: all(each.state == "ready" for each in engine.replicas()))


def test_a_node_that_is_lost_is_a_producer_that_is_lost_and_gives_its_room_back(
    server: Embedded, client: tl.Client, elsewhere: Node
) -> None:
    student = student_on(elsewhere.node_id, server)
    ray.get(student.score.remote(ROWS), timeout=PATIENCE_SECONDS)
    [payload_id] = stores(server)._payloads
    assert [node for _, node in objects(server)] == [elsewhere.node_id]
    elsewhere.kill()
    for transports in ((RAY,), (RAY, STREAM)):
        with opened(client, *transports) as session:
            with pytest.raises(ProducerLostError, match="score the rows again"):
                session.acquire(payload_id=payload_id, timeout=PATIENCE_SECONDS)
    [lease] = server.core.ledger.view().leases
    server.core.ledger.reclaim_session(lease.session_id)
    assert not any(stay(server).values())
    with opened(client) as session:
        on_the_first_node(session, server).close()
