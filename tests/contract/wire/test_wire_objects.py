"""Tickets and holders of a Ray cluster's objects cross the wire whole, as ids and bytes."""

from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.terms import ObjectTicket, PartTicket, RayHolder, StoredTicket
from teacher_logits.v1 import object_service_pb2, ray_pb2
from teacher_logits.wire.objects import (
    holder_from_wire,
    holder_to_wire,
    ticket_from_wire,
    ticket_to_wire,
)

counts = st.integers(0, 2**40)
holders = st.builds(
    RayHolder,
    namespace=st.text(),
    name=st.text(),
    cluster_address=st.text(),
    node_id=st.text(),
)


@given(holders)
def test_a_holder_crosses_whole(holder: RayHolder) -> None:
    data = holder_to_wire(holder).SerializeToString()

    assert holder_from_wire(ray_pb2.RayHolder.FromString(data)) == holder


tickets = st.builds(ObjectTicket, holder=holders, object_id=st.text(), token=st.binary())
runs = st.builds(lambda start, count: range(start, start + count), counts, counts)
parts = st.builds(PartTicket, ticket=tickets, rows=runs, positions=runs)


@given(tickets | st.builds(StoredTicket, parts=st.lists(parts, min_size=1).map(tuple)))
def test_a_ticket_crosses_whole(ticket: ObjectTicket | StoredTicket) -> None:
    data = ticket_to_wire(ticket).SerializeToString()

    assert ticket_from_wire(object_service_pb2.PutObjectResponse.FromString(data)) == ticket
