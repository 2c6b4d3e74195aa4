"""Admission: every broken rule at once, in order; what was not given is unchecked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import UnknownTeacherError
from teacher_logits.grid import BatchGrid, check_batch_grid
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.locality import ModelGrid, check_node_local
from teacher_logits.profiles import (
    PROTOCOL_VERSION,
    StudentProfile,
    TeacherProfile,
    VocabularyPolicy,
)
from teacher_logits.terms import Check, Verdict
from teacher_logits.transport import Locality
from teacher_logits_server.admission import Admission, admit
from teacher_logits_server.admission.capability import listed
from teacher_logits_server.publishers import find_teacher

GRID = BatchGrid(global_batch_size=8, data_parallel_size=2, micro_batch_size=2)
ONE_NODE = ModelGrid(node_count=1, gpus_per_node=8)
TWO_NODES = ModelGrid(node_count=2, gpus_per_node=8, tensor_parallel_size=4)

TEACHER = TeacherProfile(
    teacher_id="big",
    vocabulary_size=1000,
    head_rows=1024,
    top_k=100,
    max_row_tokens=512,
    engine="transformers",
    arithmetic_type="bfloat16",
    tokenizer_fingerprint="a" * 32,
)
STUDENT = StudentProfile(batch_grid=GRID, top_k=10)


def verdict(
    student: dict[str, object] | None = None,
    teacher: dict[str, object] | None = None,
    *,
    protocol_version: int = PROTOCOL_VERSION,
    is_published: bool = False,
) -> Admission:
    return admit(
        replace(STUDENT, **(student or {})),  # type: ignore[arg-type]
        replace(TEACHER, **(teacher or {})),  # type: ignore[arg-type]
        protocol_version=protocol_version,
        is_published=is_published,
    )


def rules(admission: Admission) -> list[str]:
    return [violation.rule for violation in admission.violations]


def check(admission: Admission, name: str) -> Check:
    (found,) = [check for check in admission.checks if check.name == name]
    return found


class TestAStudentThatFits:
    def test_is_admitted(self) -> None:
        assert rules(verdict()) == []

    def test_passes_its_own_grid_and_leaves_the_rest_unchecked_that_nobody_gave(self) -> None:
        checks = {check.name: check.verdict for check in verdict().checks}

        assert checks == {
            "student_batch_grid": Verdict.PASSED,
            "teacher_batch_grid": Verdict.UNCHECKED,
            "node_local_rule": Verdict.UNCHECKED,
            "tokenizer": Verdict.UNCHECKED,
            "vocabulary": Verdict.UNCHECKED,
            "provenance": Verdict.UNCHECKED,
        }

    def test_passes_every_check_for_which_both_sides_gave_all(self) -> None:
        admission = verdict(
            {
                "model_grid": ONE_NODE,
                "tokenizer_fingerprint": "a" * 32,
                "vocabulary_size": 1000,
                "engine": "transformers",
                "arithmetic_type": "bfloat16",
            },
            {"model_grid": ONE_NODE, "batch_grid": GRID},
        )

        assert rules(admission) == []
        assert {check.verdict for check in admission.checks} == {Verdict.PASSED}

    def test_takes_all_of_the_teachers_ids_when_it_did_not_say_its_own(self) -> None:
        assert verdict().vocabulary_size == 1000


class TestTeachers:
    def test_the_only_teacher_needs_no_name(self) -> None:
        assert find_teacher("", [TEACHER]) is TEACHER

    def test_a_teacher_is_found_by_name(self) -> None:
        other = replace(TEACHER, teacher_id="small")

        assert find_teacher("small", [TEACHER, other]) is other

    def test_an_unknown_teacher_is_refused_with_those_there_are(self) -> None:
        other = replace(TEACHER, teacher_id="small")

        with pytest.raises(UnknownTeacherError, match=r"no teacher 'huge'.*big, small") as caught:
            find_teacher("huge", [other, TEACHER])

        assert caught.value.facts == {"teacher_id": "huge", "teachers": "big, small"}

    def test_of_several_teachers_one_must_be_named(self) -> None:
        other = replace(TEACHER, teacher_id="small")

        with pytest.raises(UnknownTeacherError, match=r"names no teacher.*big, small"):
            find_teacher("", [TEACHER, other])


class TestSizes:
    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"top_k": 0}, "top_k"),
            ({"readers_per_rank": 0}, "readers_per_rank"),
            ({"vocabulary_size": -1}, "student_vocabulary_size"),
            ({"model_grid": ModelGrid(node_count=0, gpus_per_node=8)}, "student_node_count"),
            (
                {"batch_grid": replace(GRID, micro_batch_size=0)},
                "student_micro_batch_size",
            ),
        ],
    )
    def test_a_size_below_one_is_named(self, changes: dict[str, object], name: str) -> None:
        (violation,) = verdict(changes).violations

        assert violation.rule == "not_positive"
        assert name in violation.message
        assert name in violation.facts

    def test_the_teachers_sizes_are_looked_at_too(self) -> None:
        (violation,) = verdict(
            {"model_grid": ONE_NODE}, {"model_grid": replace(ONE_NODE, gpus_per_node=0)}
        ).violations

        assert violation.facts == {"teacher_gpus_per_node": 0}

    def test_all_bad_sizes_of_a_profile_are_one_violation_and_the_first(self) -> None:
        admission = verdict(
            {
                "batch_grid": BatchGrid(
                    global_batch_size=8, data_parallel_size=3, micro_batch_size=-2
                ),
                "model_grid": ModelGrid(node_count=2, gpus_per_node=0),
                "top_k": 0,
                "locality": Locality.RULE,
            },
            {"model_grid": TWO_NODES, "batch_grid": GRID},
        )

        assert rules(admission)[0] == "not_positive"
        assert rules(admission).count("not_positive") == 1
        assert set(admission.violations[0].facts) == {
            "student_micro_batch_size",
            "student_gpus_per_node",
            "top_k",
        }


class TestTheBatchGrid:
    def test_the_steps_size_is_the_teachers(self) -> None:
        (violation,) = verdict({}, {"batch_grid": replace(GRID, global_batch_size=16)}).violations

        assert violation.rule == "gbs_mismatch"
        assert violation.facts["global_batch_size"] == 16

    def test_without_a_grid_of_the_teachers_it_is_the_students(self) -> None:
        admission = verdict({"batch_grid": replace(GRID, data_parallel_size=3)})

        assert rules(admission) == ["student_dp_indivisible"]

    @given(st.lists(st.integers(-1, 9), min_size=6, max_size=6))
    def test_breaks_the_rules_of_the_grid_module_in_their_order(self, sizes: list[int]) -> None:
        student, teacher = (
            BatchGrid(global_batch_size=gbs, data_parallel_size=dp, micro_batch_size=mbs)
            for gbs, dp, mbs in (sizes[:3], sizes[3:])
        )
        step = teacher.global_batch_size
        expected = check_batch_grid(global_batch_size=step, student=student, teacher=teacher)

        found = [
            rule
            for rule in rules(verdict({"batch_grid": student}, {"batch_grid": teacher}))
            if rule != "rank_out_of_range"
        ]

        assert found == [violation.rule for violation in expected]

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_a_data_parallel_rank_that_is_not_there_is_refused(self, rank: int) -> None:
        (violation,) = verdict({"data_parallel_rank": rank}).violations

        assert violation.rule == "rank_out_of_range"
        assert violation.facts["student_data_parallel_rank"] == rank

    @pytest.mark.parametrize("axis", ["tensor_parallel", "context_parallel"])
    def test_a_model_parallel_rank_that_is_not_there_is_refused(self, axis: str) -> None:
        grid = replace(ONE_NODE, **{f"{axis}_size": 2, f"{axis}_rank": 2})

        (violation,) = verdict({"model_grid": grid}).violations

        assert violation.rule == "rank_out_of_range"
        assert f"student_{axis}_rank" in violation.facts

    def test_more_readers_than_processes_of_a_rank_are_refused(self) -> None:
        grid = replace(ONE_NODE, tensor_parallel_size=2, context_parallel_size=2)

        assert rules(verdict({"model_grid": grid, "readers_per_rank": 4})) == []
        assert rules(verdict({"model_grid": grid, "readers_per_rank": 5})) == [
            "readers_exceed_group"
        ]


class TestTheArithmeticLocalityRule:
    BROKEN = replace(TWO_NODES, tensor_parallel_size=2)

    def test_refuses_a_student_that_insists_on_it(self) -> None:
        admission = verdict(
            {"model_grid": self.BROKEN, "locality": Locality.RULE},
            {"model_grid": TWO_NODES, "batch_grid": GRID},
        )

        assert rules(admission) == ["group_mismatch"]

    @pytest.mark.parametrize("locality", [Locality.PREFER, Locality.REQUIRE])
    def test_tells_the_others_what_it_found_and_leaves_it_to_proof(
        self, locality: Locality
    ) -> None:
        admission = verdict(
            {"model_grid": self.BROKEN, "locality": locality},
            {"model_grid": TWO_NODES, "batch_grid": GRID},
        )

        assert rules(admission) == []
        found = check(admission, "node_local_rule")
        assert found.verdict is Verdict.UNCHECKED
        assert "group_mismatch" in found.detail

    @pytest.mark.parametrize("missing", ["student", "teacher", "both"])
    def test_without_both_model_grids_refuses_only_who_insists(self, missing: str) -> None:
        mine = {"model_grid": TWO_NODES} if missing == "teacher" else {}
        theirs = {"model_grid": TWO_NODES} if missing == "student" else {}
        theirs["batch_grid"] = GRID  # type: ignore[assignment]

        assert rules(verdict({**mine, "locality": Locality.RULE}, {**theirs})) == [
            "model_grid_missing"
        ]
        preferring = verdict({**mine}, {**theirs})
        assert rules(preferring) == []
        found = check(preferring, "node_local_rule")
        assert found.verdict is Verdict.UNCHECKED
        assert ("the student's model grid" in found.detail) == (missing != "teacher")
        assert ("the teacher's model grid" in found.detail) == (missing != "student")

    def test_across_nodes_needs_the_teachers_data_parallel_size(self) -> None:
        admission = verdict(
            {"model_grid": TWO_NODES, "locality": Locality.RULE}, {"model_grid": TWO_NODES}
        )

        assert rules(admission) == ["model_grid_missing"]
        assert "batch grid" in admission.violations[0].message

    def test_on_one_node_needs_none(self) -> None:
        admission = verdict(
            {"model_grid": ONE_NODE, "locality": Locality.RULE}, {"model_grid": ONE_NODE}
        )

        assert rules(admission) == []
        assert check(admission, "node_local_rule").verdict is Verdict.PASSED

    def test_names_differing_nodes(self) -> None:
        admission = verdict(
            {"model_grid": ONE_NODE, "locality": Locality.RULE},
            {"model_grid": replace(ONE_NODE, node_count=2), "batch_grid": GRID},
        )

        assert rules(admission)[0] == "topology_mismatch"

    @given(st.lists(st.integers(1, 4), min_size=8, max_size=8))
    def test_breaks_the_rules_of_the_locality_module_in_their_order(self, sizes: list[int]) -> None:
        student, teacher = (
            ModelGrid(
                node_count=nodes,
                gpus_per_node=gpus,
                tensor_parallel_size=tensor,
                context_parallel_size=context,
            )
            for nodes, gpus, tensor, context in (sizes[:4], sizes[4:])
        )
        expected = check_node_local(student=student, teacher=teacher, student_dp=2, teacher_dp=2)

        admission = verdict(
            {"model_grid": student, "locality": Locality.RULE},
            {"model_grid": teacher, "batch_grid": GRID},
        )

        assert rules(admission) == [violation.rule for violation in expected]


class TestTheVocabulary:
    def test_another_tokenizer_is_refused_with_both_fingerprints(self) -> None:
        (violation,) = verdict({"tokenizer_fingerprint": "b" * 32}).violations

        assert violation.rule == "tokenizer_mismatch"
        assert violation.facts == {
            "student_fingerprint": "b" * 32,
            "teacher_fingerprint": "a" * 32,
        }

    def test_a_fingerprint_that_one_side_lacks_is_unchecked(self) -> None:
        admission = verdict({"tokenizer_fingerprint": "b" * 32}, {"tokenizer_fingerprint": ""})

        assert rules(admission) == []
        assert check(admission, "tokenizer").verdict is Verdict.UNCHECKED
        assert "teacher" in check(admission, "tokenizer").detail

    @pytest.mark.parametrize("size", [999, 1001, 1024])
    def test_strict_refuses_another_size_with_both(self, size: int) -> None:
        (violation,) = verdict({"vocabulary_size": size}).violations

        assert violation.rule == "vocab_mismatch"
        assert violation.facts == {
            "student_vocabulary_size": size,
            "teacher_vocabulary_size": 1000,
            "teacher_head_rows": 1024,
        }
        assert "StudentProfile(vocabulary_policy=tl.VocabularyPolicy.TRUNCATE)" in (
            violation.message
        )

    @pytest.mark.parametrize(("size", "common"), [(900, 900), (1000, 1000), (1024, 1000)])
    def test_truncate_lets_the_ids_take_part_that_both_have(self, size: int, common: int) -> None:
        admission = verdict(
            {"vocabulary_size": size, "vocabulary_policy": VocabularyPolicy.TRUNCATE}
        )

        assert rules(admission) == []
        assert admission.vocabulary_size == common
        assert str(common) in check(admission, "vocabulary").detail

    def test_truncate_does_not_excuse_another_tokenizer(self) -> None:
        admission = verdict(
            {
                "vocabulary_size": 900,
                "vocabulary_policy": VocabularyPolicy.TRUNCATE,
                "tokenizer_fingerprint": "b" * 32,
            }
        )

        assert rules(admission) == ["tokenizer_mismatch"]


class TestCapability:
    def test_more_entries_than_the_teacher_gives_are_refused_with_both_numbers(self) -> None:
        assert rules(verdict({"top_k": 100})) == []
        (violation,) = verdict({"top_k": 101}).violations

        assert violation.rule == "top_k_too_large"
        assert violation.facts["top_k"] == 101
        assert violation.facts["teacher_top_k"] == 100
        assert violation.message.endswith(
            "ask for at most 100, or have the server's --top-k raised to 101"
        )

    def test_who_asks_for_more_entries_than_there_are_ids_is_told_the_most_that_can_be(
        self,
    ) -> None:
        small = {"vocabulary_size": 100, "vocabulary_policy": VocabularyPolicy.TRUNCATE}
        (violation,) = verdict({"top_k": 5000, **small}).violations
        assert violation.message.endswith("ask for at most 100")

    def test_more_entries_than_ids_take_part_are_refused(self) -> None:
        truncated = {"vocabulary_size": 50, "vocabulary_policy": VocabularyPolicy.TRUNCATE}

        assert rules(verdict({"top_k": 50, **truncated})) == []
        (violation,) = verdict({"top_k": 51, **truncated}).violations
        assert violation.rule == "top_k_too_large"
        assert violation.facts["vocabulary_size"] == 50

    def test_four_temperatures_besides_one_are_the_most(self) -> None:
        assert rules(verdict({"temperatures": (0.5, 0.7, 2.0, 4.0)})) == []
        assert rules(verdict({"temperatures": (1.0, 0.5, 0.5, 0.7, 2.0, 4.0)})) == []
        (violation,) = verdict({"temperatures": (0.5, 0.7, 2.0, 3.0, 4.0)}).violations

        assert violation.rule == "temperature_unavailable"
        assert violation.message.startswith("5 temperatures besides 1; ask for at most 4")
        assert violation.facts["temperature_count"] == 5
        assert violation.facts["most_temperatures"] == 4

    @pytest.mark.parametrize(
        ("temperature", "shown"),
        [(100.0001, "100.0001"), (100.00009918212890625, "100.000099"), (0.0099, "0.0099")],
    )
    def test_one_that_is_barely_out_of_range_is_shown_as_it_is(
        self, temperature: float, shown: str
    ) -> None:
        (violation,) = verdict({"temperatures": (temperature,)}).violations

        assert violation.message.startswith(f"{shown} cannot be a temperature")
        assert violation.facts["temperatures"] == shown

    def test_one_that_travelled_as_fp32_is_shown_as_it_was_asked_for(self) -> None:
        assert listed([0.1, 0.10000000149011612, 2.0]) == "0.1, 0.1, 2"

    @pytest.mark.parametrize(
        "temperature", [0.0, -1.0, math.nan, math.inf, 1e300, 1e-300, 0.0099, 100.1]
    )
    def test_what_can_be_no_temperature_is_refused(self, temperature: float) -> None:
        (violation,) = verdict({"temperatures": (temperature,)}).violations

        assert violation.rule == "temperature_unavailable"
        assert f"{temperature:g}" in violation.message

    @pytest.mark.parametrize("temperature", [0.01, 100.0])
    def test_the_extremes_are_temperatures(self, temperature: float) -> None:
        assert rules(verdict({"temperatures": (temperature,)})) == []

    def test_a_temperature_the_teacher_has_not_is_refused_with_those_it_has(self) -> None:
        (violation,) = verdict({"temperatures": (0.7, 2.0)}, {"temperatures": (2.0,)}).violations

        assert violation.rule == "temperature_unavailable"
        assert violation.facts["teacher_temperatures"] == "2"
        assert "0.7" in violation.message

    def test_who_can_add_what_a_published_teacher_lacks_is_named(self) -> None:
        asked: dict[str, object] = {"temperatures": (3.0,), "columns": (ColumnKind.TOPK_LOGITS,)}
        of_temperature, of_column = verdict(
            asked, {"temperatures": (2.0,)}, is_published=True
        ).violations

        assert of_temperature.message.endswith("TeacherProfile(temperatures=) name it")
        assert of_column.message.endswith("TeacherProfile(columns=) name it")

    def test_a_teacher_that_names_no_temperatures_takes_any(self) -> None:
        assert rules(verdict({"temperatures": (0.7,)})) == []

    def test_temperature_one_is_always_there(self) -> None:
        assert rules(verdict({"temperatures": (1.0,)}, {"temperatures": (2.0,)})) == []

    def test_a_column_the_teacher_has_not_is_refused(self) -> None:
        (violation,) = verdict(
            {"columns": (ColumnKind.TOPK_IDS, ColumnKind.HIDDEN_STATES)}
        ).violations

        assert violation.rule == "column_unavailable"
        assert violation.facts["missing"] == "hidden_states"

    def test_log_probabilities_of_whole_numbers_are_refused(self) -> None:
        (violation,) = verdict({"value_type": ElementType.INT32}).violations

        assert violation.rule == "column_unavailable"
        assert "float16" in violation.message

    def test_an_engine_gives_any_value_type(self) -> None:
        for value_type in (None, ElementType.FLOAT16, ElementType.FLOAT32):
            assert rules(verdict({"value_type": value_type})) == []

    def test_a_value_type_that_was_not_published_is_refused(self) -> None:
        teacher: dict[str, object] = {"value_type": ElementType.BFLOAT16}
        (violation,) = verdict(
            {"value_type": ElementType.FLOAT32}, teacher, is_published=True
        ).violations

        assert violation.rule == "column_unavailable"
        assert violation.facts == {"value_type": "float32", "teacher_value_type": "bfloat16"}
        assert "TeacherProfile(value_type=)" in violation.message
        for takes in (None, ElementType.BFLOAT16):
            assert rules(verdict({"value_type": takes}, teacher, is_published=True)) == []

    def test_whoever_can_raise_top_k_is_named(self) -> None:
        (of_engine,) = verdict({"top_k": 200}).violations
        (of_publisher,) = verdict({"top_k": 200}, is_published=True).violations

        assert "--top-k raised to 200" in of_engine.message
        assert "TeacherProfile(top_k=) raised to 200" in of_publisher.message
        assert "--top-k" not in of_publisher.message

    def test_another_protocol_version_is_refused(self) -> None:
        (violation,) = verdict(protocol_version=PROTOCOL_VERSION + 1).violations

        assert violation.rule == "protocol_version"
        assert violation.facts["client_version"] == PROTOCOL_VERSION + 1
        assert violation.facts["server_version"] == PROTOCOL_VERSION


class TestProvenance:
    @pytest.mark.parametrize(
        ("changes", "rule"),
        [
            ({"engine": "megatron"}, "engine_mismatch"),
            ({"arithmetic_type": "float32"}, "arithmetic_type_mismatch"),
        ],
    )
    def test_insisting_on_another_is_refused(self, changes: dict[str, object], rule: str) -> None:
        assert rules(verdict(changes)) == [rule]

    @pytest.mark.parametrize(
        "changes", [{"engine": "transformers"}, {"arithmetic_type": "bfloat16"}]
    )
    def test_insisting_on_what_the_teacher_has_passes(self, changes: dict[str, object]) -> None:
        assert check(verdict(changes), "provenance").verdict is Verdict.PASSED

    def test_insisting_is_refused_where_the_teacher_does_not_say(self) -> None:
        admission = verdict({"engine": "transformers"}, {"engine": ""})

        assert rules(admission) == ["engine_mismatch"]


def test_a_student_that_breaks_everything_hears_of_everything_in_order() -> None:
    admission = verdict(
        {
            "batch_grid": BatchGrid(global_batch_size=9, data_parallel_size=5, micro_batch_size=0),
            "data_parallel_rank": 5,
            "model_grid": replace(TWO_NODES, tensor_parallel_size=2),
            "readers_per_rank": 3,
            "locality": Locality.RULE,
            "tokenizer_fingerprint": "b" * 32,
            "vocabulary_size": 7,
            "top_k": 2000,
            "temperatures": (-1.0,),
            "columns": (ColumnKind.LOGITS,),
            "engine": "other",
            "arithmetic_type": "other",
        },
        {"batch_grid": GRID, "model_grid": TWO_NODES},
        protocol_version=0,
    )

    assert rules(admission) == [
        "not_positive",
        "gbs_mismatch",
        "student_dp_indivisible",
        "rank_out_of_range",
        "readers_exceed_group",
        "dp_mismatch",
        "group_mismatch",
        "tokenizer_mismatch",
        "vocab_mismatch",
        "top_k_too_large",
        "temperature_unavailable",
        "column_unavailable",
        "protocol_version",
        "engine_mismatch",
        "arithmetic_type_mismatch",
    ]
