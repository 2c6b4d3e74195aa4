"""The doctor: what stands in the way of sharing memory between teacher and student, and its cure.

Looks at software, kernel, memory, place, devices and Ray of this process, and at one server where
its address is given. Changes nothing; opens one session at most, and closes it. What is seen is
gathered first, as plain values; each finding is a function of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.doctor.config import read_surroundings
from teacher_logits_client.doctor.connection import Visit, visit_server
from teacher_logits_client.doctor.findings import Finding, Report, Verdict
from teacher_logits_client.doctor.gpus import gpu_findings, look_at_gpus
from teacher_logits_client.doctor.host import host_findings, read_kernel_settings
from teacher_logits_client.doctor.kernel import kernel_findings
from teacher_logits_client.doctor.memory import memory_findings
from teacher_logits_client.doctor.place import place_findings
from teacher_logits_client.doctor.proxies import proxy_finding
from teacher_logits_client.doctor.ray_cluster import look_at_ray, ray_findings
from teacher_logits_client.doctor.software import software_findings

if TYPE_CHECKING:
    from teacher_logits.pool import PoolUsage

__all__ = ["Finding", "Report", "Verdict", "Visit", "examine"]

DEFAULT_POOL_BYTES = 1 << 30
"""That of `serve`, where no other is given."""


def examine(*, pool_size_bytes: int | None = None, visit: Visit | None = None) -> Report:
    """Look at everything here, and at a server where one is to be visited.

    Memory is held against ``pool_size_bytes``; where that is not given, against the pool of the
    server on this machine that is visited, else against the default of `serve`.
    """
    seen = read_surroundings()
    gpus = look_at_gpus()
    kernel = kernel_findings()
    visited = None
    if visit is not None:
        visited = visit_server(
            visit,
            knows_peers=any(
                each.name == "peer_pidfd" and each.verdict is Verdict.OK for each in kernel
            ),
            has_gpu=bool(gpus.models or gpus.nodes),
        )
    address = visit.connection.address if visit is not None else None
    pool = visited.pool if visited is not None and pool_size_bytes is None else None
    findings = [
        *software_findings(),
        *kernel,
        *host_findings(read_kernel_settings()),
        *_memory(pool_size_bytes, pool),
        *place_findings(seen),
        proxy_finding(seen.proxies, seen.exempt, address=address),
        *gpu_findings(gpus, visible_devices=seen.visible_devices, allocators=seen.allocators),
        *ray_findings(look_at_ray(seen)),
        *(visited.findings if visited is not None else ()),
    ]
    return Report(findings=tuple(findings))


def _memory(pool_size_bytes: int | None, pool: PoolUsage | None) -> list[Finding]:
    """Hold memory against the pool that is meant, less what a server has taken for it already."""
    if pool is None:
        return memory_findings(pool_size_bytes or DEFAULT_POOL_BYTES)
    return memory_findings(pool.budget_bytes, committed_bytes=pool.committed_bytes)
