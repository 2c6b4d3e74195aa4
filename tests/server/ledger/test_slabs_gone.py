"""Readers are told of publishers' slabs in which nothing will ever lie again."""

from __future__ import annotations

import pytest
from tests.server.ledger.registering import House, Publisher, student, teacher

from teacher_logits.errors import NotAllowedError
from teacher_logits.terms import SlabsGone
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.steps import mail_from_wire
from teacher_logits_server.broker.lines import MAX_PACKET_BYTES
from teacher_logits_server.services.lease_messages import LeaseMessages
from teacher_logits_server.services.mail_packets import MAX_GONE, mail_packets


@pytest.fixture
def house() -> House:
    return House()


def read_a_step(house: House, publisher: Publisher, reader: str, step: int) -> None:
    """A step from its reservation to its retirement, for which the reader opens the slab."""
    house.register(publisher, step)
    grant = house.take(reader, step)
    house.ledger.may_open(reader, publisher.slab_id)
    house.give_back(reader, grant)


@pytest.mark.parametrize("dies", [True, False])
def test_once_when_their_publisher_is_gone(house: House, dies: bool) -> None:
    publisher = house.publish_as(teacher(dp=1))
    reader = house.read_as()
    read_a_step(house, publisher, reader, 0)
    told: list[str] = []
    house.ledger.on_mail(told.extend)
    if dies:
        house.ledger.line_ended(publisher.session_id, process_alive=False)
    else:
        house.ledger.close_session(publisher.session_id)

    assert reader in told
    assert house.ledger.take_mail(reader) == [SlabsGone(slab_ids=(publisher.slab_id,))]
    assert house.ledger.take_mail(reader) == []


def test_when_it_drops_them(house: House) -> None:
    publisher = house.publish_as(teacher(dp=1))
    reader = house.read_as()
    read_a_step(house, publisher, reader, 0)
    house.ledger.drop_foreign_slab(publisher.session_id, publisher.slab_id)

    assert house.ledger.take_mail(reader) == [SlabsGone(slab_ids=(publisher.slab_id,))]
    with pytest.raises(NotAllowedError, match="there is no slab"):
        house.ledger.may_open(reader, publisher.slab_id)


def test_not_before_the_last_lease_on_them_is_back(house: House) -> None:
    publisher = house.publish_as(teacher(dp=1))
    reader = house.read_as()
    house.register(publisher, 0)
    grant = house.take(reader, 0)
    house.ledger.may_open(reader, publisher.slab_id)
    house.ledger.line_ended(publisher.session_id, process_alive=False)
    assert house.ledger.take_mail(reader) == []

    house.give_back(reader, grant)

    assert house.ledger.take_mail(reader) == [SlabsGone(slab_ids=(publisher.slab_id,))]


def test_nobody_else_is_told(house: House) -> None:
    publisher = house.publish_as(teacher(dp=1))
    reader, other = house.read_as(), house.read_as(student(student_id="other"))
    house.ledger.want_steps(other, 5, 1)
    house.register(publisher, 0)
    for each in (reader, other):
        grant = house.take(each, 0)
        if each == reader:
            house.ledger.may_open(each, publisher.slab_id)
        house.give_back(each, grant)
    house.ledger.close_session(publisher.session_id)

    assert house.ledger.take_mail(other) == []
    house.ledger.close_session(reader)
    assert house.ledger.take_mail(reader) == []


def test_many_of_them_are_several_packets() -> None:
    ids = tuple(f"{number:0128}" for number in range(2 * MAX_GONE + 1))
    packets = mail_packets(SlabsGone(slab_ids=ids), LeaseMessages())

    read = [mail_from_wire(line_pb2.LineReply.FromString(packet)) for packet in packets]
    assert max(map(len, packets)) <= MAX_PACKET_BYTES
    assert [i for each in read if isinstance(each, SlabsGone) for i in each.slab_ids] == [*ids]
