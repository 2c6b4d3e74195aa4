"""The replicas of a server's own teachers as lines of text; a part of ``text``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.units import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.views import NodeStoreView, ReplicaView


def replica_lines(replicas: Sequence[ReplicaView]) -> list[str]:
    """Return how many are ready, and a line for each; nothing where there are none."""
    if not replicas:
        return []
    ready = sum(each.state == "ready" for each in replicas)
    of_several = len({each.teacher_id for each in replicas}) > 1
    return [
        f"replicas  {ready} of {len(replicas)} ready",
        *(_line(each, of_several=of_several) for each in replicas),
    ]


def node_store_lines(nodes: Sequence[NodeStoreView]) -> list[str]:
    """Return a line for each node where what replicas compute stays."""
    return [
        f"objects   {size_text(each.used_bytes)} of {size_text(each.budget_bytes)} stay on node "
        f"{each.node_id[:12]}, in {each.object_count} objects; holder {each.holder}"
        for each in nodes
    ]


def _line(replica: ReplicaView, *, of_several: bool) -> str:
    whose = f" of {replica.teacher_id}" if of_several else ""
    times = "once" if replica.restarts == 1 else f"{replica.restarts} times"
    again = f"; started anew {times}" if replica.restarts else ""
    why = f" ({replica.reason})" if replica.reason else ""
    return (
        f"replica   {replica.number}{whose}, {replica.state}: process {replica.pid} on "
        f"{replica.host_name or 'an unnamed host'}, node {replica.node_id[:12]}, "
        f"{replica.outstanding_tokens:,} tokens in {replica.outstanding_passes} passes to "
        f"compute{again}{why}"
    )
