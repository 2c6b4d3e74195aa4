"""Tickets and holders of a Ray cluster's objects cross the wire whole, as ids and bytes."""

from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.terms import ObjectTicket, RayHolder
from teacher_logits.v1 import object_service_pb2, ray_pb2
from teacher_logits.wire.objects import (
    holder_from_wire,
    holder_to_wire,
    ticket_from_wire,
    ticket_to_wire,
)

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


@given(st.builds(ObjectTicket, holder=holders, object_id=st.text(), token=st.binary()))
def test_a_ticket_crosses_whole(ticket: ObjectTicket) -> None:
    data = ticket_to_wire(ticket).SerializeToString()

    assert ticket_from_wire(object_service_pb2.PutObjectResponse.FromString(data)) == ticket
