"""The scorer over an engine that works on several passes at once, elsewhere, in any order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.server.test_scorer import PATIENCE, Service, Teacher, check_row, running

from teacher_logits.errors import EngineError, NotAvailable, TeacherLogitsError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.terms import Check, Verdict
from teacher_logits_client import connect
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines.passes import Outcome, PassEngine
from teacher_logits_server.replicas.packing import PackedPart, compute, pack, returned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from teacher_logits.terms import LeaseTerms
    from teacher_logits.views import ReplicaView
    from teacher_logits_server.engines.answers import Part
    from teacher_logits_server.engines.stored import NodeStores


class Elsewhere(Teacher):
    """An engine whose passes come to their end when a test says so."""

    def __init__(self, room: int = 3) -> None:
        super().__init__()
        self.check = Check(name="causality", verdict=Verdict.PASSED, detail="")
        self.is_alive = True
        self.most = room
        self.refusal: TeacherLogitsError | None = None
        self.begun: list[tuple[list[Part], list[PackedPart]]] = []
        self.under_way = 0
        self.settled = True
        self._ready: list[Outcome] = []
        self._changed = threading.Condition()
        self._tell: Callable[[], None] = lambda: None

    @property
    def room(self) -> int:
        with self._changed:
            return self.most - self.under_way

    def start(self, parts: Sequence[Part], *, wanted: Callable[[], bool], deadline: float) -> None:
        with self._changed:
            self.under_way += 1
            self.begun.append((list(parts), [pack(part) for part in parts]))
            self._changed.notify_all()

    def outcomes(self) -> list[Outcome]:
        with self._changed:
            ready, self._ready = self._ready, []
            if not ready:
                self.settled = True
                self._changed.notify_all()
            return ready

    def on_change(self, callback: Callable[[], None]) -> None:
        self._tell = callback

    def may_stay(self, size_bytes: int) -> bool:
        return False

    def promise_room(self, size_bytes: int) -> Callable[[], None]:
        raise AssertionError

    def use_stores(self, stores: NodeStores, *, sharers: int) -> None:
        raise AssertionError

    def store_use(self) -> dict[str, tuple[int, int]]:
        return {}

    def replicas(self) -> tuple[ReplicaView, ...]:
        return ()

    def close(self) -> None:
        pass

    # For tests

    def await_passes(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, PATIENCE)

    def await_settled(self) -> None:
        """Wait until the scorer has done with all outcomes so far."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.settled, PATIENCE)

    def rows_of(self, at: int) -> list[list[int]]:
        _, packed = self.begun[at]
        return [part.token_ids.tolist() for part in packed]

    def answer(self, at: int) -> None:
        parts, packed = self.begun[at]
        scores = returned(packed, compute(Teacher(), packed).returned)
        self.end(Outcome(parts=tuple(parts), scores=scores))

    def fail(self, at: int, error: Exception, *, final: bool = False) -> None:
        self.end(Outcome(parts=tuple(self.begun[at][0]), error=error, final=final))

    def end(self, outcome: Outcome) -> None:
        with self._changed:
            self.under_way -= 1
            self.settled = False
            self._ready.append(outcome)
        self._tell()

    def refuse(self, error: TeacherLogitsError) -> None:
        self.refusal = error
        self._tell()


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere()


@pytest.fixture
def service(elsewhere: Elsewhere) -> Iterator[Service]:
    with running(Service(teacher=elsewhere, max_batch_tokens=4)) as made:
        yield made


def submit(service: Service, session: str, *rows: list[int]) -> Future[LeaseTerms]:
    return service.scorer.submit(service.job(session, rows))


def check(service: Service, session: str, future: Future[LeaseTerms], *rows: list[int]) -> None:
    columns, at = service.columns(session, future.result(PATIENCE)), 0
    for row in rows:
        check_row(columns, at, row)
        at += len(row)


def test_such_an_engine_is_told_from_one_that_gives_logits(elsewhere: Elsewhere) -> None:
    assert isinstance(elsewhere, PassEngine)
    assert not isinstance(Teacher(), PassEngine)


def test_passes_are_under_way_at_once_and_end_in_any_order(
    service: Service, elsewhere: Elsewhere
) -> None:
    session, rows = service.session(), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    futures = []
    for at, row in enumerate(rows):
        futures.append(submit(service, session, row))
        elsewhere.await_passes(at + 1)
    for at in (2, 0, 1):
        elsewhere.answer(at)
        check(service, session, futures[at], rows[at])
        assert sum(future.done() for future in futures) == [2, 0, 1].index(at) + 1


def test_no_more_are_started_than_there_is_room_for(service: Service, elsewhere: Elsewhere) -> None:
    elsewhere.most = 1
    session = service.session()
    first = submit(service, session, [1, 2, 3])
    elsewhere.await_passes(1)
    second = submit(service, session, [4, 5, 6])
    assert service.scorer.queue().waiting_requests == 1
    elsewhere.answer(0)
    check(service, session, first, [1, 2, 3])
    elsewhere.await_passes(2)
    elsewhere.answer(1)
    check(service, session, second, [4, 5, 6])


