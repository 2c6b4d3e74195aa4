"""The batch-grid rules: every broken one, in order, with its numbers; and the rows they give."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import GridMismatchError
from teacher_logits.grid import (
    BatchGrid,
    check_batch_grid,
    check_rank,
    micro_batches,
    rows_of_rank,
)

small = st.integers(1, 24)


def grid(gbs: int, dp: int, mbs: int) -> BatchGrid:
    return BatchGrid(global_batch_size=gbs, data_parallel_size=dp, micro_batch_size=mbs)


def rules(gbs: int, student: BatchGrid, teacher: BatchGrid | None) -> list[str]:
    found = check_batch_grid(global_batch_size=gbs, student=student, teacher=teacher)
    return [violation.rule for violation in found]


@st.composite
def whole_grids(draw: st.DrawFn) -> BatchGrid:
    dp, mbs, count = draw(small), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return grid(dp * mbs * count, dp, mbs)


any_grids = st.builds(grid, small, small, small)
near_grids = st.builds(grid, st.sampled_from([12, 24]), small, st.integers(1, 4))
steps = st.sampled_from([12, 24])


def splits(total: int, parts: int) -> bool:
    """By trying every size of a part, where the product takes remainders."""
    return any(parts * size == total for size in range(1, total + 1))


def broken(gbs: int, student: BatchGrid, teacher: BatchGrid) -> list[str]:
    """What upstream's five checks would each say, in its order, where their premise holds."""
    found = [] if {student.global_batch_size, teacher.global_batch_size} == {gbs} else ["gbs"]
    sides = (("student", student), ("teacher", teacher))
    found += [f"{name}_dp_in" for name, side in sides if not splits(gbs, side.data_parallel_size)]
    for name, side in sides:
        if splits(gbs, side.data_parallel_size):
            rows = next(r for r in range(1, gbs + 1) if r * side.data_parallel_size == gbs)
            found += [] if splits(rows, side.micro_batch_size) else [f"{name}_mbs_in"]
    return [f"{name}_mismatch" if name == "gbs" else f"{name}divisible" for name in found]


class TestCheckBatchGrid:
    @given(steps, near_grids, near_grids)
    def test_names_every_broken_rule_in_upstreams_order(
        self, gbs: int, student: BatchGrid, teacher: BatchGrid
    ) -> None:
        assert rules(gbs, student, teacher) == broken(gbs, student, teacher)

    @given(small, any_grids, any_grids)
    def test_names_the_rule_that_upstream_stops_at_first(
        self, gbs: int, student: BatchGrid, teacher: BatchGrid
    ) -> None:
        assert rules(gbs, student, teacher)[:1] == broken(gbs, student, teacher)[:1]

    @given(whole_grids())
    def test_accepts_a_grid_beside_itself(self, whole: BatchGrid) -> None:
        assert rules(whole.global_batch_size, whole, whole) == []

    def test_names_all_that_can_be_broken_at_once(self) -> None:
        assert rules(48, grid(64, 5, 3), grid(64, 4, 5)) == [
            "gbs_mismatch",
            "student_dp_indivisible",
            "teacher_mbs_indivisible",
        ]

    def test_says_the_numbers_and_the_way_out(self) -> None:
        found = check_batch_grid(
            global_batch_size=48, student=grid(48, 5, 1), teacher=grid(48, 4, 5)
        )

        assert [violation.message for violation in found] == [
            "global batch 48 does not split over 5 student ranks; use a divisor of 48",
            "each of 4 teacher ranks holds 12 of 48 rows, which do not split into micro batches of "
            "5; use a divisor of 12",
        ]

    @given(st.integers(-2, 24), any_grids, any_grids)
    def test_gives_every_number_of_a_message_as_a_fact(
        self, gbs: int, student: BatchGrid, teacher: BatchGrid
    ) -> None:
        for violation in check_batch_grid(global_batch_size=gbs, student=student, teacher=teacher):
            told = {int(number) for number in re.findall(r"-?\d+", violation.message)}
            assert told - {1} <= set(violation.facts.values())

    @given(steps, near_grids)
    def test_looks_at_the_students_own_numbers_where_the_teacher_gives_none(
        self, gbs: int, student: BatchGrid
    ) -> None:
        expected = broken(gbs, student, grid(gbs, 1, 1))

        assert rules(gbs, student, None) == expected


