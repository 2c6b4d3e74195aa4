"""Objects of a Ray cluster: put together, asked for again, and left in time for another way."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, cast

import pytest
from tests.contract.test_cuts import FIRST_ROW, carried_out, payload_of

from teacher_logits.cuts import cut_rows
from teacher_logits.errors import DeadlinePassedError, ObjectLostError
from teacher_logits.terms import ObjectTicket, PartTicket, RayHolder, StoredTicket
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.ray_object import PUT_SECONDS, RayObjectOpener

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.payload import Payload
    from teacher_logits.terms import LeaseTerms


class Lease:
    lease_id = "l"
    payload: Payload


class Hanging:
    """Has nothing put; ``given`` is how long it was given for that, and for room."""

    def __init__(self) -> None:
        self.given: list[tuple[float, float]] = []

    def __call__(self, lease_id: str, *, timeout: float, room_wait: float) -> ObjectTicket:
        self.given.append((timeout, room_wait))
        raise DeadlinePassedError("it did not come")


def open_by(put: Hanging, *, may_stream: bool, seconds: float) -> None:
    opener = RayObjectOpener(put, cast("BufferPool", None), as_views=False, may_stream=may_stream)
    opener.open(cast("LeaseTerms", Lease()), until=time.monotonic() + seconds)


@pytest.mark.parametrize(("seconds", "most"), [(8.0, 4.0), (3600.0, PUT_SECONDS), (0.5, 0.25)])
def test_who_may_be_streamed_to_gives_up_in_time(seconds: float, most: float) -> None:
    put = Hanging()
    with pytest.raises(ObjectLostError, match="hangs"):
        open_by(put, may_stream=True, seconds=seconds)
    [(timeout, room_wait)] = put.given
    assert 0 < room_wait <= timeout <= most


def test_another_waits_for_as_long_as_it_was_told_to() -> None:
    put = Hanging()
    with pytest.raises(DeadlinePassedError):
        open_by(put, may_stream=False, seconds=3600.0)
    [(timeout, room_wait)] = put.given
    assert room_wait == timeout > 1000


POSITIONS = [2, 3, 1]
WHOLE = payload_of(POSITIONS)
BYTES = bytearray(WHOLE.size_bytes)
for _column in WHOLE.columns:
    BYTES[_column.offset_bytes : _column.end_bytes] = random.Random(0).randbytes(_column.size_bytes)


def a_ticket(object_id: str) -> ObjectTicket:
    holder = RayHolder(namespace="n", name="holder")
    return ObjectTicket(holder=holder, object_id=object_id, token=b"")


def part(first: int, end: int) -> tuple[PartTicket, memoryview]:
    """Some rows of the payload, and their object."""
    cut = cut_rows(WHOLE, POSITIONS, first_row=FIRST_ROW + first, row_count=end - first)
    places = range(sum(POSITIONS[:first]), sum(POSITIONS[:end]))
    ticket = PartTicket(ticket=a_ticket(str(first)), rows=range(first, end), positions=places)
    return ticket, memoryview(carried_out(cut, bytes(BYTES)))


class Cluster:
    """A server and stores: tickets in their order, and objects by their ids."""

    def __init__(self, *tickets: ObjectTicket | StoredTicket) -> None:
        self.tickets = list(tickets)
        self.objects: dict[str, memoryview] = {"whole": memoryview(bytes(BYTES))}
        self.fetched_until: list[float] = []
        self.hangs = False

    def put(
        self, lease_id: str, *, timeout: float, room_wait: float
    ) -> ObjectTicket | StoredTicket:
        return self.tickets.pop(0)

    def fetch_all(
        self, tickets: Sequence[ObjectTicket], lease_id: str, *, until: float
    ) -> list[memoryview]:
        self.fetched_until.append(until)
        if self.hangs:
            raise DeadlinePassedError("it did not come")
        try:
            return [self.objects[each.object_id] for each in tickets]
        except KeyError:
            raise ObjectLostError("gone") from None

    def open(self, monkeypatch: pytest.MonkeyPatch, *, may_stream: bool = False) -> bytes:
        where = "teacher_logits_client.openers.ray_object"
        monkeypatch.setattr(f"{where}.fetch_all", self.fetch_all)
        monkeypatch.setattr(f"{where}.copy", copy)
        opener = RayObjectOpener(self.put, BufferPool(), as_views=True, may_stream=may_stream)
        lease = Lease()
        lease.payload = WHOLE
        opened = opener.open(cast("LeaseTerms", lease), until=time.monotonic() + 100)
        return bytes(opened.buffer)


def copy(found: memoryview, room: memoryview) -> None:
    room[:] = found


def test_rows_of_several_objects_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part(0, 1), part(1, 3)]
    cluster = Cluster(StoredTicket(parts=tuple(ticket for ticket, _ in parts)))
    cluster.objects = {ticket.ticket.object_id: data for ticket, data in parts}
    assert cluster.open(monkeypatch) == bytes(BYTES)


def test_objects_of_other_rows_than_were_asked_for_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [part(0, 1), part(2, 3)]
    tickets = StoredTicket(parts=tuple(ticket for ticket, _ in parts))
    cluster = Cluster(tickets, tickets)
    cluster.objects = {ticket.ticket.object_id: data for ticket, data in parts}
    with pytest.raises(ObjectLostError, match="are not its 3 rows"):
        cluster.open(monkeypatch)


def test_who_reads_objects_alone_asks_again_for_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticket, _ = part(0, 3)
    cluster = Cluster(StoredTicket(parts=(ticket,)), a_ticket("whole"))
    assert cluster.open(monkeypatch) == bytes(BYTES)


def test_who_may_be_streamed_to_does_not_and_keeps_half_of_its_time_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticket, _ = part(0, 3)
    cluster = Cluster(StoredTicket(parts=(ticket,)), a_ticket("whole"))
    with pytest.raises(ObjectLostError):
        cluster.open(monkeypatch, may_stream=True)
    assert len(cluster.tickets) == 1
    assert cluster.fetched_until[0] < time.monotonic() + 51


@pytest.mark.parametrize("ticket", [a_ticket("whole"), StoredTicket(parts=(part(0, 3)[0],))])
def test_a_holder_that_hangs_costs_half_of_the_time_where_the_bytes_may_be_streamed(
    monkeypatch: pytest.MonkeyPatch, ticket: ObjectTicket | StoredTicket
) -> None:
    cluster = Cluster(ticket)
    cluster.hangs = True
    with pytest.raises(ObjectLostError):
        cluster.open(monkeypatch, may_stream=True)
    assert cluster.fetched_until[0] < time.monotonic() + 51
