"""The scorer over the real ledger, slabs and selection: right answers, and nothing lost on the way.

The teacher is a small recurrence, so that every answer can be computed again, position by
position, in double precision.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from array import array
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import pytest
import torch

from teacher_logits import keys
from teacher_logits.clock import ManualClock
from teacher_logits.digest import row_digest
from teacher_logits.errors import (
    DeadlinePassedError,
    DrainingError,
    EngineError,
    EpochChangedError,
    LimitReachedError,
    PayloadInvalidError,
    PoolFullError,
    RequestInvalidError,
    SessionExpiredError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType, RowStatus
from teacher_logits.profiles import (
    PROTOCOL_VERSION,
    StudentProfile,
    TeacherProfile,
    VocabularyPolicy,
)
from teacher_logits.tensors import column_tensors
from teacher_logits.transport import Transport
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import EngineProfile, Row
from teacher_logits_server.ledger import Ledger
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.scorer import BadRows, ScoreJob, Scorer, at_exit
from teacher_logits_server.slabs import ServerSlabs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_server.slabs import RoomLedger

VOCABULARY, HEAD_ROWS = 50, 56
PATIENCE = 30.0
Columns = dict[ColumnKind, torch.Tensor]


def recurrence(token_ids: Sequence[int]) -> torch.Tensor:
    """The teacher's logits [L, HEAD_ROWS], each from the tokens up to its position."""
    state = torch.zeros(HEAD_ROWS, dtype=torch.float64)
    places = torch.arange(HEAD_ROWS, dtype=torch.float64)
    rows = []
    for token in token_ids:
        state = 0.5 * state + 4.0 * torch.sin((token + 1.0) * (places + 1.0) * 0.37)
        rows.append(state)
    return torch.stack(rows).float()


class Teacher:
    """An engine of few lines, which notes its passes and can be held up or made to fail."""

    def __init__(self, chunk: int = 3) -> None:
        self.profile = EngineProfile(
            name="recurrence",
            vocabulary_size=VOCABULARY,
            head_rows=HEAD_ROWS,
            max_row_tokens=64,
            arithmetic_type="float64",
        )
        self.chunk = chunk
        self.passes: list[list[list[int]]] = []
        self.chunks = 0
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.spoil: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits
        self.poisonous: set[int] = set()

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        self.passes.append([row.token_ids.tolist() for row in rows])
        self.entered.release()
        if not self.gate.wait(PATIENCE):
            raise TimeoutError
        if any(self.poisonous.intersection(row.token_ids.tolist()) for row in rows):
            raise ArithmeticError("words that must not leave the server")
        wanted = [
            recurrence(row.token_ids.tolist())[row.first : row.first + row.count] for row in rows
        ]
        for chunk in self.spoil(torch.cat(wanted)).split(self.chunk):
            self.chunks += 1
            yield chunk


class Slabs(ServerSlabs):
    """Slabs that tell when room was asked for in vain."""

    def __init__(self) -> None:
        super().__init__(epoch="0123456789ab")
        self.was_full = threading.Event()

    def room_for(self, ledger: RoomLedger, size_bytes: int) -> Extent:
        try:
            return super().room_for(ledger, size_bytes)
        except PoolFullError:
            self.was_full.set()
            raise


class Service:
    """Everything that a scorer needs, with sessions that stream."""

    def __init__(self, *, teacher: Teacher | None = None, **settings: int) -> None:
        self.teacher = teacher or Teacher()
        self.clock = ManualClock(1000.0)
        self.slabs = Slabs()
        self.config = replace(
            ServerConfig(pool_size_bytes=1 << 20, slab_size_bytes=1 << 20),
            **settings,  # type: ignore[arg-type]
        )
        self.ledger = self.make_ledger()
        self.scorer = Scorer(
            engine=self.teacher,
            ledger=self.ledger,
            slabs=self.slabs,
            config=self.config,
            clock=self.clock,
        )

    def make_ledger(self) -> Ledger:
        return Ledger(
            epoch=keys.new_epoch(),
            limits=self.config,
            engines=(
                EngineTeacher(
                    profile=TeacherProfile(
                        teacher_id="teacher",
                        vocabulary_size=VOCABULARY,
                        head_rows=HEAD_ROWS,
                        top_k=VOCABULARY,
                        max_row_tokens=self.teacher.profile.max_row_tokens,
                        revision="r1",
                    )
                ),
            ),
            clock=self.clock,
            slots=self.slabs,
            offered=frozenset({Transport.STREAM}),
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
            request_id=f"open-{random.random()}",
            protocol_version=PROTOCOL_VERSION,
            profile=profile,
        )
        session_id = opened.terms.session_id
        self.ledger.prove_locality(session_id, proofs={}, failures=[])
        return session_id

    def job(self, session_id: str, rows: Sequence[Sequence[int]], **more: object) -> ScoreJob:
        return replace(
            ScoreJob(
                session_id=session_id,
                request_id=f"score-{random.random()}",
                input_ids=flat(rows),
                row_lengths=tuple(len(row) for row in rows),
                deadline=self.clock.now() + 60.0,
            ),
            **more,  # type: ignore[arg-type]
        )

    def columns(self, session_id: str, lease: LeaseTerms) -> Columns:
        with self.ledger.pin(session_id, lease.lease_id) as pinned:
            room = bytes(self.slabs.room(pinned.room))
        return column_tensors(bytearray(room), pinned.payload.columns)

    def scored(self, session_id: str, rows: Sequence[Sequence[int]], **more: object) -> Columns:
        lease = self.scorer.submit(self.job(session_id, rows, **more)).result(PATIENCE)
        return self.columns(session_id, lease)

    @property
    def used_bytes(self) -> int:
        return self.ledger.view().pool.used_bytes