class TestSizes:
    def test_one_violation_names_each_size_below_one(self) -> None:
        first, *rest = check_batch_grid(
            global_batch_size=8, student=grid(8, 0, 1), teacher=grid(8, 2, -1)
        )

        assert first.rule == "not_positive"
        assert first.facts == {"student_data_parallel_size": 0, "teacher_micro_batch_size": -1}
        assert first.message == (
            "student_data_parallel_size is 0, teacher_micro_batch_size is -1; "
            "give each a whole number of at least 1"
        )
        assert rest == []

    def test_the_rules_that_do_not_need_the_bad_size_are_still_checked(self) -> None:
        assert rules(8, grid(8, 0, 1), grid(4, 3, 1)) == [
            "not_positive",
            "gbs_mismatch",
            "teacher_dp_indivisible",
        ]

    @given(
        st.integers(-3, 3),
        st.builds(grid, *[st.integers(-3, 3)] * 3),
        st.builds(grid, *[st.integers(-3, 3)] * 3),
    )
    def test_a_size_below_one_always_comes_first_and_never_divides(
        self, gbs: int, student: BatchGrid, teacher: BatchGrid
    ) -> None:
        sizes = [gbs, *vars(student).values(), *vars(teacher).values()]

        found = rules(gbs, student, teacher)

        assert ("not_positive" in found) == (min(sizes) < 1)
        assert "not_positive" not in found[1:]

    @pytest.mark.parametrize("no_size", [True, False, 2.0, "2", None])
    def test_what_is_no_whole_number_is_refused_like_a_size_below_one(
        self, no_size: object
    ) -> None:
        [violation] = check_batch_grid(
            global_batch_size=8,
            student=grid(8, no_size, 1),  # type: ignore[arg-type]  # the mistake under test
            teacher=None,
        )

        assert violation.rule == "not_positive"
        assert type(no_size).__name__ in violation.message
        assert violation.facts.keys() == {"student_data_parallel_size"}

    def test_numpy_integers_are_sizes_and_plain_ints_as_facts(self) -> None:
        four, three = np.int64(4), np.int32(3)

        [violation] = check_batch_grid(
            global_batch_size=four,
            student=grid(four, three, 1),
            teacher=None,
        )

        assert violation.rule == "student_dp_indivisible"
        assert {type(fact) for fact in violation.facts.values()} == {int}


class TestRows:
    @given(whole_grids())
    def test_every_row_belongs_to_exactly_one_rank_in_order(self, whole: BatchGrid) -> None:
        held = [list(rows_of_rank(whole, rank)) for rank in range(whole.data_parallel_size)]

        assert [row for rows in held for row in rows] == list(range(whole.global_batch_size))
        assert len({len(rows) for rows in held}) == 1

    @given(whole_grids(), st.data())
    def test_micro_batches_tile_the_rows_of_their_rank(
        self, whole: BatchGrid, data: st.DataObject
    ) -> None:
        rank = data.draw(st.integers(0, whole.data_parallel_size - 1))

        cut = micro_batches(whole, rank)

        assert [row for rows in cut for row in rows] == list(rows_of_rank(whole, rank))
        assert {len(rows) for rows in cut} == {whole.micro_batch_size}

    @pytest.mark.parametrize("rank", [-1, 4, True, 1.0])
    def test_a_rank_that_the_grid_does_not_have_is_refused(self, rank: int) -> None:
        with pytest.raises(GridMismatchError, match=r"4 ranks count from 0 to 3") as refusal:
            rows_of_rank(grid(8, 4, 2), rank)

        assert [v.rule for v in refusal.value.violations] == ["rank_out_of_range"]

    @pytest.mark.parametrize(
        ("cut", "rule"),
        [
            (grid(8, 3, 1), "teacher_dp_indivisible"),
            (grid(8, 2, 3), "teacher_mbs_indivisible"),
            (grid(0, 2, 1), "not_positive"),
        ],
    )
    def test_a_grid_that_breaks_a_rule_by_itself_has_no_rows(
        self, cut: BatchGrid, rule: str
    ) -> None:
        for give_rows in (rows_of_rank, micro_batches):
            with pytest.raises(GridMismatchError) as refusal:
                give_rows(cut, 0, side="teacher")
            assert [v.rule for v in refusal.value.violations] == [rule]


@given(st.integers(-3, 9), st.integers(-1, 6))
def test_a_rank_is_in_range_where_counting_reaches_it(rank: int, size: int) -> None:
    found = check_rank(rank, size, name="rank")

    assert (found == []) == (rank in range(size) or size < 1)
