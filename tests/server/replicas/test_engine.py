"""The engine over replicas, with actors that obey the test in the place of Ray's."""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import pytest
from tests.server.replicas.teacher import Teacher

from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import EngineError, PoolFullError
from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.payload_room import HostRoom
from teacher_logits.selection_rules import TopK
from teacher_logits.terms import Check, Verdict
from teacher_logits_server.engines.answers import Answer, Part
from teacher_logits_server.engines.keepers import Wanted
from teacher_logits_server.engines.passes import Outcome, PassEngine
from teacher_logits_server.engines.requests import read_request
from teacher_logits_server.engines.stored import StoredAnswer
from teacher_logits_server.replicas.actor import Loaded, Refused, Returns, StoreFull
from teacher_logits_server.replicas.engine import ReplicaEngine
from teacher_logits_server.replicas.fleet import Sent
from teacher_logits_server.replicas.instructions import Patience
from teacher_logits_server.replicas.packing import compute
from teacher_logits_server.replicas.starting import Started

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ray import ObjectRef

    from teacher_logits_server.replicas.actor import Scored
    from teacher_logits_server.replicas.fleet import Fleet
    from teacher_logits_server.replicas.packing import PackedPart

PATIENCE = 30.0
T = TypeVar("T")
TEACHER = Teacher(Path())
LOADED = Loaded(
    profile=TEACHER.profile,
    check=Check(name="causality", verdict=Verdict.PASSED, detail=""),
    node_id="n0",
    host_name="one",
    pid=1,
)