def flat(rows: Sequence[Sequence[int]]) -> bytes:
    return b"".join(array("i", row).tobytes() for row in rows)


@pytest.fixture
def service() -> Iterator[Service]:
    with running(Service()) as made:
        yield made


@contextmanager
def running(service: Service) -> Iterator[Service]:
    service.scorer.start()
    try:
        yield service
    finally:
        service.teacher.gate.set()
        service.scorer.stop()
        service.slabs.close()


def dense(
    token_ids: Sequence[int], *, vocabulary: int = VOCABULARY, t: float = 1.0
) -> torch.Tensor:
    return (recurrence(token_ids)[:, :vocabulary].double() / t).log_softmax(-1)


def check_row(
    columns: Columns,
    at: int,
    token_ids: Sequence[int],
    *,
    vocabulary: int = VOCABULARY,
    temperatures: tuple[float, ...] = (1.0,),
    tolerance: float = 1e-5,
) -> None:
    """Compare the positions from ``at`` on with the dense answer for a row without prefix."""
    logprobs = dense(token_ids, vocabulary=vocabulary)
    here = slice(at, at + len(token_ids))
    ids = columns[ColumnKind.TOPK_IDS][here].long()
    k = ids.shape[1]
    best = logprobs.sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, best.indices[:, :k])
    given = columns[ColumnKind.TOPK_LOGPROBS][here].double()
    assert torch.allclose(given, best.values[:, :k], atol=tolerance, rtol=0)
    for column, temperature in enumerate(temperatures):
        at_t = dense(token_ids, vocabulary=vocabulary, t=temperature)
        tail = at_t.scatter(1, ids, -torch.inf).logsumexp(1)
        assert torch.allclose(columns[ColumnKind.LOG_TAIL][here, column].double(), tail, atol=1e-4)
        lse = (recurrence(token_ids)[:, :vocabulary].double() / temperature).logsumexp(1)
        assert torch.allclose(columns[ColumnKind.LOGSUMEXP][here, column].double(), lse, atol=1e-4)
    actual = [float(logprobs[s, token]) for s, token in enumerate(token_ids[1:])] + [0.0]
    assert torch.allclose(
        columns[ColumnKind.ACTUAL_LOGPROB][here].double(),
        torch.tensor(actual, dtype=torch.float64),
        atol=1e-4,
    )


