"""Turns: sessions in rotation, however many streams each has."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from teacher_logits_server.services.turns import Rotation, Turns


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers()), max_size=30))
def test_while_a_session_waits_no_other_is_taken_twice_before_it(
    things: list[tuple[str, int]],
) -> None:
    rotation: Rotation[tuple[str, int]] = Rotation()
    waiting = Counter(session_id for session_id, _ in things)
    for each in things:
        rotation.put(each[0], each)
    taken: list[tuple[str, int]] = []
    since: Counter[str] = Counter()
    while (thing := rotation.take()) is not None:
        session_id = thing[0]
        since[session_id] += 1
        assert all(since[session_id] - since[other] <= 1 for other in waiting if waiting[other])
        waiting[session_id] -= 1
        taken.append(thing)

    for session_id in "abc":
        own = [each for each in things if each[0] == session_id]
        assert [each for each in taken if each[0] == session_id] == own


def test_sixteen_streams_of_one_session_have_as_many_turns_as_one_of_another() -> None:
    turns, had = Turns(), Counter[str]()

    async def stream(session_id: str) -> None:
        while had["guest"] < 50:
            await turns.take(session_id)
            had[session_id] += 1

    async def scenario() -> None:
        await asyncio.gather(*(stream("hog") for _ in range(16)), stream("guest"))

    asyncio.run(scenario())
    assert had["hog"] <= 50 + 17  # each of its streams has one turn more at the end


def test_a_stream_that_is_cancelled_as_its_turn_comes_leaves_it_to_the_next() -> None:
    async def scenario() -> None:
        turns = Turns()
        first = asyncio.ensure_future(turns.take("a"))
        await asyncio.sleep(0)
        gone, following = (asyncio.ensure_future(turns.take(each)) for each in "bc")
        await asyncio.sleep(0)
        await first
        gone.cancel()

        await asyncio.wait_for(following, 30)
        await asyncio.wait_for(turns.take("d"), 30)

        assert gone.cancelled()

    asyncio.run(scenario())
