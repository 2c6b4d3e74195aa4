"""Payloads as objects of a Ray cluster's store: the conformance suite, and what is Ray's alone.

This process is a driver of the cluster, and the server that runs in it has joined the same one.
"""

# ruff: noqa: F401, F811 - the suite's tests and fixtures are for pytest to find

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import pytest
import ray
import torch
from tests.client.publishing.a_publisher import a_student, a_teacher, expected, some_rows
from tests.transport_suite.conftest import clients, open_session, server
from tests.transport_suite.contents import Content, every_kind
from tests.transport_suite.test_bits import (
    test_a_digest_tells_one_changed_bit,
    test_every_element_type_comes_bit_by_bit,
    test_every_k_and_form_of_rows_comes_bit_by_bit,
    test_every_way_of_mapping_shows_the_same_bits,
    test_one_payload_has_one_digest_over_every_transport,
    test_rows_without_a_single_position_come_too,
)
from tests.transport_suite.test_generations import (
    content,
    test_a_copy_that_was_complete_in_time_minds_no_reuse,
    test_generations_rise_with_every_reuse_of_a_room,
)
from tests.transport_suite.test_isolation import (
    test_a_digest_check_at_the_end_finds_the_readers_own_writes_too,
    test_in_place_writes_are_gone_from_the_next_payload_in_the_same_room,
    test_in_place_writes_are_gone_when_the_same_payload_is_leased_again,
    test_in_place_writes_of_one_page_leave_the_neighbours_room_alone,
    test_in_place_writes_reach_neither_the_writer_nor_another_reader,
)
from tests.transport_suite.test_room import (
    test_gives_no_new_lease_once_it_is_free,
    test_holds_nothing_for_a_closed_lease_to_show,
    test_is_free_once_writer_and_reader_are_done,
    test_is_given_back_with_the_session_that_was_closed_first,
    test_is_taken_while_one_of_two_readers_is_left,
    test_keeps_its_bytes_for_a_view_that_outlives_the_lease,
    test_of_a_lease_closed_twice_is_given_back_once,
    test_stays_taken_for_a_view_where_it_is_the_writers_own_and_not_for_a_copy,
    test_stays_taken_while_a_graph_of_autograd_has_a_view,
)
from tests.transport_suite.test_scored import (
    test_the_dense_teacher_is_heard_in_the_servers_own_process_too,
)
from tests.transport_suite.ways import RAY_OBJECT, Way
from tests.transport_suite.writing import Embedded, a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.errors import (
    ConfigError,
    DeadlinePassedError,
    NotAllowedError,
    ObjectLostError,
    PoolFullError,
)
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.tensors import to_bytes
from teacher_logits.transport import Refusal, RefusalReason
from teacher_logits.v1 import object_service_pb2
from teacher_logits.views import ObjectStoreView
from teacher_logits_client import testing
from teacher_logits_client.openers import ray_cluster
from teacher_logits_server.exporters import ray_store

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from teacher_logits.terms import ObjectTicket
    from teacher_logits_server.exporters.ray_object import RayObjectExporter

BUDGET_BYTES = 8 << 20
PATIENCE_SECONDS = 30
IDS = ColumnKind.TOPK_IDS.value
RAY, STREAM = RAY_OBJECT.transport, tl.Transport.STREAM


