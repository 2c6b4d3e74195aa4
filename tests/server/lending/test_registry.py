"""Sealed payloads: who holds their room, and when it may be had again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.some_payload import some_payload

from teacher_logits.errors import PayloadRetiredError
from teacher_logits.payload import Extent, Payload
from teacher_logits_server.lending.registry import Fate, Registry, Sealed

EXTENT = Extent(slab_id="slab", offset_bytes=0, size_bytes=4096, slot=0, generation=2)


def payload(name: str = "p") -> Payload:
    return some_payload(
        payload_id=name,
        vocabulary_size=10,
    )


def sealed() -> Registry:
    registry = Registry()
    registry.seal(Sealed(payload=payload(), extent=EXTENT))
    return registry


def test_a_sealed_payload_gives_leases_and_says_where_it_lies() -> None:
    assert sealed().lend("p").extent == EXTENT


def test_its_room_is_free_when_the_last_lease_is_gone() -> None:
    registry = sealed()
    registry.lend("p")
    registry.lend("p")

    assert registry.take_back("p") is Fate.KEPT
    assert registry.take_back("p") is Fate.FREE


def test_it_gives_no_lease_after_the_last_is_gone() -> None:
    registry = sealed()
    registry.lend("p")
    registry.pin("p")
    registry.take_back("p")

    with pytest.raises(PayloadRetiredError, match="score the rows again"):
        registry.lend("p")


def test_an_unknown_payload_is_as_good_as_retired() -> None:
    with pytest.raises(PayloadRetiredError) as caught:
        Registry().open_payload("never")

    assert caught.value.facts == {"payload_id": "never"}


def test_a_pin_keeps_the_room_after_the_last_lease() -> None:
    registry = sealed()
    registry.lend("p")
    registry.pin("p")

    assert registry.take_back("p") is Fate.KEPT
    assert registry.unpin("p") is Fate.FREE


def test_a_doubt_keeps_the_room_in_quarantine_until_it_is_cleared() -> None:
    registry = sealed()
    registry.lend("p")

    assert registry.doubt("p") is Fate.QUARANTINED
    assert registry.clear_doubt("p") is Fate.FREE


def test_room_that_one_may_read_is_used_and_not_in_quarantine() -> None:
    registry = sealed()
    registry.lend("p")
    registry.lend("p")

    assert registry.doubt("p") is Fate.KEPT
    assert registry.take_back("p") is Fate.QUARANTINED


def test_a_payload_is_sealed_once() -> None:
    with pytest.raises(ValueError, match="sealed already"):
        sealed().seal(Sealed(payload=payload(), extent=EXTENT))


@pytest.mark.parametrize("end", ["take_back", "doubt", "clear_doubt", "unpin"])
def test_a_hold_that_is_not_there_cannot_be_ended(end: str) -> None:
    with pytest.raises(ValueError, match="no such hold"):
        getattr(sealed(), end)("p")


class Holds(RuleBasedStateMachine):
    """Any order of holds on one payload: free exactly when none is left, and then gone."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.holds: Counter[str] = Counter()
        self.fate = Fate.FREE

    def held(self) -> bool:
        return self.holds.total() > 0

    @precondition(lambda self: not self.held())
    @rule()
    def seal(self) -> None:
        self.registry.seal(Sealed(payload=payload(), extent=EXTENT))
        self.registry.lend("p")
        self.holds["lease"] += 1
        self.fate = Fate.KEPT

    @precondition(lambda self: self.holds["lease"] > 0)
    @rule()
    def lend(self) -> None:
        self.registry.lend("p")
        self.holds["lease"] += 1
        self.fate = Fate.KEPT

    @precondition(held)
    @rule()
    def pin(self) -> None:
        self.registry.pin("p")
        self.holds["pin"] += 1
        self.fate = Fate.KEPT

    @precondition(held)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(sorted(h for h, n in self.holds.items() if n)))
        end = {"lease": "take_back", "pin": "unpin", "doubt": "clear_doubt"}[hold]
        self.fate = getattr(self.registry, end)("p")
        self.holds[hold] -= 1

    @precondition(lambda self: self.holds["lease"] > 0)
    @rule()
    def doubt(self) -> None:
        self.fate = self.registry.doubt("p")
        self.holds["lease"] -= 1
        self.holds["doubt"] += 1

    @invariant()
    def the_room_follows_the_holds(self) -> None:
        if self.holds["lease"] or self.holds["pin"]:
            assert self.fate is Fate.KEPT
        elif self.holds["doubt"]:
            assert self.fate is Fate.QUARANTINED
        else:
            assert self.fate is Fate.FREE

    @invariant()
    def a_free_payload_is_gone(self) -> None:
        if not self.held():
            with pytest.raises(KeyError):
                self.registry.held("p")


TestHolds = Holds.TestCase
