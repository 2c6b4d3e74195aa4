"""Profiles: what may stand in a field, and what is refused where it is written."""

import re

import numpy as np
import pytest

from teacher_logits.errors import RequestInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile

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
