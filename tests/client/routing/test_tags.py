"""Tags: which teacher has which rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError, RequestInvalidError, UnknownTeacherError
from teacher_logits_client.routing.tags import Tagged, Tags

TAGS = Tags({"math": ("gsm8k", "aime"), "code": "mbpp"})


@given(st.lists(st.sampled_from(["gsm8k", "aime", "mbpp"])))
def test_each_row_is_one_teachers_in_order(tags: list[str]) -> None:
    split = TAGS.split(tags, row_count=len(tags))

    assert all(split.values())
    assert list(split) == [name for name in ("math", "code") if name in split]
    assert split.get("code", []) == [row for row, tag in enumerate(tags) if tag == "mbpp"]
    assert sorted(row for rows in split.values() for row in rows) == list(range(len(tags)))


def test_ids_alone_are_tags_themselves() -> None:
    assert Tags(["math", "code"]).split(["code"], row_count=1) == {"code": [0]}


def test_a_column_of_a_trainers_batch_is_taken_as_it_is() -> None:
    column = np.array(["mbpp", "aime"], dtype=object)

    assert TAGS.split(column, row_count=2) == {"math": [1], "code": [0]}  # type: ignore[arg-type]


def test_a_tag_that_nobody_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownTeacherError, match=r"row 1 .* 'art'.* gsm8k, aime, mbpp") as refusal:
        TAGS.split(["mbpp", "art"], row_count=2)

    assert (refusal.value.facts["row"], refusal.value.facts["tag"]) == (1, "art")


@pytest.mark.parametrize("tags", ["mbpp", ["mbpp"] * 3, None])
def test_other_than_one_tag_a_row_is_refused(tags: object) -> None:
    with pytest.raises(PayloadInvalidError):
        TAGS.split(tags, row_count=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tagged", "said"),
    [
        ({"math": ("a", "b"), "code": ("c", "a")}, "tag 'a' is of teacher 'math' and of .* 'code'"),
        ({"math": (), "code": "a"}, "teacher 'math' has no tags"),
        ({}, "no teacher is named"),
        ([], "no teacher is named"),
        (["math", "math"], "named twice"),
        ("math", "give their ids"),
        ({"math": [3]}, "3 is no name"),
        ({"math": [""]}, "'' is no name"),
    ],
)
def test_tags_that_settle_nothing_are_refused_at_once(tagged: Tagged, said: str) -> None:
    with pytest.raises(RequestInvalidError, match=said):
        Tags(tagged)
