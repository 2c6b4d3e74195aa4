"""Payloads that stay where they were computed: their tickets, and copies where it takes one."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, cast

import pytest
from tests.server.exporters.test_exporters import EPOCH, Store, a_payload, new_store

from teacher_logits import keys
from teacher_logits.errors import (
    LeaseLostError,
    NoCommonTransportError,
    PoolFullError,
    ProducerLostError,
)
from teacher_logits.terms import ObjectTicket, PartTicket, RayHolder, StoredTicket
from teacher_logits.transport import Transport
from teacher_logits_server.engines.stored import StoredPart
from teacher_logits_server.exporters.bringing import Bringing, StoredTickets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from teacher_logits.terms import LeaseTerms
    from teacher_logits_server.engines.stored import StoredRows

PATIENCE = 30.0
CHALLENGE = bytes(range(32))


class Stores:
    """Stores of nodes that do what the test says."""

    def __init__(self) -> None:
        self.kept = False
        self.handed_out = True
        self.revoked: list[str] = []
        self.dropped: list[str] = []
        self.error: Exception | None = None
        self.may_come = threading.Event()
        self.may_come.set()
        self.fetched = 0
        self.tell: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        self.tell = callback

    def ticket(self, payload_id: str, lease_id: str) -> StoredTicket | None:
        if not self.kept:
            return None
        ticket = ObjectTicket(
            holder=RayHolder(namespace="n", name="holder"), object_id="o", token=b""
        )
        part = PartTicket(ticket=ticket, rows=range(1), positions=range(1))
        return StoredTicket(parts=(part,))

    def is_handed_out(self, payload_id: str) -> bool:
        return self.handed_out

    def revoke(self, lease_ids: Iterable[str]) -> None:
        self.revoked += lease_ids

    def drop(self, payload_ids: Iterable[str]) -> None:
        self.dropped += payload_ids

    def fetch(self, payload_id: str, *, seconds: float) -> Sequence[tuple[StoredPart, memoryview]]:
        self.fetched += 1
        assert self.may_come.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        rows = cast("StoredRows", None)
        part = StoredPart(rows=range(1), positions=range(1), stored=rows)
        return [(part, memoryview(array("B", [7] + [0] * 255)))]


class Rig:
    """A ledger, a session that reads objects, and payloads of its that stay."""

    def __init__(self, store: Store) -> None:
        self.store, self.ledger, self.stores = store, store.ledger, Stores()
        self.ledger.add_objects(CHALLENGE)
        self.ledger.on_stored_freed(self.stores.drop)
        self.bringing = Bringing(ledger=store.ledger, slabs=store.slabs, stores=self.stores)
        self.tickets = StoredTickets(stores=self.stores, bringing=self.bringing)
        self.told = threading.Semaphore(0)
        self.tickets.on_change(self.told.release)
        self.session_id = self.open(Transport.RAY_OBJECT)
        self.payload = a_payload(256)
        lease = self.ledger.publish(
            session_id=self.session_id,
            request_id=keys.new_id("r", EPOCH),
            payload=self.payload,
            extent=None,
        )
        assert lease.as_object
        self.lease_id = lease.lease_id

    def open(self, way: Transport) -> str:
        opened = (
            self.store.open_session(way, proven=way, secret=CHALLENGE)
            if way is Transport.RAY_OBJECT
            else self.store.open_session(way)
        )
        return opened.terms.session_id

    def ask(self) -> StoredTicket | None:
        return self.tickets.ticket(
            self.session_id, self.lease_id, self.payload.payload_id, seconds=PATIENCE
        )

    def bring(self, lease_id: str = "", session_id: str = "", *, seconds: float = PATIENCE) -> None:
        lease = session_id or self.session_id, lease_id or self.lease_id
        future = self.bringing.start(*lease, seconds=seconds)
        if future is not None:
            future.result(PATIENCE)

    def used_bytes(self) -> int:
        return self.ledger.view().pool.used_bytes

    def lies_here(self) -> bool:
        with self.ledger.pin(self.session_id, self.lease_id) as pinned:
            return pinned.extent is not None

    def lease(self, session_id: str) -> LeaseTerms:
        """Another session's lease on the payload."""
        return self.ledger.acquire(
            session_id=session_id,
            request_id=keys.new_id("r", EPOCH),
            payload_id=self.payload.payload_id,
        )

    def other(self) -> tuple[str, str]:
        """A session that streams, and its lease."""
        session_id = self.open(Transport.STREAM)
        lease = self.lease(session_id)
        assert lease.extent is None
        assert not lease.as_object
        return session_id, lease.lease_id


