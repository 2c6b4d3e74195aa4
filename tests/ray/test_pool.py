"""Replicas of a teacher in a real cluster: what they answer, and what comes of their ends."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from array import array
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from ray.util import list_named_actors
from tests import forked
from tests.server.replicas.teacher import DIE, HOLD, MOST, RAISE, Teacher

from teacher_logits import keys
from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import ConfigError, DeadlinePassedError, EngineError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.selection_rules import Nucleus, Sampled
from teacher_logits.transport import Transport
from teacher_logits_client import connect, testing
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.ledger import Ledger
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.replicas.cluster import join
from teacher_logits_server.replicas.engine import ReplicaEngine, from_config
from teacher_logits_server.scorer import ScoreJob, Scorer
from teacher_logits_server.slabs import ServerSlabs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from ray.cluster_utils import Cluster

    from teacher_logits.terms import LeaseTerms
    from teacher_logits_server.engines.passes import ServedEngine

CLOCK = MonotonicClock()
PATIENCE = 120.0
TEACHER = "tests.server.replicas.teacher"


class Service:
    """An engine with everything that a scorer needs, and sessions that stream."""

    def __init__(self, engine: ServedEngine, *, max_batch_tokens: int = 8192) -> None:
        profile = engine.profile
        config = ServerConfig(
            pool_size_bytes=1 << 22, slab_size_bytes=1 << 22, max_batch_tokens=max_batch_tokens
        )
        self.engine = engine
        self.slabs = ServerSlabs(epoch=keys.new_epoch())
        self.ledger = Ledger(
            epoch=keys.new_epoch(),
            limits=config,
            engines=(
                EngineTeacher(
                    profile=TeacherProfile(
                        teacher_id="teacher",
                        vocabulary_size=profile.vocabulary_size,
                        head_rows=profile.head_rows,
                        top_k=profile.vocabulary_size,
                        max_row_tokens=profile.max_row_tokens,
                    )
                ),
            ),
            clock=CLOCK,
            slots=self.slabs,
            offered=frozenset({Transport.STREAM}),
        )
        self.scorer = Scorer(
            engine=engine, ledger=self.ledger, slabs=self.slabs, config=config, clock=CLOCK
        )

    def session(self, **wishes: object) -> str:
        profile = replace(
            StudentProfile(
                batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
                top_k=8,
                value_type=ElementType.FLOAT32,
            ),
            **wishes,  # type: ignore[arg-type]
        )
        opened = self.ledger.open_session(
            request_id=f"open-{random.random()}", protocol_version=PROTOCOL_VERSION, profile=profile
        )
        self.ledger.prove_locality(opened.terms.session_id, proofs={}, failures=[])
        return opened.terms.session_id

    def submit(
        self, session_id: str, rows: Sequence[Sequence[int]], *, seconds: float = PATIENCE
    ) -> Future[LeaseTerms]:
        return self.scorer.submit(
            ScoreJob(
                session_id=session_id,
                request_id=f"score-{random.random()}",
                input_ids=b"".join(array("i", row).tobytes() for row in rows),
                row_lengths=tuple(len(row) for row in rows),
                deadline=CLOCK.now() + seconds,
            )
        )

    def payload(self, session_id: str, lease: LeaseTerms) -> dict[ColumnKind, bytes]:
        with self.ledger.pin(session_id, lease.lease_id) as pinned:
            room = self.slabs.room(pinned.room)
            columns = pinned.payload.columns
            return {each.kind: bytes(room[each.offset_bytes : each.end_bytes]) for each in columns}

    def scored(self, session_id: str, rows: Sequence[Sequence[int]]) -> dict[ColumnKind, bytes]:
        return self.payload(session_id, self.submit(session_id, rows).result(PATIENCE))


@contextmanager
def serving(engine: ServedEngine, **limits: int) -> Iterator[Service]:
    service = Service(engine, **limits)
    service.scorer.start()
    try:
        yield service
    finally:
        service.scorer.stop()
        service.slabs.close()


def config_of(cluster: Cluster, folder: Path, **more: object) -> ServerConfig:
    return replace(
        ServerConfig(
            engine="ray",
            replicas=2,
            replica_engine=f"{TEACHER}:make",
            replica_cpus=0.5,
            model=str(folder),
            ray_address=cluster.address,
            replica_start=timedelta(seconds=PATIENCE),
            replica_patience=timedelta(seconds=0.2),
        ),
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teacher")


@pytest.fixture(scope="module")
def engine(cluster: Cluster, folder: Path) -> Iterator[ReplicaEngine]:
    made = from_config(config_of(cluster, folder))
    yield made
    made.close()
    assert until(lambda: not actors("teacher"))


@pytest.fixture
def pool(engine: ReplicaEngine, folder: Path) -> Iterator[Service]:
    """Two replicas, both ready, and nothing left of the test before."""
    for left in folder.iterdir():
        left.unlink()
    assert until(lambda: all(each.state == "ready" for each in engine.replicas()))
    with serving(engine, max_batch_tokens=12) as service:
        yield service


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Service]:
    """The same teacher in this process."""
    with serving(Teacher(folder)) as service:
        yield service


def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait for something that another process does; tell whether it came to be."""
    give_up = CLOCK.now() + seconds
    while not holds():
        if CLOCK.now() > give_up:
            return False
        threading.Event().wait(0.01)
    return True


