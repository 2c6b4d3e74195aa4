"""Grids and hints between Python and their messages. What they say is judged elsewhere."""

from __future__ import annotations

from teacher_logits.grid import BatchGrid
from teacher_logits.locality import ModelGrid
from teacher_logits.profiles import NodeHints
from teacher_logits.v1 import grid_pb2

_BATCH_GRID_FIELDS = ("global_batch_size", "data_parallel_size", "micro_batch_size")


def batch_grid_to_wire(grid: BatchGrid) -> grid_pb2.BatchGrid:
    """Return the message of a batch grid."""
    return grid_pb2.BatchGrid(**{name: getattr(grid, name) for name in _BATCH_GRID_FIELDS})


def batch_grid_from_wire(message: grid_pb2.BatchGrid) -> BatchGrid:
    """Return the batch grid of a message. Sizes are judged by ``grid``, not here."""
    return BatchGrid(**{name: getattr(message, name) for name in _BATCH_GRID_FIELDS})


_MODEL_GRID_FIELDS = (
    "node_count",
    "gpus_per_node",
    "tensor_parallel_size",
    "context_parallel_size",
    "tensor_parallel_rank",
    "context_parallel_rank",
)


def model_grid_to_wire(grid: ModelGrid) -> grid_pb2.ModelGrid:
    """Return the message of a model grid."""
    return grid_pb2.ModelGrid(**{name: getattr(grid, name) for name in _MODEL_GRID_FIELDS})


def model_grid_from_wire(message: grid_pb2.ModelGrid) -> ModelGrid:
    """Return the model grid of a message. Sizes are judged by ``locality``, not here."""
    return ModelGrid(**{name: getattr(message, name) for name in _MODEL_GRID_FIELDS})


def hints_to_wire(hints: NodeHints) -> grid_pb2.NodeHints:
    """Return the message of hints."""
    return grid_pb2.NodeHints(
        host_name=hints.host_name,
        boot_id=hints.boot_id,
        pid=hints.pid,
        namespaces=dict(hints.namespaces),
        device_uuids=hints.device_uuids,
        versions=dict(hints.versions),
        ray_node_id=hints.ray_node_id,
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
        ray_node_id=message.ray_node_id,
    )
