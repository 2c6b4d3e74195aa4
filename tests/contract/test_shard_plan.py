"""The shard plan: a slice is tiled exactly once, or the plan is refused with numbers."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_logits.errors import PayloadConflictError, PayloadInvalidError
from teacher_logits.shard_plan import ShardBox, ShardPlan, plan_shards
from teacher_logits.zigzag import zigzag_positions

Cell = tuple[int, int, int]


def cells(box: ShardBox) -> list[Cell]:
    """The numbers of each cell of a box, in the order in which it holds them."""
    positions = [each for run in box.positions for each in run]
    return list(product(box.rows, positions, box.ids))


def moved(plan: ShardPlan, shards: list[ShardBox]) -> dict[Cell, list[Cell]]:
    """What lands in each place of a slice, by the numbers that it has in its shard."""
    found: dict[Cell, list[Cell]] = {}
    for piece in plan.pieces:
        box = shards[piece.shard]
        positions = [each for run in box.positions for each in run]
        sources = product(piece.source_rows, piece.source_positions, piece.source_ids)
        targets = product(piece.rows, piece.positions, piece.ids)
        for (row, position, column), target in zip(sources, targets, strict=True):
            cell = (box.rows[row], positions[position], box.ids[column])
            found.setdefault(target, []).append(cell)
    return found


def cuts(draw: st.DrawFn, length: int) -> list[range]:
    inner = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3))
    return [
        range(a, b) for a, b in pairwise(sorted({0, length, *(i for i in inner if i < length)}))
    ]


@st.composite
def tilings(draw: st.DrawFn) -> list[ShardBox]:
    """Shards that hold all of 3 rows, up to 16 positions and up to 9 ids, each once."""
    context = draw(st.integers(1, 3))
    length = 2 * context * draw(st.integers(1, 2))
    sequence = (
        [zigzag_positions(length, rank=rank, size=context) for rank in range(context)]
        if draw(st.booleans())
        else [(run,) for run in cuts(draw, length)]
    )
    ids, rows = cuts(draw, draw(st.integers(1, 9))), cuts(draw, 3)
    boxes = [
        ShardBox(rows=r, positions=p, ids=i, name=f"{r} {p} {i}")
        for r, p, i in product(rows, sequence, ids)
    ]
    return draw(st.permutations(boxes))


@st.composite
def slices(draw: st.DrawFn, shards: list[ShardBox]) -> ShardBox:
    length = 1 + max(run[-1] for box in shards for run in box.positions)
    ids = 1 + max(box.ids[-1] for box in shards)
    first = draw(st.integers(0, ids - 1))
    row = draw(st.integers(0, 2))
    context = draw(st.sampled_from([c for c in (1, 2, 3) if c == 1 or length % (2 * c) == 0]))
    rank = draw(st.integers(0, context - 1))
    return ShardBox(
        rows=range(row, draw(st.integers(row + 1, 3))),
        positions=zigzag_positions(length, rank=rank, size=context),
        ids=range(first, draw(st.integers(first + 1, ids))),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_each_cell_of_a_slice_comes_from_one_shard_and_is_the_one_that_was_wanted(
    data: st.DataObject,
) -> None:
    shards = data.draw(tilings())
    wanted = data.draw(slices(shards))

    plan = plan_shards(shards, wanted)

    sizes = [range(size) for size in plan.size]
    expected = dict(zip(product(*sizes), ([cell] for cell in cells(wanted)), strict=True))
    assert moved(plan, shards) == expected


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_slice_that_needs_a_missing_shard_is_refused(data: st.DataObject) -> None:
    shards = data.draw(tilings())
    wanted = data.draw(slices(shards))
    lost = data.draw(st.sampled_from(plan_shards(shards, wanted).pieces)).shard

    with pytest.raises(PayloadInvalidError, match="none of the"):
        plan_shards([box for at, box in enumerate(shards) if at != lost], wanted)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_shard_that_is_there_twice_is_refused_and_both_are_named(data: st.DataObject) -> None:
    shards = data.draw(tilings())
    wanted = data.draw(slices(shards))
    twice = data.draw(st.sampled_from(plan_shards(shards, wanted).pieces)).shard

    with pytest.raises(PayloadConflictError) as refusal:
        plan_shards([*shards, shards[twice]], wanted)

    assert refusal.value.facts["first_shard"] == shards[twice].name
    assert refusal.value.facts["second_shard"] == shards[twice].name


def test_what_is_missing_is_named_by_its_rows_positions_and_ids() -> None:
    left = ShardBox(rows=range(4, 8), positions=(range(0, 2), range(6, 8)), ids=range(0, 10))
    wanted = ShardBox(rows=range(4, 6), positions=(range(0, 8),), ids=range(5, 12))

    with pytest.raises(PayloadInvalidError) as refusal:
        plan_shards([left], wanted)

    assert "positions 0 to 1 of rows 4 to 5, ids 10 to 11" in refusal.value.message
    assert refusal.value.facts == {
        "first_row": 4,
        "row_count": 2,
        "first_position": 0,
        "position_count": 2,
        "first_id": 10,
        "id_count": 2,
        "shards": 1,
    }


def test_two_shards_that_share_a_corner_are_refused_with_that_corner() -> None:
    boxes = [
        ShardBox(rows=range(2), positions=(range(0, 5),), ids=range(4), name="cp 0"),
        ShardBox(rows=range(2), positions=(range(4, 8),), ids=range(4), name="cp 1"),
    ]
    wanted = ShardBox(rows=range(2), positions=(range(8),), ids=range(4))

    with pytest.raises(PayloadConflictError, match=r"positions 4 to 4 .* are in cp 0 and in cp 1"):
        plan_shards(boxes, wanted)


def test_a_slice_within_one_shard_is_a_view_even_where_both_are_in_zigzag_order() -> None:
    runs = zigzag_positions(16, rank=1, size=2)
    held = ShardBox(rows=range(8), positions=runs, ids=range(100))

    plan = plan_shards([held], ShardBox(rows=range(2, 4), positions=runs, ids=range(100)))

    assert plan.is_view
    (piece,) = plan.pieces
    assert (piece.source_rows, piece.source_positions) == (range(2, 4), range(8))


def test_what_no_shard_could_have_is_refused() -> None:
    wanted = ShardBox(rows=range(1), positions=(range(4),), ids=range(4))
    broken = [
        ShardBox(rows=range(0, 4, 2), positions=(range(4),), ids=range(4)),
        ShardBox(rows=range(1), positions=(range(-1, 4),), ids=range(4)),
        ShardBox(rows=range(1), positions=(range(3), range(2, 4)), ids=range(4)),
    ]

    for box in broken:
        with pytest.raises(PayloadInvalidError):
            plan_shards([box], wanted)


def test_a_position_in_two_runs_is_found_with_an_empty_run_between_them() -> None:
    rows, ids = range(2), range(4)
    shard = ShardBox(rows=rows, positions=(range(2, 34), range(2, 2), range(0, 40)), ids=ids)

    with pytest.raises(PayloadInvalidError, match="positions 2 to 33 in two of its runs"):
        plan_shards([shard], ShardBox(rows=rows, positions=(range(4),), ids=ids))


BOX = ShardBox(rows=range(2), positions=(range(4),), ids=range(8))


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "a shard",
        ShardBox(rows=2, positions=(range(4),), ids=range(8)),  # type: ignore[arg-type]
        ShardBox(rows=[0, 1], positions=(range(4),), ids=range(8)),  # type: ignore[arg-type]
        ShardBox(rows=range(2), positions=range(4), ids=range(8)),  # type: ignore[arg-type]
        ShardBox(rows=range(2), positions=None, ids=range(8)),  # type: ignore[arg-type]
        ShardBox(rows=range(2), positions=(range(4),), ids=None),  # type: ignore[arg-type]
    ],
)
def test_a_box_is_made_of_runs(wrong: ShardBox) -> None:
    with pytest.raises(PayloadInvalidError, match=r"ShardBox|give runs of step 1"):
        plan_shards([BOX], wrong)
    with pytest.raises(PayloadInvalidError, match=r"ShardBox|give runs of step 1"):
        plan_shards([wrong], BOX)
