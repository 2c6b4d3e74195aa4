"""Replicas between their Python form and their message; a part of ``views``."""

from __future__ import annotations

from teacher_logits.v1 import operator_service_pb2 as messages
from teacher_logits.views import ReplicaView


def replica_to_wire(view: ReplicaView) -> messages.ReplicaState:
    """Return the message of a replica's view."""
    return messages.ReplicaState(
        number=view.number,
        state=view.state,
        node_id=view.node_id,
        host_name=view.host_name,
        pid=view.pid,
        outstanding_passes=view.outstanding_passes,
        outstanding_tokens=view.outstanding_tokens,
        restarts=view.restarts,
        reason=view.reason,
        teacher_id=view.teacher_id,
    )


def replica_from_wire(message: messages.ReplicaState) -> ReplicaView:
    """Return the view of a message."""
    return ReplicaView(
        number=message.number,
        state=message.state,
        node_id=message.node_id,
        host_name=message.host_name,
        pid=message.pid,
        outstanding_passes=message.outstanding_passes,
        outstanding_tokens=message.outstanding_tokens,
        restarts=message.restarts,
        reason=message.reason,
        teacher_id=message.teacher_id,
    )
