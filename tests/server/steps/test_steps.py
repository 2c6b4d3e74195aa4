"""Steps: parts that tile, readers that have their seats, and an end when it was promised."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from teacher_logits.errors import (
    PayloadConflictError,
    PayloadRetiredError,
    ProducerLostError,
    RequestInvalidError,
    SessionRefusedError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits_server.steps import Steps
from teacher_logits_server.steps.claims import Claim
from teacher_logits_server.steps.parts import Seat, Stage, Step
from teacher_logits_server.steps.retired import LIMIT, GivenUpSteps, RetiredSteps
from teacher_logits_server.steps.seats import MAX_WANTED

ROWS = 12


def student(name: str = "a", *, dp: int = 1, rank: int = 0, readers: int = 1) -> StudentProfile:
    return StudentProfile(
        batch_grid=BatchGrid(global_batch_size=ROWS, data_parallel_size=dp, micro_batch_size=1),
        data_parallel_rank=rank,
        student_id=name,
        readers_per_rank=readers,
    )


def claim(step: int = 0, shard: int = 0, *, of: int = 1, **changes: object) -> Claim:
    """A claim of a shard's rows, cut evenly over ``of`` shards."""
    share = ROWS // of
    given: dict[str, object] = {
        "payload_id": f"p{step}.{shard}",
        "session_id": f"publisher{shard}",
        "request_id": f"r{step}.{shard}",
        "step": step,
        "shard": shard,
        "rows": range(shard * share, (shard + 1) * share),
        "real_rows": ROWS,
    }
    return Claim(**{**given, **changes})  # type: ignore[arg-type]


def sealed(steps: Steps, *claims: Claim, valid_count: int | None = None) -> None:
    for each in claims:
        steps.reserve(each)
        steps.seal(each.payload_id, valid_count=valid_count, digest="")


def read(steps: Steps, step: int, session_id: str) -> None:
    """Consume a step as a session that sits in its seat."""
    seat = steps.seats.of(session_id)
    assert seat is not None
    steps.consume(step, seat)


class TestParts:
    def test_a_step_is_had_once_its_sealed_rows_tile_it(self) -> None:
        steps = Steps()
        sealed(steps, claim(shard=0, of=2))
        assert steps.had(0) is None
        sealed(steps, claim(shard=1, of=2))

        step = steps.had(0)

        assert step is not None
        assert [part.claim.payload_id for part in step.sealed] == ["p0.0", "p0.1"]

    def test_rows_are_in_global_order_whatever_the_order_of_shards(self) -> None:
        steps = Steps()
        sealed(
            steps,
            claim(shard=0, rows=range(6, 12)),
            claim(shard=1, rows=range(0, 6)),
        )

        step = steps.had(0)

        assert step is not None
        assert [part.claim.shard for part in step.sealed] == [1, 0]

    def test_a_row_is_written_by_one_shard_only(self) -> None:
        steps = Steps()
        steps.reserve(claim(shard=0, rows=range(0, 7)))

        with pytest.raises(PayloadConflictError, match=r"rows 0 to 6 from shard 0"):
            steps.reserve(claim(shard=1, rows=range(6, 12)))

    def test_a_shard_that_is_reserved_is_not_reserved_again(self) -> None:
        steps = Steps()
        steps.reserve(claim())

        with pytest.raises(PayloadConflictError, match="reserved for this shard"):
            steps.reserve(claim(request_id="other", payload_id="q"))

    def test_a_retry_of_a_reservation_is_the_same_one(self) -> None:
        steps = Steps()
        first, _ = steps.reserve(claim())

        again, is_repeat = steps.reserve(claim(payload_id="q"))

        assert again is first
        assert not is_repeat

    def test_a_request_id_is_good_for_the_same_rows_only(self) -> None:
        steps = Steps()
        steps.reserve(claim())

        with pytest.raises(RequestInvalidError, match="fresh id"):
            steps.reserve(claim(step=1, request_id="r0.0"))

    def test_other_rows_of_a_sealed_shard_are_refused(self) -> None:
        steps = Steps()
        sealed(steps, claim(of=2))

        with pytest.raises(PayloadConflictError, match="rows 0 to 5 of this shard"):
            steps.reserve(claim(payload_id="q", request_id="q", rows=range(0, 5)))

    def test_the_shards_of_a_step_agree_on_how_many_rows_are_real(self) -> None:
        steps = Steps()
        steps.reserve(claim(shard=0, of=2, real_rows=9))

        with pytest.raises(PayloadConflictError, match=r"9 real rows.*says 12"):
            steps.reserve(claim(shard=1, of=2))

    def test_padding_is_in_no_shard_and_is_not_waited_for(self) -> None:
        steps = Steps()

        sealed(steps, claim(shard=0, of=2, real_rows=6))

        step = steps.had(0)
        assert step is not None
        assert step.real_rows == 6

    def test_the_same_rows_after_the_seal_are_a_repeat(self) -> None:
        steps = Steps()
        sealed(steps, claim())

        _, is_repeat = steps.reserve(claim(payload_id="q", request_id="q"))

        assert is_repeat
        assert steps.had(0) is not None

    def test_a_repeat_that_is_accepted_stays_taken(self) -> None:
        steps = Steps()
        sealed(steps, claim())
        steps.reserve(claim(payload_id="q", request_id="q"))

        steps.accept_repeat("q", "publisher0")

        part = steps.part_of("q")
        assert part is not None
        assert part.was_taken("publisher0", "q")
        assert not part.was_taken("another", "q")

    def test_an_abandoned_reservation_leaves_the_rows_to_others(self) -> None:
        steps = Steps()
        steps.reserve(claim(real_rows=9, rows=range(0, 9)))

        steps.abandon("p0.0")
        steps.abandon("p0.0")

        sealed(steps, claim(shard=1, rows=range(0, 12)))
        assert steps.had(0) is not None

    def test_the_global_count_is_there_when_every_shard_brought_one(self) -> None:
        steps = Steps()
        sealed(steps, claim(0, 0, of=2), claim(0, 1, of=2), valid_count=5)
        sealed(steps, claim(1, 0, of=2), valid_count=5)
        sealed(steps, claim(1, 1, of=2))

        counts = [step.global_count for step in steps]

        assert counts == [10, None]


