"""Rows that several shards divide come together as one rank would have published them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.payloads import shard_rig
from tests.client.payloads.shard_rig import part_over, written, written_bytes
from tests.client.publishing.sharded import (
    HEAD,
    LENGTHS,
    ROWS,
    VOCABULARY,
    WIDTH,
    a_student,
    ids_of,
    logits_of,
    ranks,
    whole_teacher,
)
from tests.foreign import foreign

from teacher_logits.errors import AlignmentError, PayloadInvalidError, TeacherLogitsError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.layout import RowStatus
from teacher_logits.shard_parts import part_grid
from teacher_logits_client.payloads.assembled import AssembledPart, assemble
from teacher_logits_client.payloads.step_guards import check_shape

if TYPE_CHECKING:
    from teacher_logits_client.payloads.row_columns import Part

EXACT = (
    Kind.TOPK_IDS,
    Kind.TOPK_LOGITS,
    Kind.ROW_OFFSETS,
    Kind.ROW_WINDOWS,
    Kind.ROW_DIGESTS,
    Kind.ROW_STATUS,
)
"""What is the same bit for bit, however the rows are divided."""


def shards(
    *sharded_by: str, tensor: int = 1, context: int = 1, step: int = 0, **given: object
) -> list[Part]:
    profiles = ranks(whole_teacher("teacher"), *sharded_by, tensor=tensor, context=context)
    rows: dict[str, object] = {"ids": ids_of(step), "lengths": LENGTHS, **given}
    return [written(profile, logits_of(step), **rows) for profile in profiles]


def whole(**given: object) -> Part:
    rows: dict[str, object] = {"ids": ids_of(0), "lengths": LENGTHS, **given}
    return written(whole_teacher("teacher"), logits_of(0), **rows)


WRITTEN = [
    written_bytes(profile, logits_of(0), ids=ids_of(0), lengths=LENGTHS)
    for profile in ranks(whole_teacher("teacher"), "zigzag", "vocabulary", tensor=2, context=2)
]


@st.composite
def logits_and_lengths(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Coarse logits with a NaN, a +inf, masked ids and short rows now and then."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    logits = (torch.randn(ROWS, WIDTH, HEAD, generator=generator) * 4).round() / 2
    logits[:, :, VOCABULARY:] = 50.0
    lengths = torch.tensor(draw(st.lists(st.integers(1, WIDTH), min_size=ROWS, max_size=ROWS)))
    for value in draw(st.sets(st.sampled_from([torch.nan, torch.inf]))):
        row, place = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, WIDTH - 1))
        logits[row, place, draw(st.integers(0, VOCABULARY - 1))] = value
    return logits, lengths


@settings(max_examples=60, deadline=None)
@given(
    rows=logits_and_lengths(),
    sharded_by=st.sampled_from(
        [("zigzag",), ("sequence",), ("vocabulary",), ("zigzag", "vocabulary")]
    ),
    tensor=st.integers(1, 4),
    context=st.sampled_from([1, 2, 3]),
    by_order=st.randoms(use_true_random=False),
)
def test_what_one_rank_would_say_comes_of_all_however_they_divide_it(
    rows: tuple[torch.Tensor, torch.Tensor],
    sharded_by: tuple[str, ...],
    tensor: int,
    context: int,
    by_order: object,
) -> None:
    logits, lengths = rows
    teacher = whole_teacher("teacher")
    tensor = tensor if "vocabulary" in sharded_by else 1
    context = 1 if sharded_by == ("vocabulary",) else context
    profiles = ranks(teacher, *sharded_by, tensor=tensor, context=context)
    parts = [written(each, logits, ids=ids_of(0), lengths=lengths) for each in profiles]
    by_order.shuffle(parts)  # type: ignore[attr-defined]
    expected = written(teacher, logits, ids=ids_of(0), lengths=lengths)

    (found,) = assemble(parts)

    assert set(found) == set(expected)
    assert found.payload.whole_rows
    for kind in expected:
        if kind in EXACT or part_grid(profiles[0]).vocabulary_parts == 1:
            assert torch.equal(found[kind], expected[kind]), kind
        else:
            close = 1e-3 if kind is Kind.TOPK_LOGPROBS else 2e-6
            torch.testing.assert_close(found[kind], expected[kind], rtol=close, atol=close)
            assert found[kind].dtype == expected[kind].dtype


@pytest.mark.parametrize(
    ("sharded_by", "tensor", "context"),
    [(("zigzag",), 1, 3), (("vocabulary",), 2, 1), (("sequence", "vocabulary"), 2, 2)],
)
def test_some_of_the_rows_are_those_of_all(
    sharded_by: tuple[str, ...], tensor: int, context: int
) -> None:
    (found,) = assemble(shards(*sharded_by, tensor=tensor, context=context))

    some, offsets = found.rows(1, 2), found[Kind.ROW_OFFSETS]
    positions = slice(int(offsets[1]), int(offsets[3]))
    assert torch.equal(some[Kind.TOPK_IDS], found[Kind.TOPK_IDS][positions])
    assert torch.equal(some[Kind.LOG_TAIL], found[Kind.LOG_TAIL][positions])
    assert torch.equal(some[Kind.ROW_OFFSETS], offsets[1:4] - offsets[1])
    assert some.first_row == 1


def test_whole_payloads_stay_what_they_are() -> None:
    part = whole()

    assert assemble([part]) == [part]
    assert not part.is_copy


def test_rows_whose_positions_lie_in_one_shard_are_views_of_it() -> None:
    # Of 12 positions rank 0 of 2 holds the first six.
    windows = torch.tensor([[0, 6], [0, 3], [2, 4], [1, 2]])
    parts = shards("sequence", context=2, windows=windows)

    (found,) = assemble(parts)

    assert not found.is_copy
    ids = found[Kind.TOPK_IDS]
    assert ids.data_ptr() == parts[0][Kind.TOPK_IDS].data_ptr()
    assert torch.equal(ids, whole(windows=windows)[Kind.TOPK_IDS])


def test_rows_that_shards_divide_are_a_copy_and_say_so() -> None:
    (found,) = assemble(shards("zigzag", context=2))

    assert found.is_copy
    assert found[Kind.TOPK_IDS] is found[Kind.TOPK_IDS]


def test_windows_are_cut_with_their_rows() -> None:
    windows = torch.tensor([[3, 9], [1, 2], [0, 7], [9, 1]])

    (found,) = assemble(shards("zigzag", context=3, windows=windows))

    expected = whole(windows=windows)
    assert not found.payload.whole_rows
    for kind in expected:
        assert torch.equal(found[kind], expected[kind]), kind


def test_rows_of_a_list_are_cut_each_at_its_own_length() -> None:
    rows = [row[:length].tolist() for row, length in zip(ids_of(0), LENGTHS, strict=True)]
    profiles = ranks(whole_teacher("teacher"), "zigzag", context=2)
    held: list[list[torch.Tensor]] = [[], []]
    for row, length in enumerate(LENGTHS.tolist()):
        quarter = -(-length // 4)  # each row padded to a multiple of 4
        cut = logits_of(0)[row].repeat(2, 1)
        for rank in range(2):
            held[rank] += [cut[at * quarter :][:quarter] for at in (rank, 3 - rank)]
    parts = []
    for profile, pieces in zip(profiles, held, strict=True):
        whole_logits = torch.cat(pieces)
        parts.append(_written_packed(profile, whole_logits, rows))

    (found,) = assemble(parts)

    assert torch.equal(found[Kind.TOPK_IDS], whole()[Kind.TOPK_IDS])


def _written_packed(profile: object, logits: torch.Tensor, rows: list[list[int]]) -> Part:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_rig, "own_logits", lambda _, __: logits)
        return written(profile, logits_of(0), ids=rows)  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_parts_of_another_make_are_put_together_or_refused_by_the_tree(seed: int) -> None:
    dice = random.Random(seed)
    parts = [part_over(payload, data) for payload, data in WRITTEN]
    for _ in range(20):
        at = dice.randrange(len(parts))
        payload, data = WRITTEN[at]
        found = foreign(dice, payload, bytes(data))
        if found is None:
            continue
        try:
            check_shape(found.payload, a_student("teacher"))
            strange = part_over(found.payload, found.data)
            (whole_rows,) = assemble([*parts[:at], strange, *parts[at + 1 :]])
            whole_rows.look_again()
            for kind in whole_rows:
                assert len(whole_rows[kind]) in (ROWS, ROWS + 1, whole_rows.payload.position_count)
        except TeacherLogitsError:
            continue


@pytest.mark.parametrize("lost", range(4))
def test_a_part_that_is_missing_is_named_and_nothing_is_filled_in(lost: int) -> None:
    parts = shards("zigzag", "vocabulary", tensor=2, context=2)

    with pytest.raises(PayloadInvalidError, match="were granted without sequence part") as refusal:
        assemble([part for at, part in enumerate(parts) if at != lost])

    assert f"sequence part {lost // 2}" in str(refusal.value)


def test_both_parts_of_a_sequence_part_that_are_missing_are_named() -> None:
    parts = shards("zigzag", "vocabulary", tensor=2, context=2)

    with pytest.raises(PayloadInvalidError, match="without sequence part 1 of 2"):
        assemble(parts[:2])


def test_a_part_that_is_there_twice_is_refused() -> None:
    parts = shards("vocabulary", tensor=2)

    with pytest.raises(PayloadInvalidError, match="once"):
        assemble([*parts, parts[1]])


def test_shards_beside_a_payload_of_the_whole_rows_are_refused() -> None:
    with pytest.raises(PayloadInvalidError, match="whole, and in 2 others"):
        assemble([whole(), *shards("vocabulary", tensor=2)])


def test_ranks_that_hold_other_ids_at_other_positions_are_refused() -> None:
    parts = shards("vocabulary", tensor=2)
    shorter = shards("vocabulary", tensor=2, lengths=torch.tensor([12, 3, 6, 10]))

    with pytest.raises(PayloadInvalidError, match=r"row 2 has the positions 0 to 6 in .* 0 to 5"):
        assemble([parts[0], shorter[1]])


def test_positions_between_two_runs_that_no_shard_holds_are_named() -> None:
    parts = shards("zigzag", context=3)
    shorter = shards("zigzag", context=3, lengths=torch.tensor([4, 3, 7, 10]))

    with pytest.raises(PayloadInvalidError) as refusal:
        assemble([parts[0], parts[1], shorter[2]])

    assert "positions 4 to 7 of rows 0 to 0" in refusal.value.message


def test_shards_of_other_tokens_are_refused() -> None:
    parts = shards("sequence", context=2)
    other = shards("sequence", context=2, ids=ids_of(1))
    (found,) = assemble([parts[0], other[1]])

    with pytest.raises(AlignmentError, match="are of other tokens") as refusal:
        found[Kind.ROW_DIGESTS]

    assert refusal.value.facts["row"] == 0


def test_a_row_that_is_bad_in_one_part_is_bad_and_blank_in_all() -> None:
    logits = logits_of(0)
    logits[2, 1, 20] = torch.nan
    profiles = ranks(whole_teacher("teacher"), "zigzag", "vocabulary", tensor=2, context=2)
    parts = [written(each, logits, ids=ids_of(0), lengths=LENGTHS) for each in profiles]

    (found,) = assemble(parts)

    assert list(found.status) == [RowStatus.OK, RowStatus.OK, RowStatus.NAN, RowStatus.OK]
    start, stop = found[Kind.ROW_OFFSETS][2:4].tolist()
    assert bool((found[Kind.TOPK_IDS][start:stop] == -1).all())
    for kind in (Kind.TOPK_LOGPROBS, Kind.LOG_TAIL, Kind.ACTUAL_LOGPROB):
        assert not found[kind][start:stop].any()
        assert found[kind][:start].any()


def test_runs_that_change_between_announcement_and_seal_are_refused() -> None:
    parts = shards("zigzag", context=2)
    found = AssembledPart(parts)
    parts[1][Kind.ROW_RUNS][0, 0] += 1

    with pytest.raises(PayloadInvalidError, match="row_runs of payload p-1 have changed"):
        found.look_again()


def test_runs_of_other_counts_than_the_offsets_say_are_refused() -> None:
    parts = shards("zigzag", context=2)
    parts[1][Kind.ROW_RUNS][0, 1] += 1

    with pytest.raises(PayloadInvalidError, match="has 6 positions in payload p-1, and its"):
        assemble(parts)


def test_vocabulary_parts_without_raw_logits_are_refused() -> None:
    teacher = whole_teacher("teacher")
    lean = replace(teacher, columns=tuple(k for k in teacher.columns if k is not Kind.TOPK_LOGITS))
    profiles = ranks(lean, "vocabulary", tensor=2)
    parts = [written(each, logits_of(0), ids=ids_of(0), lengths=LENGTHS) for each in profiles]
    (found,) = assemble(parts)

    with pytest.raises(PayloadInvalidError, match="without topk_logits"):
        found[Kind.TOPK_IDS]
