"""Shard parts: the ranks of a teacher hold its rows between them, each position and id once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.some_payload import some_payload

from teacher_logits.errors import GridMismatchError, PayloadInvalidError, RequestInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType, lay_out
from teacher_logits.locality import ModelGrid
from teacher_logits.payload import Payload, check_payload
from teacher_logits.profiles import TeacherProfile
from teacher_logits.shard_parts import (
    ShardedBy,
    ShardPart,
    columns_of_rank,
    is_shard,
    part_grid,
    part_of,
    runs_of_part,
    shard_of,
)
from teacher_logits.wire import teacher_from_wire, teacher_to_wire
from teacher_logits.wire.payloads import payload_from_wire, payload_to_wire

WAYS = (
    (),
    (ShardedBy.VOCABULARY,),
    (ShardedBy.ZIGZAG,),
    (ShardedBy.SEQUENCE, ShardedBy.VOCABULARY),
)


def ranks(
    sharded_by: tuple[ShardedBy, ...], *, dp: int, tp: int, cp: int, ids: int, head: int
) -> list[TeacherProfile]:
    profile = TeacherProfile(
        teacher_id="teacher",
        vocabulary_size=ids,
        head_rows=head,
        top_k=2,
        max_row_tokens=64,
        batch_grid=BatchGrid(global_batch_size=dp, data_parallel_size=dp, micro_batch_size=1),
        sharded_by=sharded_by,
    )
    return [
        replace(
            profile,
            data_parallel_rank=d,
            model_grid=ModelGrid(
                node_count=1,
                gpus_per_node=8,
                tensor_parallel_size=tp,
                context_parallel_size=cp,
                tensor_parallel_rank=t,
                context_parallel_rank=c,
            ),
        )
        for d, c, t in product(range(dp), range(cp), range(tp))
    ]


@given(
    sharded_by=st.sampled_from(WAYS[1:]),
    dp=st.integers(1, 3),
    group=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    ids=st.integers(1, 40),
    padding=st.integers(0, 20),
)
def test_the_ranks_that_hold_ids_are_the_shards_each_once(
    sharded_by: tuple[ShardedBy, ...], dp: int, group: tuple[int, int], ids: int, padding: int
) -> None:
    tp, cp = group
    profiles = ranks(sharded_by, dp=dp, tp=tp, cp=cp, ids=ids, head=ids + padding)
    grid = part_grid(profiles[0])
    writers = [profile for profile in profiles if is_shard(profile)]

    assert sorted(map(shard_of, writers)) == list(range(dp * grid.count))
    assert [grid.rank_of(shard_of(p)) for p in writers] == [p.data_parallel_rank for p in writers]
    parts = [part_of(p) for p in writers if p.data_parallel_rank == 0]
    if grid.count == 1:
        assert parts == [None]
        return
    held = [
        (part.sequence_part, each)
        for part in parts
        if part is not None
        for each in range(part.first_id, part.stop_id)
    ]
    assert all(columns_of_rank(p).stop <= ids + padding for p in writers)
    assert sorted(held) == list(product(range(grid.sequence_parts), range(ids)))


@given(
    sharded_by=st.sampled_from([ShardedBy.SEQUENCE, ShardedBy.ZIGZAG]),
    parts=st.integers(1, 5),
    times=st.integers(0, 4),
)
def test_the_parts_of_a_row_hold_each_position_once(
    sharded_by: ShardedBy, parts: int, times: int
) -> None:
    length = 2 * parts * times
    runs = [
        run
        for part in range(parts)
        for run in runs_of_part(length, part=part, parts=parts, sharded_by=(sharded_by,))
    ]

    assert sorted(each for run in runs for each in run) == list(range(length))


def test_a_row_that_cannot_be_cut_evenly_is_refused_with_what_to_pad_it_to() -> None:
    with pytest.raises(PayloadInvalidError, match="pad it to a multiple of 3"):
        runs_of_part(7, part=0, parts=3, sharded_by=(ShardedBy.SEQUENCE,))
    with pytest.raises(PayloadInvalidError, match="pad it to a multiple of 6"):
        runs_of_part(9, part=0, parts=3, sharded_by=(ShardedBy.ZIGZAG,))


@pytest.mark.parametrize("sharded_by", WAYS, ids=str)
def test_a_profile_comes_over_the_wire_as_it_was(sharded_by: tuple[ShardedBy, ...]) -> None:
    for profile in ranks(sharded_by, dp=2, tp=2, cp=2, ids=30, head=32):
        assert teacher_from_wire(teacher_to_wire(profile)) == profile


def test_words_stand_for_what_divides_the_rows_and_others_are_refused() -> None:
    (first, *_) = ranks((), dp=1, tp=1, cp=1, ids=4, head=4)

    taken = replace(first, sharded_by=("zigzag", "vocabulary", "zigzag"))  # type: ignore[arg-type]

    assert taken.sharded_by == (ShardedBy.ZIGZAG, ShardedBy.VOCABULARY)
    with pytest.raises(RequestInvalidError, match="'vocabulary', 'sequence', 'zigzag'"):
        replace(first, sharded_by="rows")  # type: ignore[arg-type]


def a_payload(part: ShardPart | None, *, runs: int) -> Payload:
    specs = [(ColumnKind.TOPK_IDS, ElementType.INT32, (3, 2))]
    if runs:
        specs.append((ColumnKind.ROW_RUNS, ElementType.INT32, (1, runs)))
    columns, size_bytes = lay_out(specs)
    return some_payload(
        payload_id="p",
        position_count=3,
        top_k=2,
        vocabulary_size=10,
        columns=columns,
        size_bytes=size_bytes,
        part=part,
    )


def test_a_part_comes_over_the_wire_as_it_was() -> None:
    part = ShardPart(sequence_part=1, sequence_parts=2, first_id=5, stop_id=10)
    payload = a_payload(part, runs=4)

    assert payload_from_wire(payload_to_wire(payload)) == payload


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [
        ((2, 2, 0, 10), 4),  # no such sequence part
        ((-1, 2, 0, 10), 4),
        ((0, 1, 5, 5), 0),  # no ids
        ((0, 1, 5, 11), 0),  # beyond the vocabulary
        ((0, 2, 0, 10), 0),  # whose positions nothing says
        ((0, 2, 0, 10), 3),  # half a run
        ((0, 1, 0, 10), 2),  # runs of whole rows
    ],
)
def test_a_part_that_cannot_be_is_refused(numbers: tuple[int, int, int, int], runs: int) -> None:
    at, parts, first, stop = numbers
    part = ShardPart(sequence_part=at, sequence_parts=parts, first_id=first, stop_id=stop)

    with pytest.raises(PayloadInvalidError, match="is a part that cannot be"):
        check_payload(a_payload(part, runs=runs))


def test_runs_without_a_part_are_refused() -> None:
    with pytest.raises(PayloadInvalidError, match="is a part that cannot be: none"):
        check_payload(a_payload(None, runs=2))


@pytest.mark.parametrize("wrong", [-1, 2, 1.5, None])
@pytest.mark.parametrize("name", ["tensor_parallel_rank", "context_parallel_rank"])
def test_a_rank_that_is_none_of_its_grid_is_no_ones_shard(name: str, wrong: object) -> None:
    [profile] = ranks((ShardedBy.VOCABULARY,), dp=1, tp=1, cp=1, ids=8, head=8)
    assert profile.model_grid is not None
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 2}
    grid = replace(profile.model_grid, **sizes, **{name: wrong})  # type: ignore[arg-type]

    with pytest.raises(GridMismatchError, match=name):
        is_shard(replace(profile, model_grid=grid))


@pytest.mark.parametrize(("part", "parts"), [(2, 2), (-1, 2), (0, 0)])
def test_a_part_that_is_none_has_no_positions(part: int, parts: int) -> None:
    with pytest.raises(PayloadInvalidError, match="counted from 0"):
        runs_of_part(8, part=part, parts=parts, sharded_by=(ShardedBy.SEQUENCE,))