@pytest.fixture
def rig() -> Iterator[Rig]:
    with new_store(offered=(Transport.LOCAL, Transport.RAY_OBJECT, Transport.STREAM)) as store:
        yield Rig(store)


def test_it_takes_no_room_here_and_is_let_go_of_with_its_last_lease(rig: Rig) -> None:
    assert rig.used_bytes() == 0
    session_id, lease_id = rig.other()
    rig.ledger.release(rig.session_id, rig.lease_id)
    assert not rig.stores.dropped
    rig.ledger.release(session_id, lease_id)
    assert rig.stores.dropped == [rig.payload.payload_id]


def test_who_reads_neither_objects_nor_streams_is_refused_it_until_it_was_brought(
    rig: Rig,
) -> None:
    session_id = rig.open(Transport.LOCAL)
    with pytest.raises(NoCommonTransportError, match="allow 'stream'"):
        rig.lease(session_id)
    rig.bring()
    assert rig.lease(session_id).extent is not None


def test_one_that_nobody_waits_for_any_more_is_let_go_of(rig: Rig) -> None:
    payload = a_payload(256)
    rig.ledger.release_request(rig.session_id, "given-up")
    with pytest.raises(Exception, match="given-up"):
        rig.ledger.publish(
            session_id=rig.session_id, request_id="given-up", payload=payload, extent=None
        )
    assert rig.stores.dropped == [payload.payload_id]


def test_there_is_a_ticket_once_the_holders_have_it(rig: Rig) -> None:
    assert rig.ask() is None
    rig.stores.kept = True
    assert rig.ask() is not None
    assert not rig.stores.fetched


@pytest.mark.parametrize("why", ["asked again", "a holder is gone"])
def test_who_was_handed_nothing_has_it_brought(rig: Rig, why: str) -> None:
    if why == "asked again":
        rig.stores.kept = True
        assert rig.ask() is not None
    else:
        rig.stores.handed_out = False
    assert rig.ask() is None
    assert rig.told.acquire(timeout=PATIENCE)
    assert rig.lies_here()
    assert rig.used_bytes() > 0
    assert rig.stores.fetched == 1
    rig.tickets.let_go([rig.lease_id])
    assert rig.stores.revoked == [rig.lease_id]
    rig.ledger.release(rig.session_id, rig.lease_id)
    assert rig.used_bytes() == 0
    assert rig.stores.dropped == [rig.payload.payload_id]


def test_what_is_lost_with_its_node_is_told_and_takes_no_room(rig: Rig) -> None:
    rig.stores.kept = True
    rig.stores.error = ProducerLostError("gone")
    assert rig.ask() is not None
    assert rig.ask() is None
    assert rig.told.acquire(timeout=PATIENCE)
    with pytest.raises(ProducerLostError):
        rig.ask()
    assert rig.used_bytes() == 0


def test_it_is_brought_once_however_many_ask(rig: Rig) -> None:
    session_id, lease_id = rig.other()
    rig.stores.may_come.clear()
    first = rig.bringing.start(rig.session_id, rig.lease_id, seconds=PATIENCE)
    assert first is not None
    assert rig.bringing.start(session_id, lease_id, seconds=PATIENCE) is first
    rig.stores.may_come.set()
    first.result(PATIENCE)
    rig.bring(lease_id, session_id)
    assert rig.stores.fetched == 1


def test_it_is_held_while_it_is_brought_whoever_gives_it_back(rig: Rig) -> None:
    rig.stores.may_come.clear()
    future = rig.bringing.start(rig.session_id, rig.lease_id, seconds=PATIENCE)
    assert future is not None
    while not rig.stores.fetched:
        threading.Event().wait(0.001)
    rig.ledger.release(rig.session_id, rig.lease_id)
    assert not rig.stores.dropped
    rig.stores.may_come.set()
    future.result(PATIENCE)
    assert rig.stores.dropped == [rig.payload.payload_id]
    assert rig.used_bytes() == 0
    with pytest.raises(LeaseLostError):
        rig.bring()


def test_it_waits_for_room_and_is_refused_with_the_numbers_where_there_is_none(rig: Rig) -> None:
    pool = rig.ledger.view().pool
    blocks = [rig.store.slabs.room_for(rig.ledger, 4096) for _ in range(pool.budget_bytes // 4096)]
    with pytest.raises(PoolFullError, match="4096"):
        rig.bring(seconds=0.0)
    future = rig.bringing.start(rig.session_id, rig.lease_id, seconds=PATIENCE)
    assert future is not None
    assert not future.done()
    rig.ledger.give_back(blocks.pop())
    future.result(PATIENCE)
    assert rig.lies_here()
