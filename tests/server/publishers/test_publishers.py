"""Publishers: what they must say, that they agree, and who is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.ledger.registering import teacher

from teacher_logits.errors import UnknownTeacherError
from teacher_logits.grid import BatchGrid, check_own_grid
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.locality import ModelGrid
from teacher_logits.profiles import (
    NEEDED_COLUMNS,
    PROTOCOL_VERSION,
    SCORED_COLUMNS,
    NodeHints,
    TeacherProfile,
)
from teacher_logits_server.publishers import Publishers, TeacherAbsent, TeacherIncomplete
from teacher_logits_server.publishers.engines import EngineTeacher, EngineTeachers
from teacher_logits_server.publishers.promises import check_profile


def broken(profile: TeacherProfile, *, protocol_version: int = PROTOCOL_VERSION) -> list[str]:
    return [v.rule for v in check_profile(profile, protocol_version=protocol_version)]


def table(*engines: TeacherProfile) -> Publishers:
    own = EngineTeachers([EngineTeacher(profile=each) for each in engines])
    return Publishers(engines=own, keep_steps=0)


def entered(publishers: Publishers, profile: TeacherProfile, *, settled: bool = True) -> str:
    session_id = f"s{profile.data_parallel_rank}"
    publishers.enter(session_id, profile)
    if settled:
        member = publishers.member(profile.teacher_id, session_id)
        assert member is not None
        member.writer_id = f"writer{profile.data_parallel_rank}"
    return session_id


class TestItsOwnRules:
    def test_a_good_profile_breaks_none(self) -> None:
        assert broken(teacher()) == []

    @pytest.mark.parametrize(
        ("changes", "rules"),
        [
            ({"vocabulary_size": 0}, ["not_positive"]),
            ({"batch_grid": None}, ["batch_grid_missing"]),
            ({"dp": 5}, ["teacher_dp_indivisible"]),
            ({"shard": 2}, ["rank_out_of_range"]),
            ({"shard": -1}, ["rank_out_of_range"]),
            ({"head_rows": 99}, ["vocab_mismatch"]),
            ({"top_k": 101}, ["top_k_too_large"]),
            ({"head_rows": 0, "top_k": 200}, ["not_positive", "top_k_too_large"]),
            ({"temperatures": (2.0, 3.0, 4.0, 5.0, 6.0)}, ["temperature_unavailable"]),
            ({"temperatures": (float("nan"),)}, ["temperature_unavailable"]),
            ({"value_type": ElementType.INT32}, ["column_unavailable"]),
            (
                {"model_grid": ModelGrid(node_count=1, gpus_per_node=8, tensor_parallel_rank=1)},
                ["rank_out_of_range"],
            ),
            ({"top_k": 0, "dp": 5, "shard": 7}, [
                "not_positive", "teacher_dp_indivisible", "rank_out_of_range",
            ]),
        ],
    )  # fmt: skip
    def test_each_is_named(self, changes: dict[str, object], rules: list[str]) -> None:
        assert broken(teacher(**changes)) == rules  # type: ignore[arg-type]

    def test_sizes_that_do_not_fit_are_named_with_both(self) -> None:
        head, entries = check_profile(
            teacher(head_rows=10, top_k=101), protocol_version=PROTOCOL_VERSION
        )

        assert head.message.startswith("head_rows is 10 and vocabulary_size 100: ")
        assert head.facts == {"teacher_head_rows": 10, "teacher_vocabulary_size": 100}
        assert entries.message == ("top_k is 101, and the vocabulary has 100 ids; give at most 100")
        assert entries.facts == {"top_k": 101, "vocabulary_size": 100}

    @pytest.mark.parametrize("kind", NEEDED_COLUMNS)
    def test_a_column_that_every_payload_has_is_not_left_out(self, kind: ColumnKind) -> None:
        columns = tuple(each for each in SCORED_COLUMNS if each is not kind)

        (violation,) = check_profile(teacher(columns=columns), protocol_version=PROTOCOL_VERSION)

        assert violation.rule == "column_unavailable"
        assert violation.facts["lacking"] == kind.value
        assert violation.message.endswith(f"give {kind.value} too")

    def test_other_temperatures_need_the_normaliser(self) -> None:
        columns = tuple(each for each in SCORED_COLUMNS if each is not ColumnKind.LOGSUMEXP)

        assert broken(teacher(columns=columns)) == []
        assert broken(teacher(columns=columns, temperatures=(2.0,))) == ["column_unavailable"]

    def test_another_version_is_named(self) -> None:
        assert broken(teacher(), protocol_version=PROTOCOL_VERSION + 1) == ["protocol_version"]

    @given(
        gbs=st.integers(-1, 24),
        dp=st.integers(-1, 8),
        micro=st.integers(-1, 8),
        shard=st.integers(-1, 8),
    )
    def test_grid_and_rank_are_refused_exactly_where_they_cannot_be(
        self, gbs: int, dp: int, micro: int, shard: int
    ) -> None:
        grid = BatchGrid(global_batch_size=gbs, data_parallel_size=dp, micro_batch_size=micro)
        own = [violation.rule for violation in check_own_grid(grid, side="teacher")]

        rules = broken(teacher(batch_grid=grid, shard=shard))

        assert [rule for rule in rules if rule != "rank_out_of_range"] == own
        assert ("rank_out_of_range" in rules) == (dp >= 1 and not 0 <= shard < dp)


class TestAgreement:
    @pytest.mark.parametrize(
        ("changes", "field", "values"),
        [
            ({"top_k": 8}, "top_k", ("4", "8")),
            ({"revision": "r2"}, "revision", ("", "r2")),
            ({"value_type": ElementType.FLOAT32}, "value_type", ("FLOAT16", "FLOAT32")),
            ({"temperatures": (1.0, 2.0)}, "temperatures", ("(1.0,)", "(1.0, 2.0)")),
            ({"gbs": 24}, "batch_grid", ("12", "24")),
        ],
    )
    def test_those_who_disagree_are_told_the_field_and_both_values(
        self, changes: dict[str, object], field: str, values: tuple[str, str]
    ) -> None:
        publishers = table()
        entered(publishers, teacher())

        (violation,) = publishers.check(teacher(shard=1, **changes))  # type: ignore[arg-type]

        assert violation.rule == "teacher_grid_conflict"
        assert violation.facts["field"] == field
        assert values[0] in str(violation.facts[f"teacher_{field}"])
        assert values[1] in str(violation.facts[f"publisher_{field}"])

    def test_rank_place_and_hints_are_each_ones_own(self) -> None:
        publishers = table()
        grid = ModelGrid(node_count=1, gpus_per_node=8, tensor_parallel_size=2)
        entered(publishers, teacher(model_grid=grid))
        other = teacher(
            shard=1,
            model_grid=replace(grid, tensor_parallel_rank=1),
            temperatures=(1.0,),
            hints=NodeHints(host_name="elsewhere"),
        )

        assert publishers.check(other) == []

    def test_a_shard_is_published_by_one(self) -> None:
        publishers = table()
        there = entered(publishers, teacher(shard=1), settled=False)

        assert publishers.holders(teacher(shard=1)) == [there]
        assert publishers.holders(teacher(shard=0)) == []

    def test_a_shard_is_free_when_its_publisher_has_gone(self) -> None:
        for in_good_order in (True, False):
            publishers = table()
            entered(publishers, teacher(shard=0))
            gone = entered(publishers, teacher(shard=1))
            publishers.leave("teacher", gone, in_good_order=in_good_order)

            assert publishers.check(teacher(shard=1)) == []
            assert publishers.holders(teacher(shard=1)) == []

    def test_the_name_of_an_engines_teacher_is_taken_and_all_such_are_told(self) -> None:
        publishers = table(teacher(batch_grid=None), teacher(batch_grid=None, teacher_id="other"))

        (violation,) = publishers.check(teacher())

        assert violation.rule == "teacher_grid_conflict"
        assert "is one of this server's own (those are: teacher, other)" in violation.message
        assert "give the publishers another teacher_id" in violation.message
        assert publishers.check(teacher(teacher_id="third")) == []

    def test_two_engines_have_two_names(self) -> None:
        with pytest.raises(ValueError, match="teacher, teacher"):
            table(teacher(batch_grid=None), teacher(batch_grid=None))

    def test_a_deserted_teacher_may_come_back_as_another(self) -> None:
        publishers = table()
        gone = entered(publishers, teacher(dp=1))
        publishers.leave("teacher", gone, in_good_order=True)

        assert publishers.check(teacher(dp=1, top_k=8)) == []
        entered(publishers, teacher(dp=1, top_k=8))

        assert publishers.choose("teacher").top_k == 8


class TestWhoIsThere:
    def test_nobody(self) -> None:
        with pytest.raises(TeacherAbsent, match="no teacher 'big' here; there are: none"):
            table().choose("big")
        with pytest.raises(TeacherAbsent, match="there are: none"):
            table().choose("")

    @given(data=st.data(), dp=st.integers(1, 6))
    def test_the_shards_that_are_missing_are_named(self, data: st.DataObject, dp: int) -> None:
        publishers = table()
        there = data.draw(st.sets(st.integers(0, dp - 1), min_size=1))
        for shard in there:
            entered(publishers, teacher(dp=dp, gbs=60, shard=shard))
        missing = [shard for shard in range(dp) if shard not in there]
        if not missing:
            assert publishers.choose("").teacher_id == "teacher"
            return

        with pytest.raises(TeacherIncomplete) as caught:
            publishers.choose("teacher")

        assert caught.value.facts["missing_shards"] == ", ".join(map(str, missing))

    def test_of_several_teachers_one_must_be_named(self) -> None:
        publishers = table(teacher(teacher_id="engine"))
        entered(publishers, teacher(dp=1))

        with pytest.raises(UnknownTeacherError, match="names no teacher") as caught:
            publishers.choose("")
        assert not isinstance(caught.value, TeacherAbsent)
        assert publishers.choose("engine").teacher_id == "engine"

    def test_students_see_what_all_publishers_say_alike(self) -> None:
        publishers = table()
        entered(publishers, teacher(dp=2, shard=1))
        entered(publishers, teacher(dp=2, shard=0))

        chosen = publishers.choose("teacher")

        assert chosen.data_parallel_rank == 0
        assert chosen.temperatures == (1.0,)

    def test_a_teacher_of_whom_nothing_is_left_is_forgotten(self) -> None:
        publishers = table()
        gone = entered(publishers, teacher(dp=1))
        publishers.leave("teacher", gone, in_good_order=True)

        publishers.forget_if_over("teacher")

        assert publishers.profiles() == ()