class TestTheLowestOpenStep:
    def test_is_the_lowest_that_is_written_and_not_complete_else_the_next(self) -> None:
        steps = Steps()
        assert steps.lowest_open_step == 0
        sealed(steps, claim(3))
        assert steps.lowest_open_step == 4
        steps.reserve(claim(5))
        steps.reserve(claim(2, 1, of=2))
        assert steps.lowest_open_step == 2

    def test_is_for_a_shard_the_lowest_that_lacks_it(self) -> None:
        steps = Steps()
        sealed(steps, claim(0, 0, of=2))

        assert steps.lowest_without(0) == 1
        assert steps.lowest_without(1) == 0

    def test_is_one_that_was_given_up_below_another_until_it_is_complete(self) -> None:
        steps = Steps()
        steps.reserve(claim(0))
        sealed(steps, claim(1))

        steps.abandon("p0.0")

        assert steps.find(0) is None
        assert (steps.lowest_open_step, steps.lowest_without(0)) == (0, 0)
        sealed(steps, claim(0, request_id="again"))
        assert (steps.lowest_open_step, steps.lowest_without(0)) == (2, 2)

    def test_is_one_that_was_given_up_and_that_a_student_waits_for(self) -> None:
        steps = Steps()
        steps.seats.join("s", student())
        for number in (0, 1):
            steps.reserve(claim(number))
        steps.abandon("p1.0")
        steps.seats.want_also("s", 0)
        steps.abandon("p0.0")

        steps.reserve(claim(2))

        assert steps.lowest_open_step == 0

    def test_is_none_that_was_given_up_with_nothing_behind_it(self) -> None:
        steps = Steps()
        steps.reserve(claim(3))
        steps.abandon("p3.0")

        steps.reserve(claim(4))

        assert steps.lowest_open_step == 4

    @pytest.mark.parametrize(("waits", "lowest"), [(False, 2), (True, 0)])
    def test_is_none_that_was_given_up_and_that_its_readers_have_gone_on_without(
        self, waits: bool, lowest: int
    ) -> None:
        steps = Steps()
        steps.seats.join("s", student())
        steps.reserve(claim(0))
        sealed(steps, claim(1))
        steps.abandon("p0.0")
        if waits:
            steps.seats.note_wanted("s", [0])

        read(steps, 1, "s")

        assert steps.lowest_open_step == lowest

    def test_is_none_that_keep_steps_has_let_go(self) -> None:
        steps = Steps(keep_steps=1)
        steps.reserve(claim(0))
        sealed(steps, claim(1))
        steps.abandon("p0.0")

        sealed(steps, claim(2))

        assert steps.lowest_open_step == 3

    def test_is_not_a_step_in_which_a_shard_has_padding_only(self) -> None:
        steps = Steps()
        steps.reserve(claim(0, 0, of=2, real_rows=6))

        assert steps.lowest_without(1) == 0  # what comes next, as step 0 is not complete
        sealed(steps, claim(1, 0, of=2, real_rows=6))
        assert steps.lowest_without(1) == 2


