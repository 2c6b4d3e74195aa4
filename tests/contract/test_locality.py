"""The node-locality rules, against every GPU of a layout looked at one by one."""

import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from teacher_logits.locality import ModelGrid, check_model_ranks, check_node_local

ORDER = ["dp_mismatch", "group_mismatch", "group_exceeds_node", "group_not_node_aligned"]


@dataclass(frozen=True, kw_only=True)
class World:
    """One cluster, on which a student and a teacher are laid out densely from GPU 0 on."""

    nodes: int
    gpus: int
    student_tp: int = 1
    student_cp: int = 1
    teacher_tp: int = 1
    teacher_cp: int = 1
    student_dp: int = 1
    teacher_dp: int = 1

    def broken(self) -> list[str]:
        found = check_node_local(
            student=self.grid(self.student_tp, self.student_cp),
            teacher=self.grid(self.teacher_tp, self.teacher_cp),
            student_dp=self.student_dp,
            teacher_dp=self.teacher_dp,
        )
        return [violation.rule for violation in found]

    def grid(self, tp: int, cp: int) -> ModelGrid:
        return ModelGrid(
            node_count=self.nodes,
            gpus_per_node=self.gpus,
            tensor_parallel_size=tp,
            context_parallel_size=cp,
        )

    @property
    def groups(self) -> tuple[int, int]:
        return self.student_tp * self.student_cp, self.teacher_tp * self.teacher_cp

    def crosses_a_node(self) -> bool:
        """Whether some row's student group and teacher group touch more than one node."""
        student_group, teacher_group = self.groups
        for row in range(self.student_dp * self.teacher_dp):
            student_rank, teacher_rank = row // self.teacher_dp, row // self.student_dp
            touched = {
                gpu // self.gpus
                for rank, group in ((student_rank, student_group), (teacher_rank, teacher_group))
                for gpu in range(rank * group, (rank + 1) * group)
            }
            if len(touched) > 1:
                return True
        return False


worlds = st.builds(
    World,
    nodes=st.integers(2, 4),
    gpus=st.sampled_from([1, 2, 3, 4, 6, 8]),
    student_tp=st.integers(1, 4),
    student_cp=st.integers(1, 3),
    teacher_tp=st.integers(1, 4),
    teacher_cp=st.integers(1, 3),
    student_dp=st.integers(1, 6),
    teacher_dp=st.integers(1, 6),
)


def with_equal_sides(world: World) -> World:
    """The same world, where only what is left of the rules can be broken."""
    return replace(
        world,
        teacher_tp=world.student_cp,
        teacher_cp=world.student_tp,
        teacher_dp=world.student_dp,
    )


even_worlds = worlds.map(with_equal_sides)


class TestAgainstEveryGpu:
    @given(even_worlds | worlds)
    def test_what_is_accepted_never_crosses_a_node(self, world: World) -> None:
        assume(world.broken() == [])

        assert not world.crosses_a_node()

    @given(even_worlds)
    def test_on_a_full_cluster_of_equal_sides_the_rule_is_exact(self, world: World) -> None:
        count, left = divmod(world.nodes * world.gpus, world.groups[0])
        assume(count > 0 and left == 0)
        full = replace(world, student_dp=count, teacher_dp=count)

        assert (full.broken() == []) == (not full.crosses_a_node())


class TestTheOrder:
    @given(worlds | even_worlds)
    def test_the_first_rule_named_is_the_one_upstream_stops_at(self, world: World) -> None:
        student_group, teacher_group = world.groups
        tiles = {group for group in range(1, world.gpus + 1) if world.gpus % group == 0}
        verdicts = [
            world.student_dp != world.teacher_dp,
            student_group != teacher_group,
            student_group > world.gpus,
            student_group not in tiles,
        ]

        first = [rule for rule, is_broken in zip(ORDER, verdicts, strict=True) if is_broken][:1]

        assert world.broken()[:1] == first

    @given(worlds)
    def test_each_rule_is_named_once_and_in_order(self, world: World) -> None:
        found = world.broken()

        assert found == [rule for rule in ORDER if rule in found]

    def test_ranks_and_groups_are_both_named_where_both_differ(self) -> None:
        world = World(nodes=2, gpus=8, student_dp=4, teacher_dp=2, teacher_tp=2)

        assert world.broken() == ["dp_mismatch", "group_mismatch"]

    @pytest.mark.parametrize(("tp", "rule"), [(16, "group_exceeds_node"), (3, ORDER[-1])])
    def test_a_group_that_does_not_fit_is_named_beside_ranks_that_differ(
        self, tp: int, rule: str
    ) -> None:
        world = World(nodes=2, gpus=8, student_dp=4, teacher_dp=2, student_tp=tp, teacher_cp=tp)

        assert world.broken() == ["dp_mismatch", rule]


class TestOneNode:
    @given(worlds)
    def test_always_passes(self, world: World) -> None:
        assert replace(world, nodes=1).broken() == []

    def test_passes_where_the_sides_see_different_gpus_of_it(self) -> None:
        one = ModelGrid(node_count=1, gpus_per_node=8)

        found = check_node_local(
            student=one, teacher=replace(one, gpus_per_node=4), student_dp=1, teacher_dp=2
        )

        assert found == []

    def test_still_needs_sizes_of_at_least_one(self) -> None:
        assert World(nodes=1, gpus=0).broken() == ["not_positive"]