class TestAnswers:
    def test_ragged_rows_come_back_with_true_log_probabilities(self, service: Service) -> None:
        rows = [[1, 2, 3, 4, 5], [7], [9, 9, 8]]
        session = service.session()
        lease = service.scorer.submit(service.job(session, rows)).result(PATIENCE)
        columns = service.columns(session, lease)
        for at, row in zip((0, 5, 6), rows, strict=True):
            check_row(columns, at, row)
        assert columns[ColumnKind.ROW_OFFSETS].tolist() == [0, 5, 6, 9]
        assert columns[ColumnKind.ROW_WINDOWS].tolist() == [[0, 5], [0, 1], [0, 3]]
        assert columns[ColumnKind.ROW_STATUS].tolist() == [RowStatus.OK] * 3
        digests = [bytes(each.tolist()) for each in columns[ColumnKind.ROW_DIGESTS]]
        assert digests == [row_digest(row) for row in rows]
        payload = lease.payload
        assert (payload.row_count, payload.position_count, payload.top_k) == (3, 9, 8)
        assert (payload.teacher_id, payload.teacher_revision) == ("teacher", "r1")
        assert payload.vocabulary_size == VOCABULARY

    def test_requests_that_differ_in_everything_share_a_pass_and_each_gets_its_own_answer(
        self,
    ) -> None:
        service = Service()
        row = [3, 1, 4, 1, 5, 9, 2, 6]
        wishes: list[dict[str, object]] = [
            {"top_k": 16},
            {"top_k": 3, "temperatures": (2.0, 0.5)},
            {"top_k": 5, "value_type": ElementType.FLOAT16},
            {
                "top_k": 40,
                "vocabulary_size": 40,
                "vocabulary_policy": VocabularyPolicy.TRUNCATE,
            },
        ]
        sessions = [service.session(**each) for each in wishes]
        futures = [service.scorer.submit(service.job(session, [row])) for session in sessions]
        with running(service):
            leases = [future.result(PATIENCE) for future in futures]
            answers = [
                service.columns(session, lease)
                for session, lease in zip(sessions, leases, strict=True)
            ]
        assert service.teacher.passes == [[row] * 4]
        check_row(answers[0], 0, row)
        check_row(answers[1], 0, row, temperatures=(1.0, 2.0, 0.5))
        check_row(answers[2], 0, row, tolerance=2e-2)
        assert answers[2][ColumnKind.TOPK_LOGPROBS].dtype == torch.float16
        check_row(answers[3], 0, row, vocabulary=40)
        assert leases[3].payload.vocabulary_size == 40

    def test_a_prefix_is_seen_by_the_teacher_alone(self, service: Service) -> None:
        prefixes, rows = [[40, 41, 42], [], [43]], [[1, 2], [3, 4, 5], [6]]
        columns = service.scored(
            service.session(),
            rows,
            prefix_ids=flat(prefixes),
            prefix_lengths=tuple(len(each) for each in prefixes),
        )
        seen = torch.cat([dense([*p, *r])[len(p) :] for p, r in zip(prefixes, rows, strict=True)])
        given = columns[ColumnKind.TOPK_LOGPROBS].double()
        assert torch.allclose(given, seen.topk(8).values, atol=1e-5)
        actual = [float(seen[0, 2]), 0.0, float(seen[2, 4]), float(seen[3, 5]), 0.0, 0.0]
        assert columns[ColumnKind.ACTUAL_LOGPROB].tolist() == pytest.approx(actual, abs=1e-4)
        assert bytes(columns[ColumnKind.ROW_DIGESTS][0].tolist()) == row_digest([1, 2])

    def test_only_the_positions_asked_for_are_scored(self, service: Service) -> None:
        rows = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10]]
        windows = ((1, 2), (0, 0), (1, 1))
        columns = service.scored(service.session(), rows, row_windows=windows)
        seen = torch.cat([dense(rows[0])[1:3], dense(rows[2])[1:2]])
        given = columns[ColumnKind.TOPK_LOGPROBS].double()
        assert torch.allclose(given, seen.topk(8).values, atol=1e-5)
        actual = [float(seen[0, 3]), float(seen[1, 4]), 0.0]
        assert columns[ColumnKind.ACTUAL_LOGPROB].tolist() == pytest.approx(actual, abs=1e-4)
        assert columns[ColumnKind.ROW_OFFSETS].tolist() == [0, 2, 2, 3]
        assert columns[ColumnKind.ROW_WINDOWS].tolist() == [list(each) for each in windows]
        # Nothing behind the last wanted position, and no row without one, costs the engine.
        assert service.teacher.passes == [[[1, 2, 3], [9, 10]]]

    def test_a_request_without_any_wanted_position_is_answered_without_the_teacher(
        self, service: Service
    ) -> None:
        columns = service.scored(service.session(), [[1, 2]], row_windows=((2, 0),))
        assert columns[ColumnKind.TOPK_IDS].shape == (0, 8)
        assert service.teacher.passes == []

    @pytest.mark.parametrize("k", [1, 2, 9, 10, 20, 21, VOCABULARY - 1, VOCABULARY])
    def test_every_k_gets_as_many_entries(self, service: Service, k: int) -> None:
        columns = service.scored(service.session(top_k=k), [[1, 2, 3], [4]])
        assert columns[ColumnKind.TOPK_IDS].shape == (4, k)
        check_row(columns, 0, [1, 2, 3])
        check_row(columns, 3, [4])

    def test_k_may_be_the_whole_vocabulary(self, service: Service) -> None:
        columns = service.scored(service.session(top_k=VOCABULARY), [[1, 2, 3]])
        check_row(columns, 0, [1, 2, 3])
        assert columns[ColumnKind.LOG_TAIL].tolist() == [[-torch.inf]] * 3

    def test_a_request_larger_than_a_pass_is_put_together_from_several(self) -> None:
        rows = [[row, row + 1, row + 2, row + 3] for row in range(10)]
        with running(Service(max_batch_tokens=12)) as service:
            columns = service.scored(service.session(), rows)
        assert [len(each) for each in service.teacher.passes] == [3, 3, 3, 1]
        for number, row in enumerate(rows):
            check_row(columns, 4 * number, row)