class TestLosses:
    def test_whoever_has_read_a_step_is_not_waited_for_when_a_second_try_at_it_succeeds(
        self,
    ) -> None:
        steps = Steps()
        for name in "ab":
            steps.seats.join(name, student(name))
        sealed(steps, claim())
        read(steps, 0, "a")
        steps.lose("p0.0")
        steps.reserve(claim(payload_id="p1", request_id="r1"))
        steps.abandon("p1")
        sealed(steps, claim(payload_id="p2", request_id="r2"))

        read(steps, 0, "b")

        assert steps.changes.take().retired == ("p2",)

    def test_a_lost_part_fails_its_step_until_it_is_written_again(self) -> None:
        steps = Steps()
        sealed(steps, claim(0, 0, of=2), claim(0, 1, of=2))
        steps.lose("p0.1")

        with pytest.raises(ProducerLostError, match="lacks shard 1"):
            steps.had(0)
        sealed(steps, claim(0, 1, of=2, payload_id="q", session_id="new"))

        assert steps.had(0) is not None

    def test_what_was_reserved_and_never_sealed_is_lost_too(self) -> None:
        steps = Steps()
        sealed(steps, claim(0, 0, of=2))
        steps.reserve(claim(0, 1, of=2))
        steps.lose("p0.1")

        with pytest.raises(ProducerLostError, match=r"shard 1: .* before it was sealed"):
            steps.had(0)
        sealed(steps, claim(0, 1, of=2, payload_id="q", session_id="new"))

        assert steps.had(0) is not None

    def test_a_lost_reservation_keeps_its_place_in_the_order_of_room(self) -> None:
        steps = Steps()
        steps.reserve(claim(0))
        steps.reserve(claim(1))
        steps.lose("p0.0")
        assert steps.lowest_open_step == steps.lowest_without(0) == 0

        sealed(steps, claim(0, payload_id="q", session_id="new"))
        assert steps.lowest_open_step == 1

    def test_a_step_whose_every_part_is_lost_fails_too(self) -> None:
        steps = Steps()
        sealed(steps, claim())
        steps.lose("p0.0")

        with pytest.raises(ProducerLostError):
            steps.had(0)
        assert steps.is_empty

    def test_a_repeat_under_way_takes_the_place_of_what_is_lost(self) -> None:
        steps = Steps()
        sealed(steps, claim())
        steps.reserve(claim(payload_id="q", session_id="new"))

        steps.lose("p0.0")
        assert steps.had(0) is None
        steps.seal("q", valid_count=None, digest="")

        assert steps.had(0) is not None


