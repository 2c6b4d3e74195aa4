"""Shares: what each teacher may take of the pool, and what it has."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError, PoolFullError
from teacher_logits.payload import Extent
from teacher_logits.pool import PAGE_BYTES
from teacher_logits_server.lending.shares import Shares

SOON = timedelta(seconds=1)


def extent(slot: int, size_bytes: int) -> Extent:
    return Extent(slab_id="slab", offset_bytes=0, size_bytes=size_bytes, slot=slot, generation=2)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3 * PAGE_BYTES))))
def test_nobody_takes_more_than_its_share_and_all_of_it_comes_back(
    wishes: list[tuple[str, int]],
) -> None:
    shares = Shares({"a": 4 * PAGE_BYTES})
    taken: list[tuple[str, Extent]] = []
    for slot, (teacher_id, size) in enumerate(wishes):
        room = extent(slot, size)
        pages = -(-size // PAGE_BYTES)
        has = sum(-(-each.size_bytes // PAGE_BYTES) for name, each in taken if name == "a")
        if teacher_id == "a" and has + pages > 4:
            with pytest.raises(PoolFullError) as refusal:
                shares.check(teacher_id, size, retry_after=SOON)
            assert refusal.value.facts["free_bytes"] == (4 - has) * PAGE_BYTES
            assert refusal.value.retry_after == SOON
            continue
        shares.check(teacher_id, size, retry_after=SOON)
        shares.take(teacher_id, room)
        taken.append((teacher_id, room))
    for _, room in taken:
        shares.give_back(room)
        shares.give_back(room)

    shares.check("a", 4 * PAGE_BYTES, retry_after=SOON)


def test_what_is_larger_than_a_share_never_fits() -> None:
    shares = Shares({"a": PAGE_BYTES})

    with pytest.raises(PayloadInvalidError, match=r"teacher 'a' may take 4096 .* pool_size"):
        shares.check("a", PAGE_BYTES + 1, retry_after=SOON)
    shares.check_fits("b", 1 << 40)
