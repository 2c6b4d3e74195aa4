"""Objects behind the ledger: pinned while they are put, let go of with their leases, and lost."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, cast

import pytest
from tests.server.exporters.test_exporters import EPOCH, Store, new_store

from teacher_logits.errors import (
    ConfigError,
    LeaseLostError,
    NoCommonTransportError,
    ObjectLostError,
    PoolFullError,
)
from teacher_logits.terms import ObjectTicket, RayHolder
from teacher_logits.transport import Transport
from teacher_logits_server.exporters.ray_link import Joined
from teacher_logits_server.exporters.ray_object import RayObjectExporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from teacher_logits_server.exporters.ray_link import RayLink

CHALLENGE = bytes(range(32))


class Link:
    """A Ray process that does what the test says."""

    joined = Joined(
        epoch=EPOCH,
        key=bytes(32),
        holder=RayHolder(namespace="n", name="holder"),
        challenge=CHALLENGE,
        store_bytes=1 << 20,
        most_bytes=1 << 19,
        budget_bytes=1 << 16,
    )
    hear: Callable[[dict[str, object]], None]
    lost: Callable[[], None]

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, object]]] = []

    def send(self, op: str, *, descriptor: int | None = None, **message: object) -> None:
        if descriptor is not None:
            os.close(descriptor)
        self.sent.append((op, message))

    def listen(self, hear: Callable[..., None], lost: Callable[[], None]) -> None:
        self.hear, self.lost = hear, lost

    def hang_up(self) -> None:
        self.sent.append(("hang_up", {}))

    def stop(self) -> None:
        self.hang_up()


class Rig:
    """A ledger, its exporter of objects, and one reader's session."""

    def __init__(self, store: Store) -> None:
        self.store, self.ledger, self.link = store, store.ledger, Link()
        self.next_link = Link()
        self.is_there = threading.Event()
        self.exporter = RayObjectExporter(
            ledger=store.ledger,
            slabs=(store.slabs,),
            link=cast("RayLink", self.link),
            join=self.join,
        )
        self.exporter.start()
        self.session_id = self.open_session()

    def join(self) -> RayLink:
        if not self.is_there.is_set():
            raise ConfigError("none yet")
        return cast("RayLink", self.next_link)

    def open_session(self) -> str:
        way = Transport.RAY_OBJECT
        return self.store.open_session(way, proven=way, secret=CHALLENGE).terms.session_id

    def lend(self, size: int = 100) -> str:
        lease, _ = self.store.lend(self.session_id, bytes(size))
        assert lease.as_object
        return lease.lease_id

    def ask(self, lease_id: str) -> object:
        return self.exporter.ticket(self.session_id, lease_id, seconds=1.0)

    def put(self, lease_id: str) -> str:
        """Ask, and have the Ray process put it; return the object."""
        assert self.ask(lease_id) is None
        op, message = self.link.sent[-1]
        assert op == "put"
        object_id = str(message["object"])
        self.link.hear({"op": "put_done", "object": object_id})
        return object_id

    def used_bytes(self) -> int:
        return self.ledger.view().pool.used_bytes


@pytest.fixture
def rig() -> Iterator[Rig]:
    with new_store(offered=(Transport.RAY_OBJECT, Transport.STREAM)) as store:
        made = Rig(store)
        yield made
        made.exporter.stop()


def test_the_room_of_a_payload_is_pinned_until_it_has_been_put(rig: Rig) -> None:
    lease_id = rig.lend()
    assert rig.ask(lease_id) is None
    [(op, message)] = rig.link.sent
    assert (op, message["size"], message["runs"]) == ("put", 100, [[0, 0, 100]])
    rig.ledger.release(rig.session_id, lease_id)
    assert rig.used_bytes() > 0
    rig.link.hear({"op": "put_done", "object": message["object"]})
    assert rig.used_bytes() == 0
    assert rig.link.sent[-1] == ("drop", {"object": message["object"]})


def test_a_lease_has_its_ticket_once_its_payload_is_there(rig: Rig) -> None:
    lease_id = rig.lend()
    object_id = rig.put(lease_id)
    ticket = rig.exporter.ticket(rig.session_id, lease_id, seconds=1.0)
    assert isinstance(ticket, ObjectTicket)
    assert (ticket.object_id, ticket.holder.name) == (object_id, "holder")
    rig.link.hear({"op": "holder", "name": "another", "restarts": 1})
    ticket = rig.exporter.ticket(rig.session_id, lease_id, seconds=1.0)
    assert isinstance(ticket, ObjectTicket)
    assert ticket.holder.name == "another"
    assert rig.exporter.view().holder_restarts == 1