@pytest.fixture(params=[RAY_OBJECT], ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture(scope="module")
def running_server(
    cluster: "Cluster", tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Embedded]:
    with joined_server(cluster, tmp_path_factory.mktemp("suite")) as server:
        yield server


@contextmanager
def joined_server(cluster: "Cluster", folder: Path) -> Iterator[Embedded]:
    """A server of this process that has joined the cluster."""
    with embedded_server(
        folder, pool_bytes=24 << 20, ray_address=cluster.address, ray_budget_bytes=BUDGET_BYTES
    ) as server:
        yield server


def a_content(seed: int = 0, positions: int = 9) -> Content:
    """Of 9 positions it has 0.1 MB, and of 300 nearly half of the budget."""
    return every_kind(
        top_k=1024, windows=((0, positions),), element_type=ElementType.FLOAT32, seed=seed
    )


def exporter(server: Embedded) -> "RayObjectExporter":
    assert server.core.objects is not None
    return server.core.objects


def store(server: Embedded) -> ObjectStoreView:
    return exporter(server).view()


def await_that(holds: Callable[[], object]) -> None:
    """Look until something is so that Ray, or another thread, does soon."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


@contextmanager
def reading(
    server: Embedded, *transports: tl.Transport, mode: tl.MapMode = tl.MapMode.COW
) -> Iterator[tuple[tl.Client, tl.Session]]:
    """A client with one session, by default of objects alone."""
    profile = a_profile(top_k=1024, temperatures=(2.0,), transports=transports or (RAY,))
    with tl.connect(server.address) as client, client.open_session(profile, mode=mode) as session:
        yield client, session


def test_one_object_serves_all_readers_of_a_payload(server: Embedded) -> None:
    with (
        server.sealed(a_content()) as held,
        reading(server) as (_, first),
        reading(server) as (_, second),
        first.acquire(payload_id=held.payload.payload_id) as mine,
        second.acquire(payload_id=held.payload.payload_id) as theirs,
    ):
        assert mine.digest() == theirs.digest()
        assert store(server).object_count == 1
        assert store(server).used_bytes == held.payload.size_bytes
    await_that(lambda: store(server).object_count == 0)
    assert store(server).used_bytes == 0


def test_two_views_of_a_payload_share_one_address(server: Embedded) -> None:
    content = a_content()
    with (
        server.sealed(content) as held,
        reading(server, mode=tl.MapMode.READ_ONLY) as (client, session),
        session.acquire(payload_id=held.payload.payload_id) as first,
        session.acquire(payload_id=held.payload.payload_id) as second,
    ):
        assert first.columns[IDS].data_ptr() == second.columns[IDS].data_ptr()
        assert client._buffers.idle_bytes == 0
        assert to_bytes(first.columns[IDS]) == content.data[ColumnKind.TOPK_IDS]


def test_a_view_that_outlives_its_lease_keeps_its_room_in_the_budget(server: Embedded) -> None:
    content = a_content()
    with (
        server.sealed(content) as held,
        reading(server, mode=tl.MapMode.READ_ONLY) as (_, session),
    ):
        with pytest.warns(ResourceWarning, match=IDS):
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                views = [leased.columns[IDS]]
        assert store(server).object_count == 1
        assert to_bytes(views[0]) == content.data[ColumnKind.TOPK_IDS]
        views.clear()
        await_that(lambda: store(server).object_count == 0)


def test_copies_come_into_one_buffer_that_is_used_again(server: Embedded) -> None:
    with server.sealed(a_content()) as held, reading(server) as (client, session):
        places = set()
        for _ in range(3):
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                places.add(leased.columns[IDS].data_ptr())
            assert client._returner.wait(PATIENCE_SECONDS)
        assert len(places) == 1


def test_the_holder_hands_nothing_to_a_wrong_token_or_an_ended_lease(server: Embedded) -> None:
    taken: list[tuple[str, str, bytes]] = []
    fetch = ray_cluster.fetch_all

    def note(tickets: Sequence["ObjectTicket"], lease_id: str, *, until: float) -> list[memoryview]:
        taken.extend((each.object_id, lease_id, each.token) for each in tickets)
        return fetch(tickets, lease_id, until=until)

    with server.sealed(a_content()) as held, reading(server) as (_, session):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("teacher_logits_client.openers.ray_object.fetch_all", note)
            ended = session.acquire(payload_id=held.payload.payload_id)
            kept = session.acquire(payload_id=held.payload.payload_id)
        holder = exporter(server).holder
        actor = ray.get_actor(holder.name, namespace=holder.namespace)
        (object_id, lease_id, token), (_, other_id, _) = taken
        assert len(ray.get(actor.take.remote(object_id, lease_id, token))) == 1
        assert ray.get(actor.take.remote(object_id, other_id, token)) == []
        assert ray.get(actor.take.remote(object_id, lease_id, bytes(32))) == []
        ended.close()
        await_that(lambda: not ray.get(actor.take.remote(object_id, lease_id, token)))
        kept.close()


def test_no_reference_is_in_any_message(server: Embedded) -> None:
    sent: list[bytes] = []
    references: list[bytes] = []
    make, get = object_service_pb2.PutObjectResponse, ray.get

    def note_message(**given: object) -> object_service_pb2.PutObjectResponse:
        made = make(**given)  # type: ignore[arg-type]
        sent.append(made.SerializeToString())
        return made

    def note_reference(reference: "ray.ObjectRef[object]", **given: float) -> object:
        found = get(reference, **given)
        if isinstance(found, list):
            references.extend(each.binary() for each in found if isinstance(each, ray.ObjectRef))
        return found

    with server.sealed(a_content()) as held, reading(server) as (_, session):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(object_service_pb2, "PutObjectResponse", note_message)
            patch.setattr(ray, "get", note_reference)
            session.acquire(payload_id=held.payload.payload_id).close()
    assert len(sent) == len(references) == 1
    for form in (references[0], references[0].hex().encode()):
        assert form not in sent[0]


def holds(session: tl.Session, step: int) -> bool:
    """Say whether a step reads as its teacher selected it."""
    ids, lengths, logits = some_rows(step)
    wanted = expected(ids, lengths, logits)
    with session.acquire(step=step, input_ids=ids, lengths=lengths) as batch:
        return torch.equal(batch.columns[IDS], wanted.topk_ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize("writes", ["shared_memory", "stream"])
def test_what_publishers_register_comes_too(server: Embedded, writes: str) -> None:
    name = f"published-{writes}"
    profile = a_student(name, transports=(RAY,))
    with (
        tl.connect(server.address) as client,
        client.open_publisher(
            a_teacher(name), transports=(writes,), pool_size_bytes=1 << 20, slab_size_bytes=1 << 20
        ) as publisher,
        client.open_session(profile) as session,
    ):
        assert publisher.transport.value == writes

        def publish(step: int) -> None:
            ids, lengths, logits = some_rows(step)
            with publisher.reserve(step, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits, out=draft)

        for step in range(3):
            publish(step)
            assert holds(session, step)
        publish(3)
        publisher.close()
        assert holds(session, 3)  # what it left behind is read all the same
        assert set(session.transports.values()) == {RAY}
        assert client.statistics().streamed_bytes == 0


@ray.remote(max_calls=1)
def publish_and_end(address: str, name: str) -> int:
    """Publish a step in a process that ends behind this."""
    ids, lengths, logits = some_rows(0)
    with (
        tl.connect(address) as client,
        client.open_publisher(
            a_teacher(name), pool_size_bytes=1 << 20, slab_size_bytes=1 << 20
        ) as publisher,
        publisher.reserve(0, input_ids=ids, lengths=lengths) as draft,
    ):
        tl.select_top_k(logits, out=draft)
    return os.getpid()


@pytest.mark.slow
def test_what_a_task_published_outlives_its_process(server: Embedded) -> None:
    """The process that made it owns nothing in Ray: the server's holder does."""
    profile = a_student("of-a-task", transports=(RAY,))
    task = publish_and_end.remote(server.address, "of-a-task")
    pid = ray.get(task, timeout=4 * PATIENCE_SECONDS)  # in which a worker starts
    await_that(lambda: not Path(f"/proc/{pid}").exists())
    gc.collect()
    with tl.connect(server.address) as client, client.open_session(profile) as session:
        assert holds(session, 0)
        assert set(session.transports.values()) == {RAY}


class TestWhoIsOfNoClusterOrAnother:
    def refused(self, server: Embedded) -> tuple[tl.Transport | None, tl.Refusal]:
        with reading(server, RAY, STREAM) as (_, session):
            [refusal] = session.refusals
            assert refusal.transport is RAY
            return session.transport, refusal

    def test_is_streamed_to_outside_of_ray(
        self, server: Embedded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        transport, refusal = self.refused(server)
        assert transport is STREAM
        assert refusal.reason is RefusalReason.NOT_IN_RAY

    def test_is_told_that_its_cluster_has_no_such_holder(
        self, server: Embedded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def absent(name: str, namespace: str) -> object:
            raise ValueError(name)

        ray_cluster._holders.forget(exporter(server).holder)
        monkeypatch.setattr(ray, "get_actor", absent)
        _, refusal = self.refused(server)
        assert refusal.reason is RefusalReason.HOLDER_GONE
        kind = type(ray.get_runtime_context())
        monkeypatch.setattr(kind, "gcs_address", "127.0.0.1:1")
        _, refusal = self.refused(server)
        assert refusal.reason is RefusalReason.OTHER_CLUSTER
        assert "127.0.0.1:1" in refusal.message

    def test_is_found_out_by_its_proof(
        self, server: Embedded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "teacher_logits_client.sessions.evidence.read_challenge"
        monkeypatch.setattr(name, lambda *_, until: bytes(32))
        transport, refusal = self.refused(server)
        assert transport is STREAM
        assert refusal.reason is RefusalReason.PROOF_WRONG

    def test_gets_nothing_put_for_it(self, server: Embedded) -> None:
        with server.sealed(a_content()) as held, reading(server, STREAM) as (client, session):
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                put = client._calls.objects.put
                with pytest.raises(NotAllowedError, match="not settled on ray_object"):
                    put(session.terms.session_id, leased.lease_id, timeout=10.0, room_wait=1.0)


class TestTheBudget:
    def test_has_who_finds_no_room_wait_for_it(self, server: Embedded) -> None:
        helds = [server.seal(a_content(seed, positions=300)) for seed in range(3)]
        ids = [held.payload.payload_id for held in helds]
        with reading(server) as (_, session), reading(server) as (_, other):
            holding = [session.acquire(payload_id=each) for each in ids[:2]]
            got: list[tl.LeasedPayload] = []
            waiting = threading.Thread(target=lambda: got.append(other.acquire(payload_id=ids[2])))
            waiting.start()
            await_that(lambda: store(server).waiting_count == 1)
            assert store(server).object_count == 2
            holding[0].close()
            waiting.join(PATIENCE_SECONDS)
            assert got[0].transport is RAY
            for each in (holding[1], got[0]):
                each.close()
        for held in helds:
            held.release()

    def test_is_an_error_with_its_numbers_where_the_room_stays_taken(
        self, server: Embedded
    ) -> None:
        helds = [server.seal(a_content(seed, positions=300)) for seed in range(3)]
        ids = [held.payload.payload_id for held in helds]
        with reading(server) as (_, session):
            holding = [session.acquire(payload_id=each) for each in ids[:2]]
            with pytest.raises(PoolFullError, match="--ray-budget") as caught:
                session.acquire(payload_id=ids[2], timeout=0.3)
            size = helds[0].payload.size_bytes
            assert caught.value.facts["need_bytes"] == size
            assert caught.value.facts["free_bytes"] == BUDGET_BYTES - 2 * size
            assert store(server).waiting_count == 0
            for each in holding:
                each.close()
        for held in helds:
            held.release()

    def test_keeps_nobody_long_who_may_be_streamed_to(
        self, server: Embedded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("teacher_logits_client.openers.ray_object.ROOM_SECONDS", 0.05)
        helds = [server.seal(a_content(seed, positions=300)) for seed in range(3)]
        ids = [held.payload.payload_id for held in helds]
        with reading(server, RAY, STREAM) as (client, session):
            holding = [session.acquire(payload_id=each) for each in ids[:2]]
            assert [each.transport for each in holding] == [RAY, RAY]
            with session.acquire(payload_id=ids[2], timeout=PATIENCE_SECONDS) as leased:
                assert leased.transport is STREAM
            assert client.statistics().fallbacks == 1
            for each in holding:
                each.close()
        for held in helds:
            held.release()

    def test_streams_what_never_fits_where_that_is_wanted_too(self, server: Embedded) -> None:
        with (
            server.sealed(a_content(positions=700)) as held,
            reading(server, RAY, STREAM) as (client, session),
            session.acquire(payload_id=held.payload.payload_id) as leased,
        ):
            assert session.transport is RAY
            assert leased.transport is STREAM
            assert client.statistics().fallbacks == 1

    def test_leaves_others_in_the_store_alone_and_nothing_is_spilled(
        self, server: Embedded
    ) -> None:
        most = int(store(server).store_bytes * 0.8)
        theirs = ray.put(numpy.zeros(most - (1 << 20), numpy.uint8))
        with server.sealed(a_content(positions=300)) as held, reading(server) as (_, session):
            with pytest.raises(PoolFullError, match="would spill") as caught:
                session.acquire(payload_id=held.payload.payload_id, timeout=2)
            assert caught.value.facts["most_bytes"] == most
            del theirs
            session.acquire(payload_id=held.payload.payload_id).close()
        assert store(server).spilled_bytes == 0


class TestAHolderThatIsKilled:
    def kill(self, server: Embedded) -> None:
        holder = exporter(server).holder
        ray.kill(ray.get_actor(holder.name, namespace=holder.namespace))

    def test_is_a_typed_error_before_the_deadline_and_has_a_successor(
        self, server: Embedded
    ) -> None:
        content = a_content()
        restarts = store(server).holder_restarts
        with server.sealed(content) as held, reading(server) as (_, session):
            with session.acquire(payload_id=held.payload.payload_id) as kept:
                self.kill(server)
                with pytest.raises(ObjectLostError, match=r"holder|reference"):
                    session.acquire(payload_id=held.payload.payload_id, timeout=20)
                await_that(lambda: store(server).holder_restarts == restarts + 1)
                # What its predecessor handed out is there: the objects are not the holder's.
                with session.acquire(payload_id=held.payload.payload_id) as again:
                    assert again.digest() == kept.digest()

    def test_leaves_nothing_in_the_store(self, server: Embedded) -> None:
        """Not until garbage is collected, which the Ray process may never do."""
        await_that(lambda: used_bytes(server) == 0)
        restarts = store(server).holder_restarts
        with server.sealed(a_content()) as held, reading(server) as (_, session):
            self.kill(server)
            with suppress(ObjectLostError):
                session.acquire(payload_id=held.payload.payload_id, timeout=20).close()
            await_that(lambda: store(server).holder_restarts == restarts + 1)
        await_that(lambda: used_bytes(server) == 0)

    def test_costs_a_stream_where_that_is_wanted_too(self, server: Embedded) -> None:
        restarts = store(server).holder_restarts
        with (
            server.sealed(a_content()) as held,
            reading(server, RAY, STREAM) as (client, session),
        ):
            with session.acquire(payload_id=held.payload.payload_id):
                self.kill(server)
                with session.acquire(payload_id=held.payload.payload_id) as leased:
                    assert leased.transport is STREAM
                assert client.statistics().fallbacks == 1
                await_that(lambda: store(server).holder_restarts == restarts + 1)
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                assert leased.transport is RAY


def test_a_head_that_does_not_answer_is_waited_for_no_longer_than_the_deadline(
    server: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    try:
        with server.sealed(a_content()) as held, reading(server) as (_, session):
            ray_cluster._holders.forget(exporter(server).holder)
            monkeypatch.setattr(ray, "get_actor", lambda *_, **__: over.wait(PATIENCE_SECONDS))
            with pytest.raises(DeadlinePassedError, match="the handle of"):
                session.acquire(payload_id=held.payload.payload_id, timeout=0.3)
    finally:
        over.set()


def used_bytes(server: Embedded) -> int:
    """What everybody has in the store of the server's node, now."""
    from ray._private.internal_api import node_stats

    [node] = [each for each in ray.nodes() if each["NodeID"] == exporter(server).holder.node_id]
    place = node["NodeManagerAddress"], node["NodeManagerPort"]
    return int(node_stats(*place, include_memory_info=False).store_stats.object_store_bytes_used)


@pytest.mark.parametrize(
    "cycles",
    [
        1000,  # about 12 ms each, most of them Ray's
        pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_payload_after_payload_leaves_the_store_as_it_was(server: Embedded, cycles: int) -> None:
    await_that(lambda: used_bytes(server) == 0)
    content = a_content(positions=1)
    with reading(server) as (_, session):
        for _ in range(cycles):
            with server.sealed(content) as held:
                session.acquire(payload_id=held.payload.payload_id).close()
    await_that(lambda: store(server).object_count == 0)
    await_that(lambda: used_bytes(server) == 0)
    assert store(server).spilled_bytes == 0


def test_a_holder_that_ray_cannot_find_is_refused_at_once_with_what_it_says(
    server: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, **_: object) -> None:
        raise RuntimeError("the head has hung up")

    monkeypatch.setattr(ray_cluster, "_holders", ray_cluster._Holders())
    monkeypatch.setattr(ray, "get_actor", fail)
    refusal = ray_cluster.read_challenge(exporter(server).holder, until=time.monotonic() + 3600)

    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.HOLDER_GONE
    assert "RuntimeError: the head has hung up" in refusal.message


def test_a_raylet_that_some_process_keeps_waiting_keeps_nobody_from_the_store(
    server: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks every process of Ray's on its node first: one that is stopped does not answer."""
    await_that(lambda: used_bytes(server) == 0)
    over = threading.Event()
    monkeypatch.setattr(ray_store, "node_stats", lambda *_, **__: over.wait(PATIENCE_SECONDS))
    found = ray_store.Store()
    try:
        assert found.look().used_bytes == 0
        kept = [ray.put(numpy.zeros(1 << 20, numpy.uint8))]
        found.note_put(1 << 20)
        assert found.look().used_bytes >= 1 << 20  # before the head has heard of it
        await_that(lambda: 1 << 20 <= found.look().used_bytes < 2 << 20)
        kept.clear()
        await_that(lambda: found.look().used_bytes == 0)
    finally:
        over.set()


def kill_and_fetch(server: Embedded) -> Callable[..., list[memoryview]]:
    """Fetch an object whose owner dies between its put and that."""
    fetch = ray_cluster.fetch_all

    def kill_first(
        tickets: Sequence["ObjectTicket"], lease_id: str, *, until: float
    ) -> list[memoryview]:
        os.kill(exporter(server)._link.pid, signal.SIGKILL)
        await_that(lambda: not holders(tickets[0].holder.name.split("/")[1]))
        return fetch(tickets, lease_id, until=until)

    return kill_first


def test_a_server_whose_ray_process_died_serves_on_and_joins_again(
    cluster: "Cluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teacher_logits_server.exporters.ray_object.REJOIN_SECONDS", 0.01)
    content, may_join = a_content(), threading.Event()
    with (
        joined_server(cluster, tmp_path) as server,
        server.sealed(content) as held,
        reading(server, mode=tl.MapMode.READ_ONLY) as (_, session),
        session.acquire(payload_id=held.payload.payload_id) as leased,
    ):
        join = exporter(server)._join
        monkeypatch.setattr(
            exporter(server), "_join", lambda: join() if may_join.wait(PATIENCE_SECONDS) else None
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "teacher_logits_client.openers.ray_object.fetch_all", kill_and_fetch(server)
            )
            with pytest.raises(ObjectLostError):
                session.acquire(payload_id=held.payload.payload_id, timeout=20)
        await_that(lambda: store(server).state == "lost")
        assert to_bytes(leased.columns[IDS]) == content.data[ColumnKind.TOPK_IDS]
        with pytest.raises(ObjectLostError, match="Ray process is gone"):
            session.acquire(payload_id=held.payload.payload_id)
        with reading(server, RAY, STREAM) as (_, later):
            assert later.transport is STREAM
            assert [each.reason for each in later.refusals] == [RefusalReason.NOT_OFFERED]
        may_join.set()
        await_that(lambda: store(server).state == "joined")
        with session.acquire(payload_id=held.payload.payload_id) as again:
            assert to_bytes(again.columns[IDS]) == content.data[ColumnKind.TOPK_IDS]


def test_a_server_that_is_killed_leaves_nothing_in_the_cluster(cluster: "Cluster") -> None:
    with testing.serve(ray_address=cluster.address) as server:
        grid = tl.BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1)
        profile = tl.StudentProfile(batch_grid=grid, top_k=8, transports=(RAY,))
        with tl.connect(server.address) as client:
            session = client.open_session(profile, mode=tl.MapMode.READ_ONLY)
            leased = session.score([[1, 2, 3]]).result()
            before = leased.columns[IDS].tolist()
            [holder] = holders(server.readiness["epoch"])
            os.kill(server.pid, signal.SIGKILL)
            await_that(lambda: not holders(server.readiness["epoch"]))
            assert leased.columns[IDS].tolist() == before
            leased.abandon()
            assert str(server.readiness["epoch"]) in holder


def holders(epoch: object) -> list[str]:
    """The names of the holders of one server that live."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in listed if f"/{epoch}/" in each["name"]]


def test_no_cluster_at_the_address_is_an_error_of_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"--ray-address 127\.0\.0\.1:9"):
        with testing.serve(ray_address="127.0.0.1:9"):
            pass
