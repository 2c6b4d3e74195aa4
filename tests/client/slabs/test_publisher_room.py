"""A publisher's room as a table: what is kept, what is in doubt, what can be dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.interrupts import Interrupt

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.payload import Extent
from teacher_logits.pool import PAGE_BYTES, Growth
from teacher_logits_client.slabs.publisher_room import Full, PublisherRoom

PAGE = PAGE_BYTES


def a_room(pages: int, slab: int | None = None) -> PublisherRoom:
    room = PublisherRoom(
        pool_size_bytes=pages * PAGE, slab_size_bytes=PAGE * (pages if slab is None else slab)
    )
    return room


def take(room: PublisherRoom, step: int, pages: int = 1) -> Extent | Full:
    """Take room, creating the slabs that it wants."""
    while True:
        got = room.take(f"p-{step}", step=step, size_bytes=pages * PAGE)
        if not isinstance(got, Growth):
            return got
        room.add_slab(f"slab-{room.usage().slab_count}-{step}", got.size_bytes)


def test_room_that_was_being_taken_or_freed_at_an_interrupt_is_free_for_the_next() -> None:
    room, moment, interrupt = a_room(2), 0, None
    assert isinstance(take(room, 0), Extent)
    room.free("p-0")
    while interrupt is None or interrupt.came_at:
        with Interrupt(moment, inside="teacher_logits") as interrupt:
            room.take("p-1", step=1, size_bytes=PAGE)
            room.free("p-1")
        room.free("p-1")  # as who is interrupted gives it up
        for step in (2, 3):
            assert isinstance(take(room, step), Extent), interrupt.came_at
        for step in (2, 3):
            room.free(f"p-{step}")
        assert room.usage().used_bytes == 0
        moment += 1
    assert moment > 10


def test_room_is_kept_for_the_lowest_open_step() -> None:
    room = a_room(2)
    room.note_lowest_open(7)
    assert isinstance(take(room, 8), Extent)
    assert take(room, 9) == Full(is_kept=True, droppable=())
    assert isinstance(take(room, 7), Extent)


def test_no_room_is_kept_for_a_step_that_has_its_room() -> None:
    room = a_room(2)
    room.note_lowest_open(7)
    take(room, 7)
    assert isinstance(take(room, 8), Extent)


def test_no_room_is_kept_where_no_lower_step_is_open() -> None:
    room = a_room(1)
    room.note_lowest_open(8)
    assert isinstance(take(room, 8), Extent)


def test_room_is_kept_for_a_lower_step_that_waits_for_it() -> None:
    room = a_room(2)
    room.note_lowest_open(9)
    room.want(7)
    room.want(8)
    assert isinstance(take(room, 8), Extent)
    assert take(room, 9) == Full(is_kept=True, droppable=())
    assert isinstance(take(room, 7), Extent)


def test_slabs_of_another_size_may_be_dropped_for_room() -> None:
    room = a_room(4, slab=1)
    for step in range(4):
        take(room, step)
    for step in range(4):
        room.free(f"p-{step}")
    full = room.take("large", step=4, size_bytes=3 * PAGE)
    assert isinstance(full, Full)
    assert len(full.droppable) == 4
    for slab_id in full.droppable:
        room.drop_slab(slab_id)
    assert isinstance(take(room, 4, pages=3), Extent)


def test_only_a_seal_that_was_not_answered_is_in_doubt() -> None:
    room = a_room(1)
    extent = take(room, 0)
    assert isinstance(extent, Extent)
    held = room.sealing("p-0")
    assert held is not None
    assert held.extent == extent
    room.doubt("p-0")
    assert (room.usage().quarantined_bytes, room.usage().free_bytes) == (PAGE, 0)
    assert room.is_outstanding(extent.slab_id)
    room.sealed("p-0")
    room.doubt("p-0")
    assert room.free("p-0") == extent
    assert room.usage().free_bytes == PAGE
    assert room.free("p-0") is None


def test_room_that_is_only_written_to_is_not_outstanding() -> None:
    room = a_room(1)
    extent = take(room, 0)
    assert isinstance(extent, Extent)
    assert not room.is_outstanding(extent.slab_id)


def test_what_can_never_fit_is_refused_with_its_numbers() -> None:
    room = a_room(2)
    with pytest.raises(PayloadInvalidError, match="raise pool_size_bytes") as raised:
        room.check_fits(2 * PAGE + 1)
    assert raised.value.facts["need_bytes"] == 2 * PAGE + 1
    assert raised.value.facts["budget_bytes"] == 2 * PAGE


def test_a_full_room_says_what_it_waits_for_and_for_whom_it_keeps_room() -> None:
    room = a_room(2)
    room.note_lowest_open(7)
    take(room, 8)
    full = take(room, 9)
    assert isinstance(full, Full)
    error = room.full_error(PAGE, step=9, full=full)
    assert "room is kept for step 7" in error.message
    assert "step 8 is being written" in error.message


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.booleans()), max_size=40))
def test_the_lowest_open_step_always_finds_room_of_the_size_of_those_above(
    asked: list[tuple[int, int, bool]],
) -> None:
    """Whatever is taken and freed for higher steps of one size, step 0 still fits."""
    room = a_room(6)
    room.note_lowest_open(0)
    for step, _, free in asked:
        name = f"p-{step + 1}"
        if free:
            room.free(name)
        elif room.find(name) is None:
            take(room, step + 1, pages=2)
    assert isinstance(take(room, 0, pages=2), Extent)
