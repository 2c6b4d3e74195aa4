"""Profiles: what may stand in a field, and what is refused where it is written."""

import re

import numpy as np
import pytest

from teacher_logits.errors import RequestInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ElementType
from teacher_logits.locality import ModelGrid
from teacher_logits.profiles import StudentProfile, TeacherProfile

GRID = BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1)


@pytest.mark.parametrize("given", [2.0, 2, (2.0,), [2.0], np.float32(2.0), np.array([2.0])])
def test_temperatures_are_one_number_or_several(given: object) -> None:
    profile = StudentProfile(batch_grid=GRID, temperatures=given)  # type: ignore[arg-type]

    assert profile.temperatures == (2.0,)
    assert profile.all_temperatures == (1.0, 2.0)


def test_a_whole_number_of_numpy_is_one() -> None:
    assert StudentProfile(batch_grid=GRID, top_k=np.int64(16)).top_k == 16


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("top_k", "16", "top_k is '16', a str: give a whole number"),
        ("top_k", 16.0, "top_k is 16.0, a float: give a whole number"),
        ("top_k", True, "top_k is True, a bool: give a whole number"),
        ("data_parallel_rank", None, "data_parallel_rank is None, a NoneType"),
        ("batch_grid", (64, 4, 2), "batch_grid is (64, 4, 2), a tuple: give a BatchGrid"),
        ("model_grid", {}, "model_grid is {}, a dict: give a ModelGrid"),
        ("teacher_id", 7, "teacher_id is 7, a int: give a str"),
        ("tokenizer_fingerprint", object, "a type: give a str"),
        ("temperatures", "2", "temperatures has '2', a str: give numbers"),
        ("temperatures", (2.0, None), "temperatures has None, a NoneType: give numbers"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_type(
    field: str, value: object, says: str
) -> None:
    with pytest.raises(RequestInvalidError, match=re.escape(says)) as caught:
        StudentProfile(**{"batch_grid": GRID, field: value})  # type: ignore[arg-type]

    assert caught.value.facts["argument"] == field


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("data_parallel_rank", True, "data_parallel_rank is True, a bool: give a whole number"),
        ("top_k", False, "top_k is False, a bool: give a whole number"),
        ("vocabulary_size", 64.0, "vocabulary_size is 64.0, a float: give a whole number"),
        ("teacher_id", 7, "teacher_id is 7, a int: give a str"),
        ("batch_grid", (64, 4, 2), "batch_grid is (64, 4, 2), a tuple: give a BatchGrid"),
        ("temperatures", (True,), "temperatures has True, a bool: give numbers"),
    ],
)
def test_a_teachers_field_of_another_type_is_named_with_its_type(
    field: str, value: object, says: str
) -> None:
    given: dict[str, object] = {
        "teacher_id": "teacher",
        "vocabulary_size": 64,
        "head_rows": 64,
        "top_k": 8,
        "max_row_tokens": 16,
    }
    with pytest.raises(RequestInvalidError, match=re.escape(says)):
        TeacherProfile(**{**given, field: value})  # type: ignore[arg-type]
    assert TeacherProfile(**given).batch_grid is None  # type: ignore[arg-type]


def test_a_bool_is_no_size_of_a_grid() -> None:
    grid = BatchGrid(global_batch_size=4, data_parallel_size=True, micro_batch_size=1)
    with pytest.raises(RequestInvalidError, match=r"batch_grid\.data_parallel_size is True"):
        StudentProfile(batch_grid=grid)
    model = ModelGrid(node_count=True, gpus_per_node=8)
    with pytest.raises(RequestInvalidError, match=r"model_grid\.node_count is True"):
        StudentProfile(batch_grid=GRID, model_grid=model)


def test_a_value_type_that_is_none_is_told_those_that_log_probabilities_may_have() -> None:
    with pytest.raises(RequestInvalidError) as caught:
        StudentProfile(batch_grid=GRID, value_type="fp16")  # type: ignore[arg-type]
    assert "give one of 'float16', 'bfloat16', 'float32', or" in caught.value.message


def test_a_student_that_names_no_value_type_takes_what_there_is() -> None:
    assert StudentProfile(batch_grid=GRID).value_type is None
    named = StudentProfile(batch_grid=GRID, value_type="float32")  # type: ignore[arg-type]
    assert named.value_type is ElementType.FLOAT32
