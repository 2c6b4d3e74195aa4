"""Node hints between their Python form and their messages."""

from __future__ import annotations

from teacher_logits.profiles import NodeHints
from teacher_logits.v1 import grid_pb2


def hints_to_wire(hints: NodeHints) -> grid_pb2.NodeHints:
    """Return the message of hints."""
    return grid_pb2.NodeHints(
        host_name=hints.host_name,
        boot_id=hints.boot_id,
        pid=hints.pid,
        namespaces=dict(hints.namespaces),
        device_uuids=hints.device_uuids,
        versions=dict(hints.versions),
    )


def hints_from_wire(message: grid_pb2.NodeHints) -> NodeHints:
    """Return the hints of a message."""
    return NodeHints(
        host_name=message.host_name,
        boot_id=message.boot_id,
        pid=message.pid,
        namespaces=dict(message.namespaces),
        device_uuids=tuple(message.device_uuids),
        versions=dict(message.versions),
    )
