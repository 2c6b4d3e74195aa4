"""Row metadata: whatever takes rows takes all that is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.data_plane.row_meta import RowMeta, join_rows


def some_rows(count: int, *, first: int = 0, partition: str = "step") -> RowMeta:
    """Row n has a length of n, and a tag that says n."""
    numbers = range(first, first + count)
    return RowMeta(
        partition_id=partition,
        sample_ids=tuple(f"s{n}" for n in numbers),
        sequence_lengths=tuple(numbers),
        tags=tuple({"n": n} for n in numbers),
    )


def is_in_step(meta: RowMeta) -> bool:
    own = zip(meta.sample_ids, meta.sequence_lengths, meta.tags, strict=True)
    return all(key == f"s{length}" and tag == {"n": length} for key, length, tag in own)


@given(order=st.permutations(range(6)), kept=st.integers(1, 6), cut=st.integers(1, 5))
def test_rows_stay_whole_however_they_are_taken_and_joined(
    order: list[int], kept: int, cut: int
) -> None:
    taken = some_rows(6).take(order[:kept])
    dropped = some_rows(6).drop([f"s{n}" for n in order[:cut]])
    joined = join_rows([some_rows(6).slice(0, cut), some_rows(6).slice(cut, 6)])

    assert [is_in_step(each) for each in (taken, dropped, joined)] == [True] * 3
    assert list(taken.sequence_lengths) == order[:kept]
    assert set(dropped.sample_ids) == {f"s{n}" for n in order[cut:]}
    assert joined == some_rows(6)


def test_the_width_that_ranks_pad_to_is_minted_once_and_kept() -> None:
    whole = some_rows(6).with_pad_target(4, 2)

    part = whole.slice(0, 2).with_pad_target(4)

    assert whole.pad_to_seqlen == part.pad_to_seqlen == 8
    assert some_rows(5).with_pad_target(4).pad_to_seqlen == 4
    assert some_rows(6).with_pad_target().pad_to_seqlen == 5


def test_a_plan_is_of_the_rows_that_it_was_made_for() -> None:
    whole = replace(some_rows(3), plan={"bins": ((0, 1), (2,))})

    assert whole.take([0, 1]).plan is None
    assert join_rows([whole, some_rows(1, first=9)]).plan is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sample_ids": ()}, "0 sample ids"),
        ({"sequence_lengths": (1, 2)}, "3 sample ids, 2 lengths and 3 tags"),
        ({"tags": ({},)}, "3 sample ids, 3 lengths and 1 tags"),
        ({"sample_ids": ("a", "b", "a")}, "sample id 'a' is there 2 times among 3"),
        ({"sample_ids": ("a", 7, "b")}, "sample id 7 is no text"),
        ({"sequence_lengths": (1, -1, 2)}, "row 1 has a length of -1"),
        ({"sequence_lengths": (1, 1.5, 2)}, "row 1 has a length of 1.5"),
    ],
)
def test_rows_of_which_something_is_missing_are_refused(
    change: dict[str, object], told: str
) -> None:
    with pytest.raises(PayloadInvalidError, match=told):
        replace(some_rows(3), **change)  # type: ignore[arg-type]


def test_what_is_no_row_of_these_is_refused() -> None:
    rows = some_rows(3)

    with pytest.raises(PayloadInvalidError, match="row 3 is wanted of 3"):
        rows.take([0, 3])
    with pytest.raises(PayloadInvalidError, match="sample id 's9' is to be dropped"):
        rows.drop(["s9"])
    with pytest.raises(PayloadInvalidError, match="at least one row"):
        rows.drop(rows.sample_ids)
    with pytest.raises(PayloadInvalidError, match="multiple of 0"):
        rows.with_pad_target(0)


@pytest.mark.parametrize(
    "others",
    [
        [some_rows(1, first=9, partition="other")],
        [some_rows(1, first=9).with_pad_target(64)],
        [some_rows(1)],
    ],
)
def test_rows_of_another_partition_or_width_or_the_same_are_not_joined(
    others: list[RowMeta],
) -> None:
    with pytest.raises(PayloadInvalidError):
        join_rows([some_rows(3), *others])


def test_no_rows_are_not_joined() -> None:
    with pytest.raises(PayloadInvalidError, match="0 partitions"):
        join_rows([])