class Actors:
    """A fleet whose lives end and answer when the test says so."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.watched: dict[int, Future[None]] = {}
        self.begun: dict[int, Future[Loaded | Refused]] = {}
        self.asked: list[tuple[int, Sequence[PackedPart], Future[Scored]]] = []
        self.ended: list[int] = []
        self.closed = 0

    def begin(self, replica: int, life: int) -> Future[Loaded | Refused]:
        return self._note(self.begun, life)

    def watch(self, life: int) -> Future[None]:
        return self._note(self.watched, life)

    def score(self, life: int, parts: Sequence[PackedPart]) -> Sent:
        future: Future[Scored] = Future()
        with self._changed:
            self.asked.append((life, parts, future))
            self._changed.notify_all()
        references = [cast("ObjectRef[object]", part) for part in parts if part.is_stored]
        return Sent(future=future, stored=tuple(references))

    def end(self, life: int) -> None:
        with self._changed:
            self.ended.append(life)
            self._changed.notify_all()

    def close(self) -> None:
        self.closed += 1

    def _note(self, where: dict[int, Future[T]], life: int) -> Future[T]:
        with self._changed:
            where[life] = Future()
            self._changed.notify_all()
            return where[life]

    # For tests

    def until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE)

    def answer(self, at: int) -> None:
        _, parts, future = self.asked[at]
        computed = compute(TEACHER, parts)
        future.set_result(Returns(data=computed.returned, statuses=computed.statuses))

    def kill(self, life: int) -> None:
        """End a life as Ray tells it: to who watches, and to whom it owes an answer."""
        self.watched[life].set_exception(RuntimeError("The actor died: killed"))
        for owner, _, future in self.asked:
            if owner == life and not future.done():
                future.set_exception(RuntimeError("The actor died: killed"))


class Rig:
    """An engine over them, and what came of its passes."""

    def __init__(self, replicas: int = 2) -> None:
        self.actors = Actors()
        self.clock = MonotonicClock()
        started = Started(fleet=cast("Fleet", self.actors), loaded=(LOADED,) * replicas)
        self.engine = ReplicaEngine(
            started, patience=Patience(start=60.0, answer=0.02, pause=0.01), clock=self.clock
        )
        self._bell = threading.Condition()
        self.engine.on_change(self._ring)
        self.outcomes: list[Outcome] = []

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()

    def start(self, *rows: list[int], seconds: float = 1e6, wanted: bool = True) -> list[Part]:
        parts = [part_of(row) for row in rows]
        deadline = self.clock.now() + seconds
        self.engine.start(parts, wanted=lambda: wanted, deadline=deadline)
        return parts

    def await_outcomes(self, count: int) -> list[Outcome]:
        with self._bell:

            def there() -> bool:
                self.outcomes += self.engine.outcomes()
                return len(self.outcomes) >= count

            assert self._bell.wait_for(there, PATIENCE)
        return self.outcomes

    def await_state(self, replica: int, state: str) -> None:
        with self._bell:
            states = self.engine.replicas
            assert self._bell.wait_for(lambda: states()[replica].state == state, PATIENCE)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.engine.close()


def part_of(row: list[int]) -> Part:
    request = read_request(input_ids=array("i", row).tobytes(), row_lengths=[len(row)])
    columns, size = top_k_columns(
        row_count=1,
        position_count=len(row),
        top_k=4,
        temperature_count=1,
        value_type=ElementType.FLOAT32,
    )
    wanted = Wanted(selection=TopK(), temperatures=(1.0,), vocabulary_size=50)
    room = HostRoom(memoryview(bytearray(size)))
    answer = Answer(request, room=room, columns=columns, wanted=wanted)
    return Part(answer=answer, first_row=0, row_count=1)


def test_it_is_an_engine_that_computes_elsewhere(rig: Rig) -> None:
    assert isinstance(rig.engine, PassEngine)
    assert rig.engine.profile == TEACHER.profile
    assert rig.engine.room == 4


def test_what_a_replica_answers_can_be_copied_where_it_belongs(rig: Rig) -> None:
    [part] = rig.start([1, 2, 3])
    rig.actors.until(lambda: len(rig.actors.asked) == 1)
    rig.actors.answer(0)
    [outcome] = rig.await_outcomes(1)
    assert outcome.parts == (part,)
    outcome.scores[0].copy_to(part)
    assert part.written.finish(mask=False) == 0


def test_one_that_ends_is_told_once_and_its_pass_goes_to_another(rig: Rig) -> None:
    [part] = rig.start([1, 2, 3])
    rig.actors.until(lambda: len(rig.actors.asked) == 1)
    rig.actors.kill(0)
    rig.actors.until(lambda: len(rig.actors.asked) == 2 and 2 in rig.actors.begun)
    assert [life for life, _, _ in rig.actors.asked] == [0, 1]
    assert rig.actors.ended == [0]
    rig.actors.answer(1)
    [outcome] = rig.await_outcomes(1)
    assert (outcome.parts, outcome.error) == ((part,), None)
    assert rig.engine.replicas()[0].restarts == 1


def test_an_idle_one_that_ends_again_and_again_is_started_after_its_pauses(rig: Rig) -> None:
    for former, life in ((0, 2), (2, 3), (3, 4)):
        rig.actors.kill(former)
        rig.actors.until(lambda life=life: life in rig.actors.begun)  # type: ignore[misc]
        rig.actors.begun[life].set_result(replace(LOADED, pid=life))
        rig.actors.until(lambda life=life: life in rig.actors.watched)  # type: ignore[misc]
    view = rig.engine.replicas()[0]
    assert (view.state, view.restarts, view.pid) == ("ready", 3, 4)


def test_one_that_loads_another_teacher_than_before_is_not_used(rig: Rig) -> None:
    rig.actors.kill(0)
    rig.actors.until(lambda: 2 in rig.actors.begun)
    other = replace(LOADED, profile=replace(TEACHER.profile, revision="r2"))
    rig.actors.begun[2].set_result(other)
    rig.await_state(0, "down")
    assert "another teacher than before: revision 'r1' and 'r2'" in rig.engine.replicas()[0].reason
    rig.actors.until(lambda: 2 in rig.actors.ended)


def test_when_none_can_be_started_what_is_left_fails_and_so_says_the_engine() -> None:
    rig = Rig(replicas=1)
    rig.actors.kill(0)
    rig.actors.until(lambda: 1 in rig.actors.begun)
    [part] = rig.start([1, 2])
    assert rig.engine.refusal is None
    said = EngineError("no such device")
    rig.actors.begun[1].set_result(Refused(error=said, host_name="one"))
    [outcome] = rig.await_outcomes(1)
    assert outcome.parts == (part,)
    assert outcome.final
    assert isinstance(outcome.error, EngineError)
    assert "no such device" in outcome.error.message
    assert rig.engine.refusal is not None
    rig.actors.until(lambda: 2 in rig.actors.begun)  # it is tried again
    rig.actors.begun[2].set_result(LOADED)
    rig.await_state(0, "ready")
    assert rig.engine.refusal is None
    rig.engine.close()


def test_what_a_replica_raises_is_told_as_an_error_that_may_be_tried_again(rig: Rig) -> None:
    rig.start([1, 2], [3, 4])
    rig.actors.until(lambda: len(rig.actors.asked) == 1)
    rig.actors.asked[0][2].set_result("Traceback: words")
    [outcome] = rig.await_outcomes(1)
    assert len(outcome.parts) == 2
    assert str(outcome.error) == "Traceback: words"
    assert not outcome.final
    assert rig.actors.ended == []


def test_one_that_hangs_is_shown_then_ended_and_its_late_answer_is_nobodys(rig: Rig) -> None:
    [part] = rig.start([1, 2], seconds=0.05)
    rig.actors.until(lambda: len(rig.actors.asked) == 1)
    [outcome] = rig.await_outcomes(1)
    assert (outcome.parts, outcome.unwanted) == ((part,), True)
    rig.actors.until(lambda: rig.actors.ended == [0] and 2 in rig.actors.begun)
    rig.actors.answer(0)
    assert rig.engine.outcomes() == []


def test_what_nobody_wants_any_more_is_not_sent(rig: Rig) -> None:
    rig.start([1, 2], wanted=False)
    [outcome] = rig.await_outcomes(1)
    assert outcome.unwanted
    assert rig.actors.asked == []


def test_closing_it_gives_the_actors_back_once(rig: Rig) -> None:
    rig.engine.close()
    rig.engine.close()
    assert rig.actors.closed == 1
    assert not rig.engine.is_alive


class NodeStores:
    """Stores with room for a few rows on each node."""

    def budgets(self, nodes: Collection[str]) -> dict[str, int]:
        return dict.fromkeys(nodes, 8192)


def stays(rig: Rig, row: list[int]) -> Part:
    """Rows that are to stay, and the room that is promised for them."""
    model = part_of(row).answer
    leave = rig.engine.promise_room(2048)
    answer = StoredAnswer(model.request, columns=model.columns, wanted=model.wanted, leave=leave)
    return Part(answer=answer, first_row=0, row_count=1)


def test_nothing_stays_before_there_are_stores(rig: Rig) -> None:
    assert not rig.engine.may_stay(1)
    rig.engine.use_stores(NodeStores(), sharers=2)
    assert rig.engine.may_stay(4096)
    assert not rig.engine.may_stay(4097), "another engine has the other half"


def test_what_stays_is_a_pass_of_its_own_and_takes_room_until_it_is_dropped(rig: Rig) -> None:
    rig.engine.use_stores(NodeStores(), sharers=1)
    staying, coming = stays(rig, [1, 2, 3]), part_of([1, 2, 3])
    parts = [staying, coming]
    rig.engine.start(parts, wanted=lambda: True, deadline=rig.clock.now() + 1e6)
    rig.actors.until(lambda: len(rig.actors.asked) == 2)
    assert [[p.is_stored for p in packed] for _, packed, _ in rig.actors.asked] == [[False], [True]]
    [(used, budget)] = rig.engine.store_use().values()
    assert (0 < used, budget) == (True, 8192)
    for at in range(2):
        rig.actors.answer(at)
    outcomes = {each.parts[0]: each for each in rig.await_outcomes(2)}
    outcomes[staying].scores[0].copy_to(staying)
    answer = staying.answer
    assert isinstance(answer, StoredAnswer)
    assert answer.finish(mask=False) == 0
    [part] = answer.parts
    assert (part.rows, part.positions) == (range(1), range(3))
    assert rig.engine.store_use()["n0"][0] == used
    answer.drop()
    assert rig.engine.store_use()["n0"][0] == 0
    rig.engine.promise_room(8192)


def test_a_store_that_others_have_filled_fails_what_was_to_stay_there(rig: Rig) -> None:
    rig.engine.use_stores(NodeStores(), sharers=1)
    staying = stays(rig, [1, 2, 3])
    rig.engine.start([staying], wanted=lambda: True, deadline=rig.clock.now() + 1e6)
    rig.actors.until(lambda: len(rig.actors.asked) == 1)
    _, _, future = rig.actors.asked[0]
    future.set_result(StoreFull(need_bytes=5, used_bytes=8, most_bytes=10))
    [outcome] = rig.await_outcomes(1)
    assert isinstance(outcome.error, PoolFullError)
    assert (outcome.error.facts["free_bytes"], outcome.final) == (2, True)
    assert rig.engine.store_use()["n0"][0] == 0
