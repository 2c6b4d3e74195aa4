"""Holdings: how much of a pool what was scored for a session takes, and when that is enough."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PoolFullError
from teacher_logits.payload import Extent
from teacher_logits.pool import Pool
from teacher_logits_server.lending.holdings import Holdings

PAGE = 4096
POOL = Pool(budget_bytes=16 * PAGE, slab_size_bytes=16 * PAGE, slots_per_slab=64)
SOON = timedelta(seconds=1)


def extent(slot: int, pages: int) -> Extent:
    return Extent(slab_id="slab", offset_bytes=0, size_bytes=pages * PAGE, slot=slot, generation=2)


def test_a_session_has_its_share_at_most_while_there_are_others() -> None:
    holdings = Holdings(0.5)
    holdings.take(POOL, "a", extent(0, 6))
    holdings.check(POOL, "a", 2 * PAGE, retry_after=SOON)

    with pytest.raises(PoolFullError, match="--max-session-share") as told:
        holdings.check(POOL, "a", 3 * PAGE, retry_after=SOON)
    holdings.check(POOL, "b", 3 * PAGE, retry_after=SOON)

    assert told.value.facts["limit"] == 8 * PAGE
    assert told.value.retry_after == SOON


def test_its_first_payload_may_be_larger_than_its_share() -> None:
    Holdings(0.5).check(POOL, "a", 16 * PAGE, retry_after=SOON)


def test_a_session_alone_has_never_enough() -> None:
    holdings = Holdings(0.5)
    holdings.take(POOL, "a", extent(0, 8))

    assert not holdings.held(POOL, is_shared=False).has_enough("a", PAGE)
    assert holdings.held(POOL, is_shared=True).has_enough("a", PAGE)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=12))
def test_what_was_given_back_counts_no_more(taken: list[tuple[str, int]]) -> None:
    holdings = Holdings(0.5)
    for slot, (session_id, pages) in enumerate(taken):
        holdings.take(POOL, session_id, extent(slot, pages))
    sums = {name: sum(n for who, n in taken if who == name) * PAGE for name, _ in taken}
    assert holdings.held(POOL, is_shared=True).by_session == sums

    for slot, (_, pages) in enumerate(taken):
        holdings.give_back(extent(slot, pages))
        holdings.give_back(extent(slot, pages))

    assert holdings.held(POOL, is_shared=True).by_session == {}