def held(folder: Path, count: int = 1) -> list[int]:
    """Wait until replicas hold rows, and return their processes."""
    assert until(lambda: len(list(folder.glob("held-*"))) >= count)
    return [int(each.name.partition("-")[2]) for each in folder.glob("held-*")]


def actors(teacher_id: str) -> list[str]:
    """The replicas of a teacher that there are in the cluster, whoever started them."""
    named = list_named_actors(all_namespaces=True)
    return [
        each["name"] for each in named if each["name"].startswith(f"teacher-logits/{teacher_id}/")
    ]


def holding(at: int) -> list[int]:
    """A row that is held, and takes a pass for itself."""
    return [HOLD, at, 1, 1, 1, 1, 1]


def rows(seed: int, count: int = 6) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(MOST) for _ in range(chance.randint(1, 8))] for _ in range(count)]


class TestAnswers:
    @pytest.mark.parametrize(
        "wishes",
        [
            {},
            {"value_type": ElementType.BFLOAT16, "temperatures": (2.0,)},
            {"selection": Nucleus(mass=0.8)},
            {"selection": Sampled(seed=5)},
        ],
        ids=str,
    )
    def test_replicas_answer_bit_for_bit_as_the_same_engine_in_this_process(
        self, pool: Service, here: Service, wishes: dict[str, object]
    ) -> None:
        theirs, ours = pool.session(**wishes), here.session(**wishes)
        asked = [rows(seed) for seed in range(6)]
        futures = [pool.submit(theirs, each) for each in asked]
        for each, future in zip(asked, futures, strict=True):
            expected = here.scored(ours, each)
            assert pool.payload(theirs, future.result(PATIENCE)) == expected

    def test_passes_go_to_all_replicas_at_once(
        self, pool: Service, engine: ReplicaEngine, folder: Path
    ) -> None:
        session = pool.session()
        futures = [pool.submit(session, [holding(at)]) for at in range(6)]
        assert len(set(held(folder, 2))) == 2
        assert until(lambda: sum(each.outstanding_tokens for each in engine.replicas()) == 4 * 7)
        (folder / "go").touch()
        assert all(future.result(PATIENCE) for future in futures)

    def test_rows_that_a_replica_raises_on_fail_alone_and_end_no_replica(
        self, pool: Service, here: Service, engine: ReplicaEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = [each.pid for each in engine.replicas()]
        session, ours = pool.session(), here.session()
        futures = [pool.submit(session, [row]) for row in ([1, 2], [RAISE], [3, 4])]
        with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match="failed on these"):
            futures[1].result(PATIENCE)
        assert "words that must not leave the server" in caplog.text
        for future, row in ((futures[0], [1, 2]), (futures[2], [3, 4])):
            assert pool.payload(session, future.result(PATIENCE)) == here.scored(ours, [row])
        assert [each.pid for each in engine.replicas()] == before


