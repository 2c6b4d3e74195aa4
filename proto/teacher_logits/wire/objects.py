"""Payloads in a Ray cluster's object store: who holds them, tickets, and the store's view.

No reference of Ray's is ever in a message: ids and tokens are.
"""

from __future__ import annotations

from teacher_logits.terms import ObjectTicket, PartTicket, RayHolder, StoredTicket
from teacher_logits.v1 import object_service_pb2, operator_service_pb2, ray_pb2
from teacher_logits.views import NodeStoreView, ObjectStoreView


def holder_to_wire(holder: RayHolder) -> ray_pb2.RayHolder:
    """Return the message of a holder of references."""
    return ray_pb2.RayHolder(
        ray_namespace=holder.namespace,
        name=holder.name,
        cluster_address=holder.cluster_address,
        node_id=holder.node_id,
    )


def holder_from_wire(message: ray_pb2.RayHolder) -> RayHolder:
    """Return the holder of a message."""
    return RayHolder(
        namespace=message.ray_namespace,
        name=message.name,
        cluster_address=message.cluster_address,
        node_id=message.node_id,
    )


def ticket_to_wire(ticket: ObjectTicket | StoredTicket) -> object_service_pb2.PutObjectResponse:
    """Return the message of a lease's ticket."""
    if isinstance(ticket, StoredTicket):
        return object_service_pb2.PutObjectResponse(parts=map(_part_to_wire, ticket.parts))
    return object_service_pb2.PutObjectResponse(
        holder=holder_to_wire(ticket.holder), object_id=ticket.object_id, token=ticket.token
    )


def ticket_from_wire(message: object_service_pb2.PutObjectResponse) -> ObjectTicket | StoredTicket:
    """Return the ticket of a message."""
    if message.parts:
        return StoredTicket(parts=tuple(map(_part_from_wire, message.parts)))
    return ObjectTicket(
        holder=holder_from_wire(message.holder),
        object_id=message.object_id,
        token=message.token,
    )


def _part_to_wire(part: PartTicket) -> object_service_pb2.ObjectPart:
    return object_service_pb2.ObjectPart(
        holder=holder_to_wire(part.ticket.holder),
        object_id=part.ticket.object_id,
        token=part.ticket.token,
        first_row=part.rows.start,
        row_count=len(part.rows),
        first_position=part.positions.start,
        position_count=len(part.positions),
    )


def _part_from_wire(message: object_service_pb2.ObjectPart) -> PartTicket:
    first_row, first_position = message.first_row, message.first_position
    return PartTicket(
        ticket=ObjectTicket(
            holder=holder_from_wire(message.holder),
            object_id=message.object_id,
            token=message.token,
        ),
        rows=range(first_row, first_row + message.row_count),
        positions=range(first_position, first_position + message.position_count),
    )


def store_to_wire(view: ObjectStoreView) -> operator_service_pb2.ObjectStoreState:
    """Return the message of the object store's view."""
    return operator_service_pb2.ObjectStoreState(
        state=view.state,
        budget_bytes=view.budget_bytes,
        used_bytes=view.used_bytes,
        object_count=view.object_count,
        waiting_count=view.waiting_count,
        store_bytes=view.store_bytes,
        store_used_bytes=view.store_used_bytes,
        spilled_bytes=view.spilled_bytes,
        holder=view.holder,
        holder_restarts=view.holder_restarts,
        nodes=[
            operator_service_pb2.NodeStoreState(
                node_id=each.node_id,
                budget_bytes=each.budget_bytes,
                used_bytes=each.used_bytes,
                object_count=each.object_count,
                holder=each.holder,
                holder_restarts=each.holder_restarts,
            )
            for each in view.nodes
        ],
    )


def store_from_wire(message: operator_service_pb2.ObjectStoreState) -> ObjectStoreView:
    """Return the view of a message."""
    return ObjectStoreView(
        state=message.state,
        budget_bytes=message.budget_bytes,
        used_bytes=message.used_bytes,
        object_count=message.object_count,
        waiting_count=message.waiting_count,
        store_bytes=message.store_bytes,
        store_used_bytes=message.store_used_bytes,
        spilled_bytes=message.spilled_bytes,
        holder=message.holder,
        holder_restarts=message.holder_restarts,
        nodes=tuple(
            NodeStoreView(
                node_id=each.node_id,
                budget_bytes=each.budget_bytes,
                used_bytes=each.used_bytes,
                object_count=each.object_count,
                holder=each.holder,
                holder_restarts=each.holder_restarts,
            )
            for each in message.nodes
        ),
    )