class TestTopology:
    two_by_eight = ModelGrid(node_count=2, gpus_per_node=8)

    def test_sides_that_describe_other_nodes_are_refused_with_both_numbers(self) -> None:
        [violation] = check_node_local(
            student=self.two_by_eight,
            teacher=ModelGrid(node_count=1, gpus_per_node=4),
            student_dp=1,
            teacher_dp=1,
        )

        assert violation.rule == "topology_mismatch"
        assert violation.facts == {
            "student_node_count": 2,
            "teacher_node_count": 1,
            "student_gpus_per_node": 8,
            "teacher_gpus_per_node": 4,
        }

    @pytest.mark.parametrize(("student_nodes", "teacher_nodes"), [(1, 2), (2, 1)])
    def test_one_side_on_one_node_is_not_enough(
        self, student_nodes: int, teacher_nodes: int
    ) -> None:
        found = check_node_local(
            student=replace(self.two_by_eight, node_count=student_nodes),
            teacher=replace(self.two_by_eight, node_count=teacher_nodes),
            student_dp=1,
            teacher_dp=1,
        )

        assert [violation.rule for violation in found] == ["topology_mismatch"]

    def test_comes_before_the_rules_that_need_no_common_node(self) -> None:
        found = check_node_local(
            student=self.two_by_eight,
            teacher=replace(self.two_by_eight, gpus_per_node=4, tensor_parallel_size=2),
            student_dp=4,
            teacher_dp=2,
        )

        assert [v.rule for v in found] == ["topology_mismatch", "dp_mismatch", "group_mismatch"]

    def test_leaves_out_the_rules_that_need_one_size_of_a_node(self) -> None:
        found = check_node_local(
            student=replace(self.two_by_eight, tensor_parallel_size=3),
            teacher=replace(self.two_by_eight, tensor_parallel_size=3, gpus_per_node=4),
            student_dp=1,
            teacher_dp=1,
        )

        assert [v.rule for v in found] == ["topology_mismatch"]

    def test_only_the_size_of_a_node_must_agree_for_a_group_to_be_fitted(self) -> None:
        found = check_node_local(
            student=replace(self.two_by_eight, tensor_parallel_size=3),
            teacher=replace(self.two_by_eight, tensor_parallel_size=3, node_count=4),
            student_dp=1,
            teacher_dp=1,
        )

        assert [v.rule for v in found] == ["topology_mismatch", "group_not_node_aligned"]


class TestSizes:
    @given(st.lists(st.integers(-1, 2), min_size=8, max_size=8))
    def test_a_size_below_one_always_comes_first_and_never_divides(self, sizes: list[int]) -> None:
        found = World(**dict(zip(World.__dataclass_fields__, sizes, strict=True))).broken()

        assert ("not_positive" in found) == (min(sizes) < 1)
        assert "not_positive" not in found[1:]

    def test_one_violation_names_each_size_below_one(self) -> None:
        grid = ModelGrid(node_count=2, gpus_per_node=8)

        [violation] = check_node_local(
            student=replace(grid, tensor_parallel_size=0),
            teacher=replace(grid, gpus_per_node=-8),
            student_dp=0,
            teacher_dp=1,
        )

        assert violation.rule == "not_positive"
        assert violation.facts == {
            "student_tensor_parallel_size": 0,
            "teacher_gpus_per_node": -8,
            "student_data_parallel_size": 0,
        }

    def test_the_rules_that_do_not_need_the_bad_size_are_still_checked(self) -> None:
        world = World(nodes=2, gpus=8, student_tp=0, student_dp=1, teacher_dp=2)

        assert world.broken() == ["not_positive", "dp_mismatch"]

    def test_how_many_nodes_there_are_decides_whether_the_rules_apply_at_all(self) -> None:
        assert World(nodes=0, gpus=8, student_dp=1, teacher_dp=2).broken() == ["not_positive"]


class TestMessages:
    @given(worlds | even_worlds)
    def test_every_number_of_a_message_is_a_fact(self, world: World) -> None:
        for violation in check_node_local(
            student=world.grid(world.student_tp, world.student_cp),
            teacher=world.grid(world.teacher_tp, world.teacher_cp),
            student_dp=world.student_dp,
            teacher_dp=world.teacher_dp,
        ):
            told = {int(number) for number in re.findall(r"\d+", violation.message)}
            assert told <= set(violation.facts.values())

    def test_a_group_too_large_for_its_node_is_told_what_would_fit(self) -> None:
        grid = ModelGrid(
            node_count=2, gpus_per_node=8, tensor_parallel_size=8, context_parallel_size=2
        )

        [violation] = check_node_local(student=grid, teacher=grid, student_dp=1, teacher_dp=1)

        assert violation.message == (
            "a group of 8 x 2 = 16 GPUs (tensor x context parallel) does not fit on a node of 8; "
            "make the product 8 at most"
        )


class TestModelRanks:
    def test_a_rank_outside_its_group_is_named(self) -> None:
        grid = ModelGrid(
            node_count=1,
            gpus_per_node=8,
            tensor_parallel_size=2,
            tensor_parallel_rank=2,
            context_parallel_rank=-1,
        )

        found = check_model_ranks(grid, side="teacher")

        assert [violation.rule for violation in found] == ["rank_out_of_range"] * 2
        assert found[0].facts["teacher_tensor_parallel_rank"] == 2
        assert found[1].facts["teacher_context_parallel_rank"] == -1

    def test_a_rank_inside_its_group_passes(self) -> None:
        grid = ModelGrid(
            node_count=1, gpus_per_node=8, tensor_parallel_size=2, tensor_parallel_rank=1
        )

        assert check_model_ranks(grid, side="student") == []
