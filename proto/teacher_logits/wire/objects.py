"""Payloads in a Ray cluster's object store: who holds them, tickets, and the store's view.

No reference of Ray's is ever in a message: ids and tokens are.
"""

from __future__ import annotations

from teacher_logits.terms import ObjectTicket, RayHolder
from teacher_logits.v1 import object_service_pb2, operator_service_pb2, ray_pb2
from teacher_logits.views import ObjectStoreView


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


def ticket_to_wire(ticket: ObjectTicket) -> object_service_pb2.PutObjectResponse:
    """Return the message of a lease's ticket."""
    return object_service_pb2.PutObjectResponse(
        holder=holder_to_wire(ticket.holder), object_id=ticket.object_id, token=ticket.token
    )


def ticket_from_wire(message: object_service_pb2.PutObjectResponse) -> ObjectTicket:
    """Return the ticket of a message."""
    return ObjectTicket(
        holder=holder_from_wire(message.holder),
        object_id=message.object_id,
        token=message.token,
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
    )
