"""Publishers' slabs: what lies where, whose it is, and when a descriptor may be closed."""

from __future__ import annotations

from datetime import timedelta
from itertools import combinations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from teacher_logits.errors import (
    LimitReachedError,
    NotAllowedError,
    PayloadInvalidError,
    PoolFullError,
    TeacherLogitsError,
)
from teacher_logits.payload import Extent
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.lending.relays import Relays
from teacher_logits_server.limits import ledger_caps

ROOM = 100


SLABS = ledger_caps(ServerConfig(max_slabs=8)).slabs


def extent(
    offset: int = 0, size: int = 10, *, slot: int = 0, generation: int = 2, slab: str = "slab"
) -> Extent:
    return Extent(
        slab_id=slab, offset_bytes=offset, size_bytes=size, slot=slot, generation=generation
    )


@pytest.fixture
def relays() -> Relays:
    relays = Relays(SLABS)
    relays.add("slab", ROOM, session_id="s", writer_id="publisher-0-ab")
    return relays


def taken(relays: Relays, *extents: Extent) -> None:
    for each in extents:
        relays.check_extent(each, 1, session_id="s")
        relays.take(each)


def test_a_slab_is_known_by_its_writer(relays: Relays) -> None:
    assert relays.writer_of("slab") == "publisher-0-ab"
    assert relays.writer_of("other") is None


def test_a_slab_id_is_used_once(relays: Relays) -> None:
    relays.drop("slab", session_id="s")
    assert relays.take_dropped() == ["slab"]

    with pytest.raises(NotAllowedError, match="used before"):
        relays.add("slab", ROOM, session_id="s", writer_id="w")


def test_a_publisher_has_so_many_slabs_at_most() -> None:
    relays = Relays(SLABS)
    for number in range(SLABS.most):
        relays.add(f"slab-{number}", ROOM, session_id="s", writer_id="w")

    with pytest.raises(LimitReachedError, match="--max-slabs"):
        relays.add("more", ROOM, session_id="s", writer_id="w")
    relays.add("another's", ROOM, session_id="t", writer_id="w")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (extent(offset=91), "is outside the slab's 100 bytes"),
        (extent(offset=-1), "is outside"),
        (extent(offset=2**63 - 1, size=1), "is outside the slab's 100 bytes"),
        (extent(offset=2**63 - 1, size=2**63 - 1), "is outside the slab's 100 bytes"),
        (extent(size=0), "is outside"),
        (extent(offset=50, size=4), "too small for a payload of 5 bytes"),
        (extent(offset=50, slot=-1), "has slot -1 of"),
        (extent(offset=50, slot=1), "which another extent has"),
        (extent(offset=50, generation=3), r"generation 3: it must be even"),
        (extent(offset=50, generation=0), r"generation 0: it must be even, and above 0"),
        (extent(offset=29), "touches the one of 10 bytes at 20"),
        (extent(offset=11), "touches the one of 10 bytes at 20"),
    ],
)
def test_an_extent_that_cannot_be_is_refused(relays: Relays, bad: Extent, says: str) -> None:
    taken(relays, extent(offset=20, slot=1))

    with pytest.raises(PayloadInvalidError, match=says):
        relays.check_extent(bad, 5, session_id="s")


def test_a_slot_is_never_used_again_with_a_generation_that_it_had(relays: Relays) -> None:
    taken(relays, extent(generation=4))
    relays.free(extent(generation=4))

    with pytest.raises(PayloadInvalidError, match="above 4"):
        relays.check_extent(extent(generation=4), 1, session_id="s")
    taken(relays, extent(generation=6))


def test_another_publishers_slab_is_not_touched(relays: Relays) -> None:
    with pytest.raises(NotAllowedError):
        relays.check_extent(extent(), 1, session_id="thief")
    with pytest.raises(NotAllowedError):
        relays.drop("slab", session_id="thief")


def test_a_descriptor_is_needed_until_the_last_extent_is_free(relays: Relays) -> None:
    taken(relays, extent())
    relays.leave("s")
    assert relays.take_dropped() == []

    relays.free(extent())

    assert relays.take_dropped() == ["slab"]
    assert relays.take_dropped() == []


def test_an_extent_is_freed_once(relays: Relays) -> None:
    taken(relays, extent())
    relays.free(extent())

    with pytest.raises(ValueError, match="not in use"):
        relays.free(extent())


def test_quarantine_is_counted_apart_and_capped(relays: Relays) -> None:
    taken(relays, extent(size=60))
    relays.quarantine(extent(size=60))
    usage = relays.usage()
    assert (usage.used_bytes, usage.quarantined_bytes) == (0, 60)

    with pytest.raises(PoolFullError, match="60 of the 100 bytes"):
        relays.check_quarantine("s", most=0.5, retry_after=timedelta(seconds=1))
    relays.check_quarantine("s", most=0.6, retry_after=timedelta(seconds=1))
    relays.check_quarantine("another", most=0, retry_after=timedelta(seconds=1))


class Slab(RuleBasedStateMachine):
    """Any extents in any order: what is taken lies apart, and ends as the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.relays = Relays(SLABS)
        self.relays.add("slab", ROOM, session_id="s", writer_id="w")
        self.taken: list[Extent] = []
        self.generations: dict[int, int] = {}
        self.dropped = False
        self.told: list[str] = []

    @precondition(lambda self: not self.dropped)
    @rule(
        offset=st.integers(-2, ROOM),
        size=st.integers(0, 40),
        slot=st.integers(-1, 4),
        generation=st.integers(1, 9),
        need=st.integers(1, 20),
    )
    def take(self, offset: int, size: int, slot: int, generation: int, need: int) -> None:
        asked = extent(offset, size, slot=slot, generation=generation)
        fits = (
            offset >= 0
            and size >= need
            and offset + size <= ROOM
            and slot >= 0
            and slot not in [each.slot for each in self.taken]
            and generation % 2 == 0
            and generation > self.generations.get(slot, 0)
            and not any(
                set(range(offset, offset + size))
                & set(range(each.offset_bytes, each.offset_bytes + each.size_bytes))
                for each in self.taken
            )
        )
        try:
            self.relays.check_extent(asked, need, session_id="s")
        except TeacherLogitsError:
            assert not fits
            return
        assert fits
        self.relays.take(asked)
        self.taken.append(asked)
        self.generations[slot] = generation

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.relays.free(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    @rule()
    def drop(self) -> None:
        self.relays.drop("slab", session_id="s")
        self.dropped = True

    @invariant()
    def extents_lie_apart(self) -> None:
        for one, other in combinations(self.taken, 2):
            first, second = sorted((one, other), key=lambda each: each.offset_bytes)
            assert first.offset_bytes + first.size_bytes <= second.offset_bytes
        assert self.relays.usage().used_bytes == sum(each.size_bytes for each in self.taken)

    @invariant()
    def the_slab_is_told_to_be_dropped_once_it_is_empty(self) -> None:
        self.told += self.relays.take_dropped()
        assert self.told == (["slab"] if self.dropped and not self.taken else [])


Slab.TestCase.settings = settings(stateful_step_count=30, max_examples=40)
TestSlab = Slab.TestCase
