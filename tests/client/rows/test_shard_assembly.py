"""Shards of full logits become the slice that a student's rank wants: by one copy, or a view."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.shard_plan import ShardBox, plan_shards
from teacher_logits.zigzag import zigzag_positions
from teacher_logits_client.rows.shard_assembly import assemble_shards

ROWS, LENGTH, IDS = 3, 12, 10
WHOLE = torch.arange(ROWS * LENGTH * IDS, dtype=torch.float32).view(ROWS, LENGTH, IDS)


def cut(box: ShardBox) -> torch.Tensor:
    """What a box has of the whole logits, its runs one behind the other."""
    rows, ids = slice(box.rows.start, box.rows.stop), slice(box.ids.start, box.ids.stop)
    return torch.cat([WHOLE[rows, run.start : run.stop, ids] for run in box.positions], 1)


def shards(*, context: int, borders: tuple[int, ...]) -> list[ShardBox]:
    """Zigzag context-parallel ranks, each over the ids between some borders."""
    return [
        ShardBox(
            rows=range(ROWS),
            positions=zigzag_positions(LENGTH, rank=rank, size=context),
            ids=range(start, stop),
        )
        for rank, (start, stop) in product(range(context), pairwise(borders))
    ]


@settings(max_examples=60, deadline=None)
@given(
    teacher=st.sampled_from([1, 2, 3]),
    student=st.sampled_from([1, 2, 3]),
    rank=st.integers(0, 2),
    borders=st.sets(st.integers(1, IDS - 1), max_size=3),
    rows=st.sampled_from([range(3), range(1, 2), range(1, 3)]),
)
def test_a_student_s_slice_is_what_the_whole_logits_have_there(
    teacher: int, student: int, rank: int, borders: set[int], rows: range
) -> None:
    boxes = shards(context=teacher, borders=(0, *sorted(borders), IDS))
    wanted = ShardBox(
        rows=rows,
        positions=zigzag_positions(LENGTH, rank=rank % student, size=student),
        ids=range(IDS),
    )
    plan = plan_shards(boxes, wanted)

    assert torch.equal(assemble_shards(plan, [cut(box) for box in boxes]), cut(wanted))


def test_a_slice_that_one_shard_has_is_a_view_of_it() -> None:
    (box,) = shards(context=1, borders=(0, IDS))
    held = cut(box)
    wanted = ShardBox(rows=range(1, 2), positions=(range(2, 5),), ids=range(IDS))

    found = assemble_shards(plan_shards([box], wanted), [held])

    assert found.data_ptr() == held[1, 2].data_ptr()
    assert torch.equal(found, cut(wanted))


def test_memory_of_the_caller_s_own_is_written_and_returned() -> None:
    boxes = shards(context=2, borders=(0, 4, IDS))
    wanted = ShardBox(rows=range(ROWS), positions=(range(LENGTH),), ids=range(IDS))
    out = torch.full((ROWS, LENGTH, IDS), torch.nan)

    found = assemble_shards(plan_shards(boxes, wanted), [cut(box) for box in boxes], out=out)

    assert found is out
    assert torch.equal(out, WHOLE)


def test_what_is_not_what_was_planned_is_refused() -> None:
    boxes = shards(context=2, borders=(0, 4, IDS))
    wanted = ShardBox(rows=range(ROWS), positions=(range(LENGTH),), ids=range(IDS))
    plan, held = plan_shards(boxes, wanted), [cut(box) for box in boxes]

    for tensors, message in (
        (held[:3], "3 tensors are given, and the plan takes from shard 3"),
        ([held[0][:, :4], *held[1:]], "the plan takes rows, positions and ids up to"),
        ([held[0].double(), *held[1:]], "shards and slice are unlike"),
    ):
        with pytest.raises(PayloadInvalidError, match=message):
            assemble_shards(plan, tensors)
    with pytest.raises(PayloadInvalidError, match="shards and slice are unlike"):
        assemble_shards(plan, held, out=torch.empty(ROWS, LENGTH, IDS - 1))


SLICE = ShardBox(rows=range(2), positions=(range(4),), ids=range(8))
HALVES = plan_shards(
    [ShardBox(rows=range(2), positions=(range(4),), ids=ids) for ids in (range(4), range(4, 8))],
    SLICE,
)
HALF = torch.zeros(2, 4, 4)


@pytest.mark.parametrize(
    "tensors",
    [
        None,
        {0: HALF, 1: HALF},
        [HALF, None],
        [HALF.numpy(), HALF.numpy()],
        [HALF.to_sparse(), HALF],
        [HALF.to("meta"), HALF],
        [torch.nested.nested_tensor([HALF], layout=torch.jagged), HALF],
    ],
    ids=["none", "a mapping", "one is none", "arrays", "sparse", "meta", "nested"],
)
def test_shards_are_dense_tensors(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(PayloadInvalidError):
        assemble_shards(HALVES, tensors)


@pytest.mark.parametrize(
    "out",
    ["x", torch.zeros(1, 1, 1).expand(2, 4, 8), torch.zeros(2, 4, 8, requires_grad=True)],
    ids=["a text", "expanded", "a parameter"],
)
def test_a_slice_is_copied_into_memory_alone(out: torch.Tensor) -> None:
    with pytest.raises(PayloadInvalidError, match="out "):
        assemble_shards(HALVES, [HALF, HALF], out=out)
