"""Announced steps over real lines: what a slot says counts before its message has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.server.services.registry_rig import (
    PATIENCE,
    Publisher,
    Wire,
    a_payload,
    a_student,
    a_teacher,
    bytes_of,
    serving,
)

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind
from teacher_logits.terms import RoomFreed, StepGrant, StepWithdrawn
from teacher_logits.v1 import line_pb2, operator_service_pb2, registry_service_pb2
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits.wire.payloads import extent_to_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from teacher_logits.payload import Extent


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(tmp_path) as wire:
        yield wire


def announced(publisher: Publisher, step: int, *, spoil: int = -1) -> tuple[str, Extent]:
    """Write a step of one shard and announce it, its slot as of one that is not sealed."""
    if publisher.slab is None:
        publisher.put_slab()
    payload = a_payload(step=step)
    payload_id = publisher.reserve(payload).payload_id
    data = bytearray(bytes_of(payload))
    if spoil >= 0:
        data[payload.column(ColumnKind.ROW_OFFSETS).offset_bytes + spoil] ^= 1
    extent = publisher.place(bytes(data))
    assert publisher.slab is not None
    publisher.slab.mark(extent.slot, extent.generation - 1)
    publisher.own_line.call(
        announce=line_pb2.AnnouncePayloadRequest(
            session_id=publisher.session_id, payload_id=payload_id, extent=extent_to_wire(extent)
        )
    )
    return payload_id, extent


def mark(publisher: Publisher, extent: Extent) -> None:
    assert publisher.slab is not None
    publisher.slab.mark(extent.slot, extent.generation)


def abandon(publisher: Publisher, payload_id: str) -> bool:
    request = registry_service_pb2.AbandonPayloadRequest(
        session_id=publisher.session_id, payload_id=payload_id
    )
    return publisher.own_line.call(abandon=request).abandon.is_sealed


def test_a_lease_that_was_told_can_be_returned_before_the_seal_is_heard(wire: Wire) -> None:
    publisher, student = wire.publisher(a_teacher()), wire.student(a_student())
    student.want(0)
    payload_id, extent = announced(publisher, 0)
    terms = student.mailed()
    assert terms.awaited == (extent,)
    mark(publisher, extent)
    student.release(terms)

    freed = publisher.own_line.mail()
    assert isinstance(freed, RoomFreed)
    assert freed.payload_ids == (payload_id,)


def test_what_is_sealed_by_its_slot_is_not_given_up(wire: Wire) -> None:
    publisher = wire.publisher(a_teacher())
    payload_id, extent = announced(publisher, 0)
    mark(publisher, extent)
    assert abandon(publisher, payload_id)

    student = wire.student(a_student())
    student.want(0)
    assert student.mailed().awaited == ()


def test_what_is_not_sealed_by_its_slot_is_given_up_and_withdrawn(wire: Wire) -> None:
    publisher, student = wire.publisher(a_teacher()), wire.student(a_student())
    student.want(0)
    payload_id, _ = announced(publisher, 0)
    student.mailed()
    assert not abandon(publisher, payload_id)
    assert student.own_line.mail() == StepWithdrawn(step=0)


def test_a_publisher_that_dies_behind_its_slot_has_sealed_its_step(wire: Wire) -> None:
    publisher, student = wire.publisher(a_teacher()), wire.student(a_student())
    student.want(0)
    _, extent = announced(publisher, 0)
    terms = student.mailed()
    mark(publisher, extent)
    publisher.own_line.close()

    wire.await_that(lambda view: [step.stage for step in view.steps] == ["complete"])
    wire.await_that(
        lambda view: [lease.lease_id for lease in view.leases] == [terms.leases[0].lease_id]
    )
    student.release(terms)
    wire.await_that(lambda view: not view.leases and not view.steps)


def close(wire: Wire, publisher: Publisher) -> None:
    wire.students.CloseSession(
        messages.CloseSessionRequest(session_id=publisher.session_id), timeout=PATIENCE
    )


def end_by_force(wire: Wire, publisher: Publisher) -> None:
    wire.operator.Reclaim(
        operator_service_pb2.ReclaimRequest(session_id=publisher.session_id), timeout=PATIENCE
    )


@pytest.mark.parametrize("end", [close, end_by_force])
def test_a_publisher_whose_session_is_ended_behind_its_slot_has_sealed_its_step(
    wire: Wire, end: Callable[[Wire, Publisher], None]
) -> None:
    publisher, student = wire.publisher(a_teacher()), wire.student(a_student())
    student.want(0)
    _, extent = announced(publisher, 0)
    terms = student.mailed()
    mark(publisher, extent)
    end(wire, publisher)

    view = wire.inspect()
    assert [step.stage for step in view.steps] == ["complete"]
    assert [lease.lease_id for lease in view.leases] == [terms.leases[0].lease_id]


def test_a_publisher_that_dies_before_its_slot_has_sealed_nothing(wire: Wire) -> None:
    publisher, student = wire.publisher(a_teacher()), wire.student(a_student())
    student.want(0)
    announced(publisher, 0)
    student.mailed()
    publisher.own_line.close()
    assert student.own_line.mail() == StepWithdrawn(step=0)


def test_a_lease_that_comes_back_unread_is_granted_with_the_step(wire: Wire) -> None:
    publisher, student = wire.publisher(a_teacher()), wire.student(a_student())
    student.want(0)
    payload_id, extent = announced(publisher, 0)
    (told,) = student.mailed().leases
    student.own_line.call(
        release={"session_id": student.session_id, "lease_id": told.lease_id, "unread": True}
    )
    mark(publisher, extent)
    publisher.seal(payload_id, extent)

    grant = student.mailed()
    assert grant.awaited == ()
    assert grant.leases[0].lease_id != told.lease_id
    assert student.read(grant.leases[0]) == bytes_of(a_payload(step=0))


def test_a_lease_that_comes_back_unread_behind_its_slot_is_a_lease_of_what_is_sealed(
    wire: Wire,
) -> None:
    publisher, student = wire.publisher(a_teacher()), wire.student(a_student())
    student.want(0)
    _, extent = announced(publisher, 0)
    (told,) = student.mailed().leases
    mark(publisher, extent)
    student.own_line.call(
        release={"session_id": student.session_id, "lease_id": told.lease_id, "unread": True}
    )

    wire.await_that(lambda view: [step.stage for step in view.steps] == ["complete"])
    wire.await_that(lambda view: not view.leases)  # nothing was sent that nobody takes


def test_rows_that_are_not_as_reserved_are_announced_to_nobody(wire: Wire) -> None:
    publisher, student = wire.publisher(a_teacher()), wire.student(a_student())
    student.want(0)
    with pytest.raises(PayloadInvalidError, match="row_offsets"):
        announced(publisher, 0, spoil=8)
    payload = a_payload(step=0)
    publisher.publish(payload, bytes_of(payload))
    grant = student.mailed()
    assert isinstance(grant, StepGrant)
    assert grant.awaited == ()