class TestRetirement:
    def test_comes_when_every_reader_has_read(self) -> None:
        steps = Steps()
        for rank in range(2):
            steps.seats.join(f"s{rank}", student(dp=2, rank=rank))
        sealed(steps, claim())
        read(steps, 0, "s0")
        assert steps.had(0) is not None

        read(steps, 0, "s1")

        with pytest.raises(PayloadRetiredError, match="lowest step there is, or that comes next"):
            steps.had(0)
        assert steps.changes.take().retired == ("p0.0",)
        assert steps.changes.take().retired == ()

    def test_does_not_come_without_a_student(self) -> None:
        steps = Steps()
        sealed(steps, claim())

        assert steps.had(0) is not None

    def test_waits_for_every_reader_of_a_rank(self) -> None:
        steps = Steps()
        for name in ("s0", "s1"):
            steps.seats.join(name, student(readers=2))
        sealed(steps, claim())
        read(steps, 0, "s0")
        read(steps, 0, "s0")

        assert steps.had(0) is not None

    def test_takes_what_a_predecessor_read_for_read(self) -> None:
        steps = Steps()
        steps.seats.join("s0", student(dp=2))
        steps.seats.join("s1", student(dp=2, rank=1))
        sealed(steps, claim())
        read(steps, 0, "s0")
        steps.leave("s0")
        steps.seats.join("again", student(dp=2))
        read(steps, 0, "s1")

        with pytest.raises(PayloadRetiredError):
            steps.had(0)

    def test_does_not_wait_for_a_student_that_is_gone(self) -> None:
        steps = Steps()
        steps.seats.join("s", student("a"))
        steps.seats.join("t", student("b"))
        sealed(steps, claim())
        read(steps, 0, "s")

        steps.leave("t")

        with pytest.raises(PayloadRetiredError):
            steps.had(0)

    def test_does_not_wait_for_a_student_that_came_later(self) -> None:
        steps = Steps()
        steps.seats.join("s", student("a"))
        sealed(steps, claim(0), claim(1))
        steps.seats.note_asked(0)
        steps.seats.join("t", student("b"))
        read(steps, 0, "s")
        read(steps, 1, "s")

        with pytest.raises(PayloadRetiredError):
            steps.had(0)
        assert steps.had(1) is not None

    def test_a_second_session_of_a_seat_is_no_second_reader(self) -> None:
        steps = Steps()
        steps.seats.join("s", student(readers=2))
        steps.seats.join("t", student(readers=2))
        steps.seats.close("s", frozenset({0}))
        steps.seats.join("successor", student(readers=2))
        sealed(steps, claim())
        read(steps, 0, "s")
        read(steps, 0, "successor")

        assert steps.had(0) is not None

    def test_by_number_lets_the_oldest_go_unread(self) -> None:
        steps = Steps(keep_steps=2)
        steps.reserve(claim(0, 0, of=2))
        sealed(steps, claim(1), claim(2))
        assert [step.number for step in steps] == [1, 2]
        changes = steps.changes.take()
        assert changes.lapsed == ("p0.0",)

        sealed(steps, claim(3))

        assert [step.number for step in steps] == [2, 3]
        assert steps.changes.take().retired == ("p1.0",)

    def test_is_for_good(self) -> None:
        steps = Steps()
        steps.seats.join("s", student())
        sealed(steps, claim())
        read(steps, 0, "s")

        with pytest.raises(PayloadRetiredError):
            steps.reserve(claim(payload_id="q", request_id="q"))

    def test_is_forgotten_when_the_teacher_begins_anew(self) -> None:
        steps = Steps()
        steps.seats.join("s", student())
        sealed(steps, claim())
        read(steps, 0, "s")

        steps.begin_anew()

        sealed(steps, claim())
        assert steps.had(0) is not None


class TestStudents:
    @pytest.mark.parametrize(("dp", "readers"), [(2, 1), (1, 2)])
    def test_of_one_name_have_one_grid(self, dp: int, readers: int) -> None:
        steps = Steps()
        steps.seats.join("s", student())

        with pytest.raises(SessionRefusedError, match="student_grid_conflict"):
            steps.seats.check(student(dp=dp, readers=readers))
        steps.seats.check(student("b", dp=dp, readers=readers))

    def test_hold_the_seats_of_their_rank_until_they_close(self) -> None:
        seats = Steps().seats
        for name, rank in (("s", 0), ("t", 0), ("u", 1)):
            seats.join(name, student(dp=2, rank=rank, readers=2))

        seats.close("s", frozenset({0}))
        seats.join("successor", student(dp=2, readers=2))

        assert seats.holders(student(dp=2, readers=2)) == ["t", "successor"]
        assert seats.of("successor") == seats.of("s")
        assert seats.holders(student("b")) == []

    def test_that_have_not_read_are_named(self) -> None:
        steps = Steps()
        for rank in range(3):
            steps.seats.join(f"s{rank}", student(dp=3, rank=rank))
        sealed(steps, claim())
        read(steps, 0, "s1")

        (step,) = steps
        assert steps.seats.waited_for(step) == {"a": [0, 2]}


