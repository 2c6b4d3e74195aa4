"""Room turns: a session with much of the pool gives way while others wait for room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teacher_logits_server.batching import Batching
from teacher_logits_server.lending.holdings import Held

SOON = 10.0
BUDGET = 100


class Room:
    """A batching table over one pool of ``BUDGET`` bytes, and what sessions have of that."""

    def __init__(self, *, most: int | None = None, **held: int) -> None:
        self.has = held
        self._most = most
        self.batching = Batching(
            max_batch_tokens=1000,
            max_waiting_requests=100,
            max_session_requests=100,
            held=lambda pool: Held(
                by_session=dict(self.has), budget_bytes=BUDGET, most_bytes=self._most
            ),
        )
        self._next = 0

    def add(self, session_id: str, size_bytes: int) -> int:
        ticket, self._next = self._next, self._next + 1
        self.batching.add(
            ticket, [1], deadline=SOON, session_id=session_id, size_bytes=size_bytes, pool="host"
        )
        return ticket

    def parked(self, session_id: str, size_bytes: int) -> int:
        """Add a request and let it find no room."""
        ticket = self.add(session_id, size_bytes)
        assert ticket in self.taken()
        self.batching.park(ticket, freed_count=self.batching.freed_count)
        return ticket

    def taken(self) -> list[int]:
        return [each.ticket for each in self.batching.take()]


def test_who_has_most_of_the_pool_gets_none_while_another_waits() -> None:
    room = Room(hog=90)
    guest = room.parked("guest", 40)
    room.add("hog", 5)

    assert room.taken() == []

    room.has["hog"] = 20
    room.batching.room_freed()
    assert guest in room.taken()


def test_who_has_most_of_the_pool_holds_up_nobody_while_it_waits_itself() -> None:
    room = Room(hog=90)
    room.parked("hog", 5)
    room.parked("guest", 40)

    small = room.add("other", 10)

    assert room.taken() == [small]
    assert room.batching.may_seat(small)


def test_alone_it_goes_on_to_the_last_byte() -> None:
    room = Room(hog=90)
    room.parked("hog", 20)

    assert room.taken() == []
    small = room.add("hog", 5)
    assert room.taken() == [small]
    assert room.batching.may_seat(small)


def test_who_has_the_most_that_one_may_have_holds_up_nobody() -> None:
    room = Room(most=50, hog=45)
    room.parked("hog", 10)

    guest = room.add("guest", 40)

    assert room.taken() == [guest]
    assert room.batching.may_seat(guest)


def test_who_gives_way_is_not_passed_over_for_good() -> None:
    room = Room(hog=90)
    guest = room.parked("guest", 40)
    mine = room.add("hog", 5)
    room.batching.drop(guest)

    assert room.taken() == [mine]


sizes = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 60), max_size=6)


@given(sizes, st.sets(st.sampled_from("abcdefgh"), min_size=1))
def test_of_those_that_wait_or_have_some_not_all_are_above_their_share(
    has: dict[str, int], waiting: set[str]
) -> None:
    budget = max(1, sum(has.values()))
    held = Held(by_session=has, budget_bytes=budget, most_bytes=None)

    above = held.above_share(waiting)

    assert above < has.keys() | waiting
    assert all(has[each] * len(has.keys() | waiting) > budget for each in above)
    assert not above & (waiting - has.keys())


@given(sizes, st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 60)), min_size=1))
def test_somebody_who_waits_may_always_have_the_room_that_there_is(
    has: dict[str, int], asked: list[tuple[str, int]]
) -> None:
    budget = max(BUDGET, sum(has.values()))
    room = Room(**has)
    room._most = budget
    tickets = [room.add(session_id, size) for session_id, size in asked]
    assert room.taken() == tickets or room.taken() == []
    for ticket in tickets:
        room.batching.park(ticket, freed_count=room.batching.freed_count)

    room.batching.room_freed()

    taken = room.taken()
    assert any(room.batching.may_seat(ticket) for ticket in taken)
