"""The pool: room inside a byte budget, given out once at a time, its generations rising."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.interrupts import Interrupt

from teacher_logits.errors import PayloadInvalidError, PoolFullError
from teacher_logits.payload import Extent
from teacher_logits.pool import PAGE_BYTES as PAGE
from teacher_logits.pool import Growth, Pool

MOMENTS = 1_000
"""More than there are."""


def pool(*, budget: int = 16, slab: int = 8, slots: int = 100) -> Pool:
    return Pool(budget_bytes=budget * PAGE, slab_size_bytes=slab * PAGE, slots_per_slab=slots)


def with_slab(**sizes: int) -> Pool:
    made = pool(**sizes)
    made.add_slab("slab", sizes.get("slab", 8) * PAGE)
    return made


def taken(pool: Pool, pages: int = 1) -> Extent:
    extent = pool.reserve(pages * PAGE)
    assert isinstance(extent, Extent)
    return extent


class TestInterrupted:
    """Whatever is cut short is free again, and no generation comes twice."""

    def test_as_room_is_taken(self) -> None:
        made = with_slab(slots=5)
        held = [taken(made, 2), taken(made, 3)]
        for moment in range(MOMENTS):
            with Interrupt(moment, inside="teacher_logits/pool.py") as interrupt:
                made.reserve(PAGE)
            made.keep(held)
            assert_all_is_left(made, held, pages=3)
            if not interrupt.came_at:
                break
        assert moment > 5

    @pytest.mark.parametrize(("freed", "pages"), list(enumerate([2, 3, 1])))
    def test_as_room_comes_back(self, freed: int, pages: int) -> None:
        made = with_slab(slots=4 + pages)
        held = [taken(made, 2), taken(made, 3), taken(made, 1)]
        for moment in range(MOMENTS):
            left = held.pop(freed)
            made.quarantine(left)
            with Interrupt(moment, inside="teacher_logits/pool.py") as interrupt:
                made.free(left)
            made.keep(held)
            assert_all_is_left(made, held, pages=2 + pages, since=left)
            held.insert(freed, taken(made, pages))
            if not interrupt.came_at:
                break
        assert moment > 2


def assert_all_is_left(
    made: Pool, held: list[Extent], *, pages: int, since: Extent | None = None
) -> None:
    """Look whether all that nobody holds can be taken, in pages and slots, and give it back."""
    usage = made.usage()
    assert usage.quarantined_bytes == 0
    assert usage.used_bytes == sum(extent.size_bytes for extent in held)
    rest = [taken(made) for _ in range(pages)]
    for each in rest:
        assert since is None or each.slot != since.slot or each.generation > since.generation
        made.free(each)


class TestReserving:
    def test_asks_for_a_slab_where_there_is_none(self) -> None:
        assert pool().reserve(PAGE) == Growth(size_bytes=8 * PAGE)

    def test_asks_for_a_slab_of_the_payloads_size_where_that_is_larger(self) -> None:
        assert pool().reserve(9 * PAGE) == Growth(size_bytes=9 * PAGE)

    def test_asks_for_what_is_left_of_the_budget_where_that_is_less(self) -> None:
        made = pool(budget=12)
        made.add_slab("slab", 8 * PAGE)
        taken(made, 8)

        assert made.reserve(PAGE) == Growth(size_bytes=4 * PAGE)

    @pytest.mark.parametrize(("size", "pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
    def test_gives_whole_pages(self, size: int, pages: int) -> None:
        extent = with_slab().reserve(size)

        assert isinstance(extent, Extent)
        assert extent.size_bytes == pages * PAGE
        assert extent.offset_bytes % PAGE == 0

    def test_takes_the_smallest_run_that_is_large_enough(self) -> None:
        made = with_slab()
        one, two, three = taken(made, 3), taken(made, 1), taken(made, 2)
        del two
        made.free(one)
        made.free(three)

        assert taken(made, 3).offset_bytes == one.offset_bytes

    def test_joins_neighbours_when_room_comes_back(self) -> None:
        made = with_slab()
        parts = [taken(made, 2) for _ in range(4)]
        for index in (1, 3, 2, 0):
            made.free(parts[index])

        assert taken(made, 8).offset_bytes == 0

    def test_a_payload_larger_than_the_budget_can_never_fit(self) -> None:
        made = pool()
        made.check_fits(16 * PAGE)

        with pytest.raises(PayloadInvalidError, match=r"never.*--pool-size") as caught:
            made.reserve(16 * PAGE + 1)

        assert caught.value.facts == {
            "need_bytes": 16 * PAGE + 1,
            "free_bytes": 16 * PAGE,
            "budget_bytes": 16 * PAGE,
        }

    def test_a_full_pool_names_need_free_and_quarantined(self) -> None:
        made = with_slab(budget=8)
        made.quarantine(taken(made, 3))
        taken(made, 4)

        with pytest.raises(PoolFullError) as caught:
            made.reserve(2 * PAGE)

        assert caught.value.facts == {
            "need_bytes": 2 * PAGE,
            "free_bytes": PAGE,
            "quarantined_bytes": 3 * PAGE,
            "budget_bytes": 8 * PAGE,
        }

    def test_a_slab_without_slots_gives_no_room(self) -> None:
        made = with_slab(budget=8, slots=1)
        taken(made)

        with pytest.raises(PoolFullError):
            made.reserve(PAGE)

    @pytest.mark.parametrize("name", ["budget_bytes", "slab_size_bytes", "slots_per_slab"])
    def test_a_pool_needs_sizes(self, name: str) -> None:
        sizes = {"budget_bytes": 1, "slab_size_bytes": 1, "slots_per_slab": 1}

        with pytest.raises(ValueError, match="at least 1"):
            Pool(**{**sizes, name: 0})  # type: ignore[arg-type]


class TestGenerations:
    def test_are_even_and_rise_with_each_use_of_a_slot(self) -> None:
        made = with_slab()
        seen = []
        for _ in range(3):
            extent = taken(made)
            seen.append((extent.slot, extent.generation))
            made.free(extent)

        assert seen == [(0, 2), (0, 4), (0, 6)]


class TestSlabs:
    def test_are_known_while_they_are_in_use(self) -> None:
        made = with_slab()
        assert made.has_slab("slab")

        made.drop_slab("slab")

        assert not made.has_slab("slab")

    def test_cannot_come_twice(self) -> None:
        with pytest.raises(ValueError, match="already"):
            with_slab().add_slab("slab", PAGE)

    def test_cannot_exceed_the_budget_together(self) -> None:
        made = with_slab(budget=8)

        with pytest.raises(PoolFullError):
            made.add_slab("one too many", PAGE)

        assert not made.has_slab("one too many")

    def test_are_idle_when_no_extent_lies_in_them(self) -> None:
        made = with_slab()
        extent = taken(made)
        assert made.idle_slabs() == []
        with pytest.raises(ValueError, match="still holds"):
            made.drop_slab("slab")

        made.free(extent)

        assert made.idle_slabs() == ["slab"]

    def test_give_their_bytes_back_to_the_budget(self) -> None:
        made = with_slab()
        made.drop_slab("slab")

        assert made.usage().committed_bytes == 0
        assert made.reserve(16 * PAGE) == Growth(size_bytes=16 * PAGE)


class TestGivingBack:
    def test_happens_once(self) -> None:
        made = with_slab()
        extent = taken(made)
        made.free(extent)

        with pytest.raises(ValueError, match="not in use"):
            made.free(extent)
        with pytest.raises(ValueError, match="not in use"):
            made.quarantine(extent)

    def test_of_an_older_use_does_not_touch_the_newer(self) -> None:
        made = with_slab()
        old = taken(made)
        made.free(old)
        taken(made)

        with pytest.raises(ValueError, match="not in use"):
            made.free(old)

    def test_takes_room_out_of_quarantine_too(self) -> None:
        made = with_slab()
        extent = taken(made, 2)
        made.quarantine(extent)
        made.quarantine(extent)
        usage = made.usage()
        assert (usage.used_bytes, usage.quarantined_bytes) == (0, 2 * PAGE)

        made.free(extent)

        usage = made.usage()
        assert (usage.used_bytes, usage.quarantined_bytes) == (0, 0)


class Pools(RuleBasedStateMachine):
    """Any order of events: extents lie apart and inside their slabs, bytes add up."""

    BUDGET = 20

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(budget=self.BUDGET, slab=6, slots=4)
        self.slabs: dict[str, int] = {}
        self.taken: list[Extent] = []
        self.quarantined: list[Extent] = []
        self.generations: dict[tuple[str, int], int] = {}
        self._count = 0

    @rule(size=st.integers(1, 9 * PAGE))
    def reserve(self, size: int) -> None:
        try:
            answer = self.pool.reserve(size)
        except PoolFullError:
            return
        if isinstance(answer, Growth):
            self._count += 1
            self.slabs[f"slab {self._count}"] = answer.size_bytes
            self.pool.add_slab(f"slab {self._count}", answer.size_bytes)
            answer = self.pool.reserve(size)
        assert isinstance(answer, Extent), "a slab of the size that was asked for has room"
        assert size <= answer.size_bytes < size + PAGE
        slot = (answer.slab_id, answer.slot)
        assert answer.generation > self.generations.get(slot, 0)
        assert answer.generation % 2 == 0
        self.generations[slot] = answer.generation
        self.taken.append(answer)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        extent = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.pool.quarantine(extent)
        self.quarantined.append(extent)

    @precondition(lambda self: self.quarantined)
    @rule()
    def free_quarantined(self) -> None:
        self.pool.free(self.quarantined.pop())

    @rule()
    def drop_idle(self) -> None:
        for slab_id in self.pool.idle_slabs():
            self.pool.drop_slab(slab_id)
            del self.slabs[slab_id]

    @invariant()
    def extents_lie_apart_and_inside(self) -> None:
        everything = self.taken + self.quarantined
        for extent in everything:
            assert 0 <= extent.offset_bytes
            assert extent.offset_bytes + extent.size_bytes <= self.slabs[extent.slab_id]
        for one, other in combinations(everything, 2):
            if one.slab_id == other.slab_id:
                assert one.slot != other.slot
                assert (
                    one.offset_bytes + one.size_bytes <= other.offset_bytes
                    or other.offset_bytes + other.size_bytes <= one.offset_bytes
                )

    @invariant()
    def bytes_add_up(self) -> None:
        usage = self.pool.usage()
        assert usage.used_bytes == sum(e.size_bytes for e in self.taken)
        assert usage.quarantined_bytes == sum(e.size_bytes for e in self.quarantined)
        assert usage.used_bytes + usage.quarantined_bytes + usage.free_bytes == usage.budget_bytes
        assert usage.committed_bytes == sum(self.slabs.values())
        assert usage.committed_bytes <= usage.budget_bytes
        assert usage.slab_count == len(self.slabs)
        assert usage.extent_count == len(self.taken) + len(self.quarantined)


Pools.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestPools = Pools.TestCase
