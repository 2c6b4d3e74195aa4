"""Steps whose rows several shards divide: whole once all parts are there, and they say which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_logits.errors import PayloadConflictError, ProducerLostError
from teacher_logits.shard_parts import PartGrid
from teacher_logits_server.steps import Steps
from teacher_logits_server.steps.claims import Claim

if TYPE_CHECKING:
    from teacher_logits_server.steps.parts import Step

ROWS = 8
GRID = PartGrid(sequence_parts=2, vocabulary_parts=2)


def claim(shard: int, *, of: int = 1, grid: PartGrid = GRID, **changes: object) -> Claim:
    """A claim of a shard's rows; the step's are cut evenly over ``of`` data-parallel ranks."""
    share, rank = ROWS // of, grid.rank_of(shard)
    values: dict[str, object] = {
        "payload_id": f"p{shard}",
        "session_id": f"publisher{shard}",
        "request_id": f"r{shard}",
        "step": 0,
        "shard": shard,
        "rows": range(rank * share, (rank + 1) * share),
        "real_rows": ROWS,
        "grid": grid,
    }
    return Claim(**{**values, **changes})  # type: ignore[arg-type]


def seal(steps: Steps, *claims: Claim, valid_count: int | None = None) -> None:
    for each in claims:
        steps.reserve(each)
        steps.seal(each.payload_id, valid_count=valid_count, digest="")


def step_of(steps: Steps) -> Step:
    step = steps.find(0)
    assert step is not None
    return step


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations(range(8)),
    grid=st.sampled_from([GRID, PartGrid(sequence_parts=4), PartGrid(vocabulary_parts=4)]),
)
def test_a_step_is_had_with_the_last_part_of_the_last_rank_and_not_before(
    order: list[int], grid: PartGrid
) -> None:
    steps = Steps()
    for shard in order:
        assert steps.had(0) is None
        seal(steps, claim(shard, of=2, grid=grid))

    step = steps.had(0)
    assert step is not None
    assert [part.claim.shard for part in step.sealed] == list(range(8))


def test_parts_of_a_rank_are_of_the_same_rows() -> None:
    steps = Steps()
    seal(steps, claim(0))

    with pytest.raises(PayloadConflictError, match="has rows 0 to 7 from shard 0") as refusal:
        steps.reserve(claim(3, rows=range(4)))

    assert "3 (data-parallel rank 0, context-parallel part 1, tensor-parallel part 1)" in str(
        refusal.value
    )


def test_rows_of_another_rank_are_not_shared() -> None:
    steps = Steps()
    seal(steps, claim(0, of=2))

    with pytest.raises(PayloadConflictError, match="has rows 0 to 3"):
        steps.reserve(claim(4, of=2, rows=range(2, 6)))


def test_a_part_is_lacked_until_it_is_reserved_though_its_rows_are_claimed() -> None:
    steps = Steps()
    steps.reserve(claim(0))
    step = step_of(steps)

    assert step.claimed_rows == ROWS
    assert step.lacking(range(4)) == [1, 2, 3]
    assert steps.lowest_without(2) == 0


def test_what_a_step_lacks_is_named_by_rank_and_part() -> None:
    steps = Steps()
    seal(steps, claim(0), claim(1))
    steps.reserve(claim(2))

    text = step_of(steps).lacking_text(4, GRID)

    assert "0 of its 8 rows are sealed" in text
    assert "being written: shard 2 (data-parallel rank 0, context-parallel part 1, " in text
    assert "not reserved: shard 3 (data-parallel rank 0, context-parallel part 1, tensor-" in text


def test_a_part_that_dies_loses_the_step_and_is_named() -> None:
    steps = Steps()
    seal(steps, *map(claim, range(4)))
    steps.lose("p2")

    with pytest.raises(ProducerLostError, match=r"lacks shard 2 .*context-parallel part 1"):
        steps.had(0)


def test_a_part_that_dies_is_written_again_by_its_successor_alone() -> None:
    steps = Steps()
    seal(steps, *map(claim, range(4)))
    steps.lose("p2")
    seal(steps, claim(2, payload_id="again", request_id="again"))

    assert steps.had(0) is not None


def test_positions_are_counted_once_though_several_ranks_hold_ids_at_them() -> None:
    steps = Steps()
    seal(steps, claim(0), claim(1), valid_count=30)
    seal(steps, claim(2), claim(3), valid_count=12)

    assert step_of(steps).global_count == 42


def test_ranks_that_hold_other_ids_count_the_same_positions() -> None:
    steps = Steps()
    seal(steps, claim(0), valid_count=30)
    steps.reserve(claim(1))
    part = steps.part_of("p1")
    assert part is not None

    step_of(steps).check_count(part, 30)
    with pytest.raises(PayloadConflictError, match="counts 30 of their positions"):
        step_of(steps).check_count(part, 29)


def test_a_step_is_announced_once_all_parts_have_a_place() -> None:
    steps = Steps()
    for shard in range(4):
        assert not (steps.find(0) and step_of(steps).is_announced)
        steps.reserve(claim(shard))
        part = steps.part_of(f"p{shard}")
        assert part is not None
        part.announce(None)

    assert step_of(steps).is_announced
