"""Placed room: extents where their owner says, never two at once, and never an old generation."""

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.pool import PAGE_BYTES
from teacher_logits_client.slabs.placed_room import Place, PlacedRoom

if TYPE_CHECKING:
    from teacher_logits.payload import Extent


def a_place(first: int, count: int) -> Place:
    return Place(slab_id="own", offset_bytes=first * PAGE_BYTES, size_bytes=count * PAGE_BYTES)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 6), st.integers(1, 4)),
            st.tuples(st.just("free"), st.integers(0, 9), st.just(0)),
        ),
        max_size=40,
    )
)
def test_extents_never_touch_and_generations_rise(actions: list[tuple[str, int, int]]) -> None:
    room = PlacedRoom()
    room.add("own")
    out: list[Extent] = []
    seen: dict[int, int] = {}
    for what, first, count in actions:
        if what == "take":
            pages = set(range(first, first + count))
            busy = any(
                pages
                & set(
                    range(
                        e.offset_bytes // PAGE_BYTES, (e.offset_bytes + e.size_bytes) // PAGE_BYTES
                    )
                )
                for e in out
            )
            extent = room.take(a_place(first, count))
            assert (extent is None) == busy
            if extent is not None:
                assert extent.slot not in {e.slot for e in out}
                assert extent.generation % 2 == 0
                assert extent.generation > seen.get(extent.slot, 0)
                seen[extent.slot] = extent.generation
                out.append(extent)
        elif out:
            room.free(out.pop(first % len(out)))