def spoil_row(value: float, position: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(logits: torch.Tensor) -> torch.Tensor:
        logits[position, ...] = value if value == -torch.inf else logits[position]
        logits[position, 7] = value
        return logits

    return spoil


BAD_VALUES = [
    pytest.param(torch.nan, RowStatus.NAN, "a NaN", id="nan"),
    pytest.param(torch.inf, RowStatus.POSITIVE_INFINITY, r"a \+inf", id="inf"),
    pytest.param(-torch.inf, RowStatus.EMPTY_SUPPORT, "nothing finite", id="empty"),
]


class TestBadRows:
    @pytest.mark.parametrize(("value", "status", "words"), BAD_VALUES)
    def test_a_bad_row_fails_its_request_by_name_and_no_neighbour(
        self, value: float, status: RowStatus, words: str
    ) -> None:
        service = Service()
        service.teacher.spoil = spoil_row(value, 4)  # row 1, position 1 of the first request
        bad, good = service.session(), service.session()
        failing = service.scorer.submit(service.job(bad, [[1, 2, 3], [4, 5, 6]]))
        passing = service.scorer.submit(service.job(good, [[7, 8]]))
        with running(service):
            with pytest.raises(PayloadInvalidError, match=f"row 1 hold {words}.*bad_rows") as told:
                failing.result(PATIENCE)
            lease = passing.result(PATIENCE)
            check_row(service.columns(good, lease), 0, [7, 8])
            service.ledger.release(good, lease.lease_id)
            assert service.used_bytes == 0
        assert told.value.facts == {
            "row": 1,
            "position": 1,
            "row_status": int(status),
            "bad_rows": 1,
        }
        assert len(service.teacher.passes) == 1

    @pytest.mark.parametrize(("value", "status", "words"), BAD_VALUES)
    def test_a_masked_row_is_canonical_and_counted(
        self, service: Service, value: float, status: RowStatus, words: str
    ) -> None:
        del words
        service.teacher.spoil = spoil_row(value, 4)
        session = service.session()
        job = service.job(session, [[1, 2, 3], [4, 5, 6]], bad_rows=BadRows.MASK)
        lease = service.scorer.submit(job).result(PATIENCE)
        columns = service.columns(session, lease)
        assert lease.payload.bad_row_count == 1
        assert columns[ColumnKind.ROW_STATUS].tolist() == [RowStatus.OK, status]
        check_row(columns, 0, [1, 2, 3])
        assert bool((columns[ColumnKind.TOPK_IDS][3:] == -1).all())
        for kind in (
            ColumnKind.TOPK_LOGPROBS,
            ColumnKind.LOG_TAIL,
            ColumnKind.LOGSUMEXP,
            ColumnKind.ACTUAL_LOGPROB,
        ):
            assert bool((columns[kind][3:] == 0).all()), kind


class TestFailingTeacher:
    def test_its_words_stay_in_the_log_and_the_scorer_lives_on(
        self, service: Service, caplog: pytest.LogCaptureFixture
    ) -> None:
        service.teacher.poisonous = {13}
        session = service.session()
        with caplog.at_level(logging.WARNING), pytest.raises(EngineError) as told:
            service.scored(session, [[1, 13]])
        assert "words that must not leave" not in str(told.value)
        assert "words that must not leave" in caplog.text
        assert service.used_bytes == 0
        check_row(service.scored(session, [[1, 2]]), 0, [1, 2])
        assert service.scorer.healthy

    def test_the_neighbours_of_a_request_that_it_fails_on_are_answered(self) -> None:
        service = Service()
        service.teacher.poisonous = {13}
        session = service.session()
        futures = [
            service.scorer.submit(service.job(session, rows))
            for rows in ([[1, 2]], [[13]], [[3, 4]])
        ]
        with running(service):
            with pytest.raises(EngineError):
                futures[1].result(PATIENCE)
            check_row(service.columns(session, futures[0].result(PATIENCE)), 0, [1, 2])
            check_row(service.columns(session, futures[2].result(PATIENCE)), 0, [3, 4])

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            pytest.param(lambda logits: logits[:, :-1], "logits (3, 55), not", id="too narrow"),
            pytest.param(lambda logits: logits[:-1], "gave 3 positions for 4", id="too few"),
            pytest.param(
                lambda logits: logits.repeat(2, 1), "3 positions where 1 were", id="too many"
            ),
            pytest.param(lambda logits: logits.double(), "float64", id="wrong type"),
        ],
    )
    def test_logits_that_are_not_those_asked_for_are_no_answer(
        self,
        service: Service,
        caplog: pytest.LogCaptureFixture,
        spoil: Callable[[torch.Tensor], torch.Tensor],
        words: str,
    ) -> None:
        service.teacher.spoil = spoil
        with pytest.raises(EngineError):
            service.scored(service.session(), [[1, 2, 3, 4]])
        assert words in caplog.text
        assert service.used_bytes == 0

    def test_a_dead_thread_shows_and_leaves_nobody_waiting(
        self, service: Service, caplog: pytest.LogCaptureFixture
    ) -> None:
        def die(logits: torch.Tensor) -> torch.Tensor:
            raise SystemExit

        session = service.session()
        assert service.scorer.healthy
        service.teacher.spoil = die
        service.teacher.gate.clear()
        running_one = service.scorer.submit(service.job(session, [[1]]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        waiting_one = service.scorer.submit(service.job(session, [[2]]))
        service.teacher.gate.set()
        for future in (running_one, waiting_one):
            with pytest.raises(EngineError, match="restart the server"):
                future.result(PATIENCE)
        service.scorer.stop()
        assert not service.scorer.healthy
        assert service.used_bytes == 0
        assert "the scorer's thread died" in caplog.text
        with pytest.raises(EngineError, match="restart the server"):
            service.scorer.submit(service.job(session, [[3]]))


class TestGivingUp:
    def test_a_cancelled_request_gives_its_place_back_and_is_never_computed(
        self, service: Service
    ) -> None:
        session = service.session()
        service.teacher.gate.clear()
        first = service.scorer.submit(service.job(session, [[1]]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        second = service.scorer.submit(service.job(session, [[2, 2]]))
        assert service.scorer.queue().waiting_requests == 1
        assert second.cancel()
        assert service.scorer.queue().waiting_requests == 0
        service.teacher.gate.set()
        first.result(PATIENCE)
        service.scored(session, [[3]])
        assert service.teacher.passes == [[[1]], [[3]]]
        with pytest.raises(CancelledError):
            second.result(0)

    def test_a_request_cancelled_under_way_gives_its_room_back(self, service: Service) -> None:
        session = service.session()
        service.teacher.gate.clear()
        future = service.scorer.submit(service.job(session, [[1, 2, 3, 4, 5, 6, 7]]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        assert service.used_bytes > 0
        assert future.cancel()
        service.teacher.gate.set()
        service.scored(session, [[3]])  # behind it in the queue
        assert service.ledger.lease_count() == 1
        assert service.ledger.view().pool.extent_count == 1

    def test_a_pass_that_nobody_waits_for_ends_at_its_next_chunk(self, service: Service) -> None:
        session = service.session()

        def give_up(logits: torch.Tensor) -> torch.Tensor:
            future.cancel()
            return logits

        service.teacher.spoil = give_up
        service.teacher.gate.clear()
        future = service.scorer.submit(service.job(session, [list(range(1, 31))]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        service.teacher.gate.set()
        service.scored(session, [[3]])
        assert service.teacher.chunks == 1 + 1  # of the ten, and the one of the last request
        assert service.ledger.lease_count() == 1

    def test_a_lease_that_nobody_waited_for_any_more_is_returned(self, service: Service) -> None:
        session = service.session()
        publish = service.ledger.publish
        at_last_moment = threading.Event()

        def publish_late(**what: object) -> LeaseTerms:
            if not at_last_moment.is_set():
                future.cancel()
                at_last_moment.set()
            return publish(**what)  # type: ignore[arg-type]

        service.ledger.publish = publish_late  # type: ignore[method-assign]
        service.teacher.gate.clear()
        future = service.scorer.submit(service.job(session, [[1, 2]]))
        service.teacher.gate.set()
        assert at_last_moment.wait(PATIENCE)
        service.scored(session, [[3]])
        assert service.ledger.lease_count() == 1

    def test_a_request_that_waited_past_its_deadline_is_told_so(self, service: Service) -> None:
        session = service.session()
        service.teacher.gate.clear()
        first = service.scorer.submit(service.job(session, [[1]]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        now = service.clock.now()
        second = service.scorer.submit(service.job(session, [[2, 2]], deadline=now + 5))
        service.clock.advance(7.5)
        service.teacher.gate.set()
        with pytest.raises(DeadlinePassedError, match=r"2 tokens after 7\.5 s") as told:
            second.result(PATIENCE)
        assert told.value.facts == {"waited_seconds": 7.5, "tokens": 2}
        first.result(PATIENCE)
        assert service.teacher.passes == [[[1]]]

    def test_a_request_that_was_computed_too_late_gives_its_room_back(
        self, service: Service
    ) -> None:
        session = service.session()
        service.teacher.gate.clear()
        late = service.scorer.submit(service.job(session, [[1]], deadline=service.clock.now() + 5))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        service.clock.advance(5)
        service.teacher.gate.set()
        with pytest.raises(DeadlinePassedError):
            late.result(PATIENCE)
        assert service.used_bytes == 0
        assert service.ledger.lease_count() == 0

    def test_a_session_that_ended_meanwhile_is_told_so_and_holds_no_room(
        self, service: Service
    ) -> None:
        session, other = service.session(), service.session()
        service.teacher.gate.clear()
        under_way = service.scorer.submit(service.job(session, [[1]]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        waiting = service.scorer.submit(service.job(session, [[2]]))
        service.ledger.close_session(session)
        service.teacher.gate.set()
        for future in (under_way, waiting):
            with pytest.raises(SessionExpiredError):
                future.result(PATIENCE)
        assert service.used_bytes == 0
        service.scored(other, [[3]])
        assert service.teacher.passes == [[[1]], [[3]]]

    def test_the_end_of_the_program_stops_it_behind_its_pass(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread that is killed inside torch aborts the process."""
        started = WeakKeyDictionary({service.scorer: os.getpid()})
        monkeypatch.setattr(at_exit, "_started", started)
        service.teacher.gate.clear()
        future = service.scorer.submit(service.job(service.session(), [[1, 2, 3]]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        ending = threading.Thread(target=at_exit._stop_all)
        ending.start()
        service.teacher.gate.set()
        ending.join(PATIENCE)

        assert not service.scorer.healthy
        assert future.result(PATIENCE).payload.row_count == 1

    def test_a_forked_child_has_none_to_stop(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(at_exit, "_started", WeakKeyDictionary({service.scorer: -1}))
        at_exit._stop_all()
        assert service.scorer.healthy

    def test_stopping_fails_what_waits_and_ends_the_thread(self, service: Service) -> None:
        session = service.session()
        service.teacher.gate.clear()
        first = service.scorer.submit(service.job(session, [[1]]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        second = service.scorer.submit(service.job(session, [[2]]))
        stopping = threading.Thread(target=service.scorer.stop)
        stopping.start()
        while service.scorer._queue._closed is None:
            pass  # else the second may be taken before anybody has asked for an end
        service.teacher.gate.set()
        stopping.join(PATIENCE)
        first.result(0)
        with pytest.raises(DrainingError):
            second.result(0)
        assert not service.scorer.healthy
        with pytest.raises(DrainingError):
            service.scorer.submit(service.job(session, [[3]]))

    def test_a_draining_server_scores_nothing_new(self, service: Service) -> None:
        session = service.session()
        service.ledger.drain()
        with pytest.raises(DrainingError, match="draining"):
            service.scorer.submit(service.job(session, [[3]]))


class TestFullPool:
    def test_a_request_waits_till_room_comes_free(self) -> None:
        with running(Service(pool_size_bytes=8192, slab_size_bytes=8192)) as service:
            session = service.session()
            rows = [list(range(1, 41))]
            lease = service.scorer.submit(service.job(session, rows)).result(PATIENCE)
            second = service.scorer.submit(service.job(session, rows))
            assert service.slabs.was_full.wait(PATIENCE)
            assert service.scorer.queue().waiting_requests == 1
            service.ledger.release(session, lease.lease_id)
            check_row(service.columns(session, second.result(PATIENCE)), 0, rows[0])

    def test_a_smaller_request_passes_one_that_waits_for_room(self) -> None:
        with running(Service(pool_size_bytes=12288, slab_size_bytes=12288)) as service:
            session = service.session()
            rows = [list(range(1, 41))]
            lease = service.scorer.submit(service.job(session, rows)).result(PATIENCE)
            large = service.scorer.submit(service.job(session, rows))
            assert service.slabs.was_full.wait(PATIENCE)
            small = service.scorer.submit(service.job(session, [[1]]))
            small.result(PATIENCE)
            assert not large.done()
            service.ledger.release(session, lease.lease_id)
            large.result(PATIENCE)

    def test_at_its_deadline_it_is_told_how_full_the_pool_is(self) -> None:
        with running(Service(pool_size_bytes=8192, slab_size_bytes=8192)) as service:
            session = service.session()
            rows = [list(range(1, 41))]
            service.scorer.submit(service.job(session, rows)).result(PATIENCE)
            deadline = service.clock.now() + 5
            second = service.scorer.submit(service.job(session, rows, deadline=deadline))
            assert service.slabs.was_full.wait(PATIENCE)
            service.clock.advance(6)
            # Its own timer runs by the machine's clock; another request wakes the thread as well.
            third = service.scorer.submit(service.job(session, rows))
            with pytest.raises(PoolFullError, match=r"after 6 s of waiting for room") as told:
                second.result(PATIENCE)
            third.cancel()
        assert told.value.facts["need_bytes"] == 8192
        assert told.value.facts["budget_bytes"] == 8192
        assert told.value.facts["waited_seconds"] == 6.0
        assert told.value.retry_after is not None


class TestRetries:
    def test_a_retry_joins_the_request_under_way(self, service: Service) -> None:
        session = service.session()
        service.teacher.gate.clear()
        job = service.job(session, [[1, 2]])
        first = service.scorer.submit(job)
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        second = service.scorer.submit(job)
        assert first.cancel()  # the first call is gone, the second still waits
        service.teacher.gate.set()
        lease = second.result(PATIENCE)
        assert service.scorer.submit(job).result(0) == lease
        assert service.teacher.passes == [[[1, 2]]]
        assert service.ledger.lease_count() == 1

    def test_other_rows_under_an_id_that_is_at_work_are_refused(self, service: Service) -> None:
        session = service.session()
        service.teacher.gate.clear()
        job = service.job(session, [[1, 2]])
        first = service.scorer.submit(job)
        other = replace(service.job(session, [[3, 4]]), request_id=job.request_id, digest=b"other")
        with pytest.raises(RequestInvalidError, match="other rows"):
            service.scorer.submit(other)  # under way
        service.teacher.gate.set()
        first.result(PATIENCE)
        with pytest.raises(RequestInvalidError, match="other rows"):
            service.scorer.submit(other)  # leased

    def test_a_retry_after_all_callers_were_gone_is_computed_anew(self, service: Service) -> None:
        session = service.session()
        service.teacher.gate.clear()
        job = service.job(session, [[1, 2]])
        assert service.scorer.submit(job).cancel()
        retry = service.scorer.submit(job)
        service.teacher.gate.set()
        check_row(service.columns(session, retry.result(PATIENCE)), 0, [1, 2])


REFUSALS = [
    pytest.param({"input_ids": b"", "row_lengths": ()}, "batch is empty", id="empty batch"),
    pytest.param(
        {"input_ids": flat([[1, 2]]), "row_lengths": (2, 0)},
        "row 1 has length 0: a row has at least one token",
        id="empty row",
    ),
    pytest.param({"row_lengths": (4, -1)}, "row 1 has length -1", id="negative length"),
    pytest.param(
        {"row_lengths": (4,)}, "4 tokens, which take 16 bytes, and 12 bytes", id="longer than sent"
    ),
    pytest.param({"input_ids": flat([[1, 2]]) + b"x"}, "and 9 bytes", id="torn ids"),
    pytest.param(
        {"input_ids": flat([[1, VOCABULARY, 3]])},
        f"row 0 has id {VOCABULARY} at position 1, outside the vocabulary of {VOCABULARY}",
        id="padded id",
    ),
    pytest.param(
        {"input_ids": flat([[1, 2], [-1]]), "row_lengths": (2, 1)},
        "row 1 has id -1 at position 0",
        id="negative id",
    ),
    pytest.param(
        {"prefix_ids": flat([[1, 77]]), "prefix_lengths": (2,)},
        "prefix of row 0 has id 77 at position 1",
        id="prefix id",
    ),
    pytest.param(
        {"prefix_ids": flat([[1]]), "prefix_lengths": (1, 0)},
        "prefix_lengths has 2 entries for 1 rows",
        id="prefix count",
    ),
    pytest.param({"prefix_ids": flat([[1]])}, "4 bytes of ids came", id="prefix without length"),
    pytest.param(
        {"prefix_ids": flat([[1] * 62]), "prefix_lengths": (62,)},
        "row 0 has 3 tokens behind a prefix of 62, and the teacher reads 64 at most",
        id="too long with prefix",
    ),
    pytest.param(
        {"input_ids": flat([[1] * 65]), "row_lengths": (65,)},
        "row 0 has 65 tokens, and the teacher reads 64 at most",
        id="too long",
    ),
    pytest.param({"row_windows": ((0, 1), (0, 1))}, "row_windows has 2 entries", id="windows"),
    pytest.param({"row_windows": ((2, 2),)}, "positions 2 to 4 were asked", id="window end"),
    pytest.param({"row_windows": ((-1, 2),)}, "positions -1 to 1 were asked", id="window start"),
    pytest.param({"row_windows": ((1, -1),)}, "positions 1 to 0 were asked", id="window size"),
]


class TestRefusals:
    @pytest.mark.parametrize(("changes", "words"), REFUSALS)
    def test_what_makes_no_sense_is_refused_before_anything_is_computed(
        self, service: Service, changes: dict[str, object], words: str
    ) -> None:
        job = service.job(service.session(), [[1, 2, 3]], **changes)
        with pytest.raises(PayloadInvalidError, match=words):
            service.scorer.submit(job)
        assert service.teacher.passes == []
        assert service.scorer.queue().waiting_requests == 0

    def test_ids_beyond_a_truncated_vocabulary_are_refused_and_prefixes_may_use_them(
        self, service: Service
    ) -> None:
        session = service.session(vocabulary_size=40, vocabulary_policy=VocabularyPolicy.TRUNCATE)
        with pytest.raises(PayloadInvalidError, match="vocabulary of 40"):
            service.scored(session, [[45]])
        service.scored(session, [[1]], prefix_ids=flat([[45]]), prefix_lengths=(1,))

    def test_more_tokens_than_the_server_takes_are_refused_with_both_numbers(self) -> None:
        service = Service(max_request_tokens=10)
        job = service.job(
            service.session(), [[1] * 8], prefix_ids=flat([[2] * 3]), prefix_lengths=(3,)
        )
        with pytest.raises(PayloadInvalidError, match="--max-request-tokens") as told:
            service.scorer.submit(job)
        assert told.value.facts == {"tokens": 11, "limit": 10}

    def test_a_payload_that_no_pool_of_this_size_holds_is_refused_before_room_is_made(
        self,
    ) -> None:
        # R07: K = the whole vocabulary over 100,000 tokens would take tens of megabytes here.
        service = Service(max_request_tokens=200_000, pool_size_bytes=1 << 20)
        job = service.job(service.session(top_k=VOCABULARY), [[1] * 50] * 2000)
        with pytest.raises(PayloadInvalidError, match=r"never.*--pool-size") as told:
            service.scorer.submit(job)
        assert int(told.value.facts["need_bytes"]) > 100_000 * VOCABULARY * 8
        assert service.ledger.view().pool.committed_bytes == 0
        assert service.teacher.passes == []

    def test_one_request_more_than_may_wait_is_refused(self) -> None:
        service = Service(max_waiting_requests=1)
        session = service.session()
        service.scorer.submit(service.job(session, [[1]]))
        with pytest.raises(LimitReachedError, match="--max-waiting-requests"):
            service.scorer.submit(service.job(session, [[2]]))

    def test_a_session_of_an_older_server_is_told_so(self, service: Service) -> None:
        older = Service()
        with pytest.raises(EpochChangedError):
            service.scorer.submit(service.job(older.session(), [[1]]))


class TestQueue:
    def test_what_waits_runs_and_is_done_is_counted(self, service: Service) -> None:
        session = service.session()
        service.teacher.gate.clear()
        first = service.scorer.submit(service.job(session, [[1, 2]]))
        assert service.teacher.entered.acquire(timeout=PATIENCE)
        second = service.scorer.submit(service.job(session, [[3, 4, 5]]))
        view = service.scorer.queue()
        assert (view.waiting_requests, view.waiting_tokens) == (1, 3)
        assert (view.running_requests, view.scored_requests) == (1, 0)
        service.teacher.gate.set()
        first.result(PATIENCE)
        second.result(PATIENCE)
        view = service.scorer.queue()
        assert (view.waiting_requests, view.running_requests) == (0, 0)
        assert (view.scored_requests, view.scored_tokens) == (2, 5)


def test_many_threads_get_their_own_answers_and_leave_no_room_behind(service: Service) -> None:
    """Random rows, windows of patience and cancellations from four threads at a time."""
    wrong: list[BaseException] = []

    def student(seed: int) -> None:
        chance = random.Random(seed)
        session = service.session(top_k=chance.choice([1, 4, 16]))
        try:
            for _ in range(25):
                row = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 12))]
                future = service.scorer.submit(service.job(session, [row]))
                if chance.random() < 0.3 and future.cancel():
                    continue
                lease = future.result(PATIENCE)
                check_row(service.columns(session, lease), 0, row)
                service.ledger.release(session, lease.lease_id)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=student, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    service.scored(service.session(), [[1]])  # the last of what was given up is cleared by now
    assert service.ledger.view().pool.extent_count == 1
