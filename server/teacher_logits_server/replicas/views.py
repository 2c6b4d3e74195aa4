"""How the dispatch table and what its replicas have loaded look to an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.views import ReplicaView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_server.replicas.actor import Loaded
    from teacher_logits_server.replicas.dispatch import Dispatch


def view_replicas(table: Dispatch, loaded: Sequence[Loaded]) -> tuple[ReplicaView, ...]:
    """Describe each replica; ``loaded`` is what its last ready life had loaded."""
    views = []
    for number, there in enumerate(loaded):
        replica, (passes, tokens) = table.replica(number), table.outstanding(number)
        views.append(
            ReplicaView(
                number=number,
                state=replica.state.value,
                node_id=there.node_id,
                host_name=there.host_name,
                pid=there.pid,
                outstanding_passes=passes,
                outstanding_tokens=tokens,
                restarts=replica.restarts,
                reason=replica.reason,
            )
        )
    return tuple(views)