def test_an_object_is_dropped_with_the_last_lease_on_it(rig: Rig) -> None:
    lease_id = rig.lend()
    object_id = rig.put(lease_id)
    rig.ledger.release(rig.session_id, lease_id)
    assert rig.link.sent[-1] == ("drop", {"object": object_id})
    with pytest.raises(LeaseLostError):
        rig.ask(lease_id)


def test_a_session_that_ends_lets_go_of_its_objects(rig: Rig) -> None:
    object_id = rig.put(rig.lend())
    rig.ledger.close_session(rig.session_id)
    assert rig.link.sent[-1] == ("drop", {"object": object_id})
    assert rig.exporter.view().used_bytes == 0


def test_a_store_that_others_have_filled_is_an_error_with_its_numbers(rig: Rig) -> None:
    lease_id = rig.lend()
    rig.ask(lease_id)
    failed = {"op": "put_failed", "why": "full", "need": 100, "used": 7, "most": 50}
    rig.link.hear({**failed, "object": rig.link.sent[-1][1]["object"]})
    with pytest.raises(PoolFullError, match="would spill to disk above 50") as caught:
        rig.ask(lease_id)
    assert caught.value.facts["free_bytes"] == 43
    assert len(rig.link.sent) == 1  # nothing is tried again unasked
    assert rig.ask(lease_id) is None
    assert [op for op, _ in rig.link.sent] == ["put", "put"]


def test_who_joined_a_put_that_failed_has_another_in_place_of_an_error(rig: Rig) -> None:
    lease_id = rig.lend()
    payload_id = rig.ledger.view().leases[0].payload_id
    rig.ask(lease_id)
    lease = rig.ledger.acquire(session_id=rig.session_id, request_id="r", payload_id=payload_id)
    assert rig.ask(lease.lease_id) is None
    assert len(rig.link.sent) == 1
    failed = {"op": "put_failed", "why": "full", "need": 100, "used": 7, "most": 50}
    rig.link.hear({**failed, "object": rig.link.sent[-1][1]["object"]})
    assert rig.ask(lease.lease_id) is None
    assert [op for op, _ in rig.link.sent] == ["put", "put"]


def test_a_process_that_is_gone_is_offered_to_nobody_and_pins_nothing(rig: Rig) -> None:
    lease_id = rig.lend()
    rig.ask(lease_id)
    rig.link.lost()
    with pytest.raises(ObjectLostError, match="streamed"):
        rig.ask(lease_id)
    rig.ledger.release(rig.session_id, lease_id)
    assert rig.used_bytes() == 0
    assert rig.exporter.view().state == "lost"
    with pytest.raises(NoCommonTransportError, match="offers stream"):
        rig.open_session()


def test_a_cluster_that_comes_back_is_joined_and_offered_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teacher_logits_server.exporters.ray_object.REJOIN_SECONDS", 0.001)
    joined = threading.Event()
    lease_id = rig.lend()
    rig.put(lease_id)
    rig.link.lost()
    assert rig.exporter.view().state == "lost"
    listen = rig.next_link.listen

    def note(*given: Callable[..., None]) -> None:
        listen(*given)
        joined.set()

    monkeypatch.setattr(rig.next_link, "listen", note)
    rig.is_there.set()
    assert joined.wait(30)
    assert rig.exporter.view().state == "joined"
    assert rig.exporter.view().object_count == 0
    assert rig.ask(lease_id) is None
    assert [op for op, _ in rig.next_link.sent] == ["put"]
    rig.open_session()


def test_a_server_that_stops_looks_for_no_cluster(rig: Rig) -> None:
    rig.exporter.stop()
    rig.link.lost()
    assert rig.exporter.view().state == "lost"
    assert not [each for each in threading.enumerate() if each.name == "teacher-logits-join"]


def test_spilling_is_counted_and_said(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.link.hear({"op": "store", "used": 5, "spilled": 0})
    assert not caplog.records
    rig.link.hear({"op": "store", "used": 5, "spilled": 9})
    rig.link.hear({"op": "store", "used": 5, "spilled": 9})
    assert [each.message for each in caplog.records] == ["the object store spills to disk"]
    assert rig.exporter.view().spilled_bytes == 9
