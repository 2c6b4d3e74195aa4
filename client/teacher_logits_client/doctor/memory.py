"""Whether the machine and the cgroups have memory for a server's pool.

Slabs are memfds. No mount bounds them, /dev/shm included: what does is the machine's memory
and the memory limit of the cgroup, and a cgroup that is overrun kills.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits.host_memory import CGROUPS, PROC, machine_allowance, tightest_cgroup
from teacher_logits_client.doctor.findings import Finding, Verdict
from teacher_logits_client.units import size_text

if TYPE_CHECKING:
    from teacher_logits.host_memory import Allowance


def memory_findings(
    pool_size_bytes: int,
    *,
    proc: Path = PROC,
    cgroups: Path = CGROUPS,
    shared_mount: Path = Path("/dev/shm"),
) -> list[Finding]:
    """Compare what may still be taken with a pool of ``pool_size_bytes``."""
    machine = machine_allowance(proc=proc)
    cgroup = tightest_cgroup(proc=proc, cgroups=cgroups)
    return [
        _room("memory_available", "free memory is unknown", machine, pool_size_bytes),
        _room("memory_cgroup", "no cgroup limit is seen", cgroup, pool_size_bytes),
        _mount(shared_mount),
    ]


def _room(name: str, unseen: str, limit: Allowance | None, pool_size_bytes: int) -> Finding:
    if limit is None:
        return Finding(name=name, verdict=Verdict.OK, message=f"{unseen} from here")
    facts = {"free_bytes": limit.free_bytes, "pool_size_bytes": pool_size_bytes}
    have = (
        f"{limit.source} allows {size_text(limit.free_bytes)} more, and a pool of "
        f"{size_text(pool_size_bytes)}"
    )
    if limit.free_bytes >= pool_size_bytes:
        message = f"{have} fits"
        return Finding(name=name, verdict=Verdict.OK, message=message, facts=facts)
    return Finding(
        name=name,
        verdict=Verdict.WARN,
        message=f"{have} does not fit: a server here refuses payloads before its pool is full",
        cure="give it more memory, or serve with a smaller --pool-size and --slab-size",
        facts=facts,
    )


def _mount(folder: Path) -> Finding:
    try:
        state = os.statvfs(folder)
    except OSError:
        return Finding(
            name="dev_shm", verdict=Verdict.OK, message=f"there is no {folder}, and none is needed"
        )
    size = state.f_frsize * state.f_blocks
    return Finding(
        name="dev_shm",
        verdict=Verdict.OK,
        message=f"{folder} has {size_text(size)}, for information only: slabs are memfds, which "
        "it does not bound (data loaders of torch do use it)",
        facts={"size_bytes": size, "free_bytes": state.f_frsize * state.f_bavail},
    )