def test_steps_that_were_given_up_are_remembered_in_bounded_memory() -> None:
    given_up = GivenUpSteps()
    for step in range(LIMIT + 2):
        given_up.add(Step(number=step, real_rows=ROWS))

    assert set(given_up) == set(range(LIMIT))


def test_what_a_reader_waits_for_is_remembered_in_bounded_memory() -> None:
    steps = Steps()
    steps.seats.join("s", student())
    for number in range(MAX_WANTED + 2):
        steps.seats.want_also("s", number)
    steps.seats.want_also("nobody", 99)
    steps.seats.want_no_more("s", 5)

    assert steps.seats.wanted() == set(range(2, MAX_WANTED + 2)) - {5}
    steps.seats.leave("s")
    assert steps.seats.wanted() == set()


def test_retired_steps_are_remembered_in_bounded_memory() -> None:
    retired = RetiredSteps()
    for step in range(0, 3 * LIMIT, 2):
        retired.add(step)
        assert step in retired

    assert 1 in retired  # below the lowest that is remembered by itself
    assert 3 * LIMIT - 3 not in retired


@dataclass(kw_only=True)
class Read:
    """What a model student has read, by step."""

    dp: int
    readers: int
    begin: int
    sessions: set[str] = field(default_factory=set)


class Model(RuleBasedStateMachine):
    """Publishers and students in any order: a step ends exactly when it was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()
        #: What is reserved, sealed or lost, by step and shard.
        self.parts: dict[int, dict[int, str]] = {}
        self.retired: set[int] = set()
        self.students: dict[str, Read] = {}
        self.consumed: set[tuple[int, Seat]] = set()
        #: Sessions that have ended, of which nobody has told yet.
        self.asked = -1
        self.told: list[str] = []
        self.given: dict[str, int] = {}
        self.count = 0

    @initialize(of=st.sampled_from([1, 2, 3]))
    def cut(self, of: int) -> None:
        self.of = of

    def complete(self) -> list[int]:
        return [
            n for n, parts in self.parts.items() if list(parts.values()) == ["sealed"] * self.of
        ]

    def lost(self) -> list[int]:
        return [n for n, parts in self.parts.items() if "lost" in parts.values()]

    def expect_retired(self, *steps: int) -> None:
        """Expect that of these steps, of which something was learnt, go those that all have read.

        One that was read was complete, whatever it has lost since, and is being written.
        """
        read = {number for number, _ in self.consumed if number in self.parts}
        for number in {*self.complete(), *self.lost(), *read}.intersection(steps):
            waited = [
                (name, each)
                for name, each in self.students.items()
                if each.begin <= number
                and len({s for n, s in self.consumed if n == number and s.student_id == name})
                < each.dp * each.readers
            ]
            if self.students and not waited:
                self.retired.add(number)
                del self.parts[number]

    @rule(step=st.integers(0, 4), data=st.data())
    def reserve(self, step: int, data: st.DataObject) -> None:
        shard = data.draw(st.integers(0, self.of - 1))
        self.count += 1
        made = claim(
            step, shard, of=self.of, payload_id=f"p{self.count}", request_id=f"r{self.count}"
        )
        there = self.parts.get(step, {}).get(shard)
        if step in self.retired:
            with pytest.raises(PayloadRetiredError):
                self.steps.reserve(made)
        elif there == "reserved":
            with pytest.raises(PayloadConflictError):
                self.steps.reserve(made)
        elif there == "sealed":
            assert self.steps.reserve(made) == (made, True)
            self.steps.abandon(made.payload_id)
        else:
            assert self.steps.reserve(made) == (made, False)
            parts = self.parts.setdefault(step, {})
            parts.pop(shard, None)
            parts[shard] = "reserved"

    def some(self, data: st.DataObject, state: str) -> tuple[int, int, str] | None:
        found = [
            (step, shard)
            for step, parts in self.parts.items()
            for shard, has in parts.items()
            if has == state
        ]
        if not found:
            return None
        step, shard = data.draw(st.sampled_from(sorted(found)))
        known = self.steps.find(step)
        assert known is not None
        return step, shard, known.parts[shard].claim.payload_id

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        found = self.some(data, "reserved")
        if found is None:
            return
        step, shard, payload_id = found
        self.steps.seal(payload_id, valid_count=None, digest="")
        self.given[payload_id] = step
        self.parts[step][shard] = "sealed"
        if step in self.complete():
            self.expect_retired(step)

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        found = self.some(data, "reserved")
        if found is None:
            return
        step, shard, payload_id = found
        self.steps.abandon(payload_id)
        del self.parts[step][shard]
        if not self.parts[step]:
            del self.parts[step]

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        found = self.some(data, "sealed")
        if found is None:
            return
        step, shard, payload_id = found
        self.steps.lose(payload_id)
        del self.given[payload_id]
        self.parts[step][shard] = "lost"
        self.expect_retired(step)

    @rule(name=st.sampled_from("ab"), data=st.data())
    def join(self, name: str, data: st.DataObject) -> None:
        if name not in self.students:
            self.students[name] = Read(
                dp=data.draw(st.integers(1, 3)),
                readers=data.draw(st.integers(1, 2)),
                begin=self.asked + 1 if self.students else 0,
            )
        known = self.students[name]
        rank = data.draw(st.integers(0, known.dp - 1))
        self.count += 1
        session = f"s{self.count}"
        profile = student(name, dp=known.dp, rank=rank, readers=known.readers)
        holders = self.steps.seats.holders(profile)
        if len(holders) == known.readers:
            self.steps.seats.close(data.draw(st.sampled_from(holders)), frozenset(range(6)))
        self.steps.seats.join(session, profile)
        known.sessions.add(session)

    @precondition(lambda self: self.students)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.students)))
        session = data.draw(st.sampled_from(sorted(self.students[name].sessions)))
        self.steps.leave(session)
        self.students[name].sessions.discard(session)
        if not self.students[name].sessions:
            del self.students[name]
            self.asked = self.asked if self.students else -1
        self.expect_retired(*self.parts)

    @precondition(lambda self: self.students and self.complete())
    @rule(data=st.data(), by_asking=st.booleans())
    def consume(self, data: st.DataObject, by_asking: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.complete())))
        name = data.draw(st.sampled_from(sorted(self.students)))
        session = data.draw(st.sampled_from(sorted(self.students[name].sessions)))
        if by_asking:
            self.steps.seats.note_asked(number)
            self.asked = max(self.asked, number)
        seat = self.steps.seats.of(session)
        assert seat is not None
        self.steps.consume(number, seat)
        # The reader has gone on without the lower ones that are lost.
        passed = [lower for lower in self.lost() if lower < number]
        self.consumed |= {(each, seat) for each in (number, *passed)}
        self.expect_retired(number, *passed)

    @invariant()
    def a_step_stands_where_its_parts_say(self) -> None:
        for number in range(6):
            parts = self.parts.get(number, {})
            if number in self.retired:
                with pytest.raises(PayloadRetiredError):
                    self.steps.had(number)
            elif number in self.complete():
                step = self.steps.had(number)
                assert step is not None
                rows = [row for part in step.sealed for row in part.claim.rows]
                assert rows == list(range(ROWS))
            elif "lost" in parts.values():
                with pytest.raises(ProducerLostError):
                    self.steps.had(number)
            else:
                assert self.steps.had(number) is None

    @invariant()
    def every_payload_of_a_retired_step_is_told_once(self) -> None:
        self.told += self.steps.changes.take().retired
        assert len(set(self.told)) == len(self.told)
        assert set(self.told) == {p for p, step in self.given.items() if step in self.retired}

    @invariant()
    def parts_lie_apart(self) -> None:
        for step in self.steps:
            claims = [part.claim.rows for part in step.parts.values() if not part.is_lost]
            for one, other in combinations(claims, 2):
                assert not set(one) & set(other)

    @invariant()
    def the_lowest_open_step_is_written_and_not_complete(self) -> None:
        lowest = self.steps.lowest_open_step
        step = self.steps.find(lowest)
        assert step is None or step.stage is not Stage.COMPLETE or not step.is_written
        for each in self.steps:
            if each.number < lowest:
                assert each.stage is Stage.COMPLETE or not each.is_written


Model.TestCase.settings = settings(stateful_step_count=40, max_examples=80)
TestModel = Model.TestCase