class TestEnds:
    def test_a_replica_killed_in_the_middle_costs_no_row_and_is_started_anew(
        self, pool: Service, here: Service, engine: ReplicaEngine, folder: Path
    ) -> None:
        session, ours = pool.session(), here.session()
        asked = [[holding(at), [at, at, at]] for at in range(8)]
        futures = [pool.submit(session, each) for each in asked]
        killed = held(folder, 2)[0]
        os.kill(killed, signal.SIGKILL)
        (folder / "go").touch()
        for each, future in zip(asked, futures, strict=True):
            assert pool.payload(session, future.result(PATIENCE)) == here.scored(ours, each)
        assert until(lambda: all(each.state == "ready" for each in engine.replicas()))
        assert killed not in [each.pid for each in engine.replicas()]
        [again] = [each for each in engine.replicas() if each.restarts]
        assert "died" in again.reason or "dead" in again.reason

    def test_an_idle_replica_that_ends_is_missed_before_anybody_asks(
        self, pool: Service, engine: ReplicaEngine
    ) -> None:
        [gone, _] = engine.replicas()
        os.kill(gone.pid, signal.SIGKILL)
        assert until(lambda: engine.replicas()[0].restarts > gone.restarts)

    def test_one_that_hangs_past_a_deadline_is_started_anew(
        self, pool: Service, engine: ReplicaEngine
    ) -> None:
        before = sum(each.restarts for each in engine.replicas())
        future = pool.submit(pool.session(), [holding(1)], seconds=2.0)
        with pytest.raises(DeadlinePassedError):
            future.result(PATIENCE)
        assert until(lambda: sum(each.restarts for each in engine.replicas()) > before)
        assert any("did not answer" in each.reason for each in engine.replicas())

    def test_rows_that_end_every_replica_fail_after_the_second_and_take_no_others_along(
        self, pool: Service, here: Service
    ) -> None:
        session, ours = pool.session(), here.session()
        futures = [pool.submit(session, [row]) for row in ([1, 2], [DIE], [3, 4], [5, 6])]
        with pytest.raises(EngineError, match="ended 2 times while they had these rows"):
            futures[1].result(PATIENCE)
        for at, row in ((0, [1, 2]), (2, [3, 4]), (3, [5, 6])):
            lease = futures[at].result(PATIENCE)
            assert pool.payload(session, lease) == here.scored(ours, [row])


def test_more_than_the_cluster_has_is_refused_in_time_with_what_is_free(
    cluster: Cluster, folder: Path
) -> None:
    config = config_of(cluster, folder, replicas=3, replica_cpus=2.0)
    with pytest.raises(ConfigError, match="no room for them") as raised:
        from_config(replace(config, replica_start=timedelta(seconds=0.2)))
    assert raised.value.facts["flag"] == "--replicas"
    assert raised.value.facts["asked"] == "6 CPU, 0 GPU"
    assert "of 4 CPU" in raised.value.message


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)], ids=["drained", "killed"]
)
def test_a_server_scores_by_replicas_shows_them_and_leaves_none_behind(
    cluster: Cluster, folder: Path, tmp_path: Path, number: int, code: int
) -> None:
    settings = tmp_path / "server.yaml"
    settings.write_text(
        f"engine: ray\nreplica_engine: {TEACHER}:make\nreplica_cpus: 0.5\n"
        f"teacher_id: own\nray_address: {cluster.address}\n"
        "transports: shared_memory,stream\n"
    )
    profile = StudentProfile(
        teacher_id="own",
        batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
        top_k=4,
    )
    with testing.serve(folder, config=settings, start_timeout=PATIENCE) as server:
        assert server.readiness["replicas"] == 1
        with connect(server.address) as client, client.open_session(profile) as session:
            assert session.transport == Transport.SHARED_MEMORY
            future = session.score(torch.tensor([[1, 2, 3]]))
            with future.result(timeout=PATIENCE) as payload:
                assert len(payload.columns["topk_ids"]) == 3
        done = forked.run(
            [sys.executable, "-m", "teacher_logits", "inspect", server.address, "--json"],
            timeout=PATIENCE,
        )
        [replica] = json.loads(done.stdout)["replicas"]
        assert (replica["teacher_id"], replica["number"]) == ("own", 0)
        assert (replica["state"], replica["restarts"]) == ("ready", 0)
        assert len(actors("own")) == 1
        os.kill(server.pid, number)
        assert server.wait(PATIENCE) == code
        assert "SIGTERM received" not in server.log_text()  # a stack, by Ray's own handler
        assert "joined a Ray cluster" not in server.log_text()  # which is for ray_object alone
    assert until(lambda: not actors("own"))


def test_a_process_that_has_joined_a_cluster_is_not_given_another(cluster: Cluster) -> None:
    shared = join(address=cluster.address.replace("127.0.0.1", "localhost"), namespace="tests")
    shared.close()
    with pytest.raises(ConfigError, match="has joined the cluster at"):
        join(address="127.0.0.1:9", namespace="tests")


def test_an_address_where_no_cluster_is_is_refused_within_seconds() -> None:
    script = (
        "from teacher_logits_server.replicas.cluster import join\n"
        "join(address='127.0.0.1:9', namespace='tests')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE
    )
    assert "ConfigError: --ray-address 127.0.0.1:9: nobody listens" in done.stderr