def test_a_request_of_many_rows_is_whole_when_its_passes_come_back_in_any_order(
    service: Service, elsewhere: Elsewhere
) -> None:
    session, rows = service.session(), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    future = submit(service, session, *rows)
    elsewhere.await_passes(3)
    elsewhere.answer(2)
    elsewhere.answer(0)
    assert not future.done()
    elsewhere.answer(1)
    check(service, session, future, *rows)


def test_a_request_given_up_has_its_room_free_at_once_and_what_comes_later_is_not_written(
    elsewhere: Elsewhere,
) -> None:
    """Its room is somebody else's by then."""
    with running(Service(teacher=elsewhere, max_batch_tokens=4, pool_size_bytes=4096)) as service:
        session = service.session()
        given_up = submit(service, session, [1, 2, 3])
        elsewhere.await_passes(1)
        in_its_place = submit(service, session, [4, 5, 6])
        assert service.slabs.was_full.wait(PATIENCE)
        assert given_up.cancel()
        elsewhere.await_passes(2)
        assert elsewhere.rows_of(1) == [[4, 5, 6]]
        elsewhere.answer(1)
        check(service, session, in_its_place, [4, 5, 6])
        elsewhere.answer(0)
        elsewhere.await_settled()
        check(service, session, in_its_place, [4, 5, 6])


def test_requests_of_a_pass_that_fails_are_each_tried_alone(elsewhere: Elsewhere) -> None:
    service = Service(teacher=elsewhere)
    session = service.session()
    futures = [submit(service, session, row) for row in ([1, 2], [3, 4])]
    with running(service):
        elsewhere.await_passes(1)
        assert elsewhere.rows_of(0) == [[1, 2], [3, 4]]
        elsewhere.fail(0, ArithmeticError("words that must not leave the server"))
        elsewhere.await_passes(3)
        elsewhere.fail(1, ArithmeticError("words that must not leave the server"))
        elsewhere.answer(2)
        check(service, session, futures[1], [3, 4])
        with pytest.raises(EngineError, match="failed on these 1 rows"):
            futures[0].result(PATIENCE)


def test_what_failed_for_good_is_not_tried_again_and_says_why(elsewhere: Elsewhere) -> None:
    service = Service(teacher=elsewhere)
    session = service.session()
    futures = [submit(service, session, row) for row in ([1, 2], [3, 4])]
    with running(service):
        elsewhere.await_passes(1)
        elsewhere.fail(0, EngineError("two replicas ended"), final=True)
        for future in futures:
            with pytest.raises(EngineError, match="two replicas ended"):
                future.result(PATIENCE)
        assert len(elsewhere.begun) == 1
        assert service.used_bytes == 0


def test_while_nothing_can_be_computed_what_waits_and_what_comes_is_told_why(
    service: Service, elsewhere: Elsewhere
) -> None:
    elsewhere.most = 0
    session = service.session()
    waiting = submit(service, session, [1, 2])
    elsewhere.refuse(EngineError("no replica is up"))
    with pytest.raises(EngineError, match="no replica is up"):
        waiting.result(PATIENCE)
    with pytest.raises(EngineError, match="no replica is up"):
        submit(service, session, [1, 2])
    elsewhere.refusal, elsewhere.most = None, 1
    served = submit(service, session, [1, 2])
    elsewhere.await_passes(1)
    elsewhere.answer(0)
    check(service, session, served, [1, 2])


def test_what_nobody_wanted_is_not_handed_out(service: Service, elsewhere: Elsewhere) -> None:
    session = service.session()
    future = submit(service, session, [1, 2])
    elsewhere.await_passes(1)
    elsewhere.end(Outcome(parts=tuple(elsewhere.begun[0][0]), unwanted=True))
    service.clock.advance(1000.0)
    elsewhere.refuse(EngineError("ring"))
    assert isinstance(future.exception(PATIENCE), TeacherLogitsError)
    assert service.used_bytes == 0


class TestAServerWhoseReplicasAreAllDown:
    def test_serves_nobody_where_it_has_no_other_teacher(self, tmp_path: Path) -> None:
        config = ServerConfig(listen=(f"unix:{tmp_path / 's'}",), pool_size_bytes=1 << 20)
        with (
            serve_in_thread(config, Elsewhere()) as server,
            pytest.raises(NotAvailable),
            connect(server.address, timeout=0.2),
        ):
            pass

    def test_serves_the_students_of_another_teacher(self, tmp_path: Path) -> None:
        config = ServerConfig(listen=(f"unix:{tmp_path / 's'}",), pool_size_bytes=1 << 20)
        grid = BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
        profile = StudentProfile(batch_grid=grid, teacher_id="here", top_k=2)
        with (
            serve_in_thread(config, {"there": Elsewhere(), "here": Teacher()}) as server,
            connect(server.address, timeout=PATIENCE) as client,
            client.open_session(profile) as session,
            session.score([[1, 2]]).result(timeout=PATIENCE) as payload,
        ):
            assert len(payload.columns["topk_ids"]) == 2
