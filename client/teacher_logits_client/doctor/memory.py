"""Whether the machine and the cgroups have memory for a server's pool.

Slabs are memfds. No mount bounds them, /dev/shm included: what does is the machine's memory
and the memory limit of the cgroup, and a cgroup that is overrun kills.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits_client.doctor.findings import Finding, Verdict
from teacher_logits_client.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEM_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
#: Limit, usage, and the page cache within the usage that the kernel drops before it kills.
_FILES_V2 = ("memory.max", "memory.current", "inactive_file")
_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""


def memory_findings(
    pool_size_bytes: int,
    *,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    shared_mount: Path = Path("/dev/shm"),
) -> list[Finding]:
    """Compare what may still be taken with a pool of ``pool_size_bytes``."""
    match = _MEM_AVAILABLE.search(_read(proc / "meminfo"))
    available = int(match[1]) * 1024 if match else None
    limits = list(_cgroup_allowances(proc, cgroups))
    group, free = min(limits, key=lambda limit: limit[1], default=("", None))
    return [
        _room("memory_available", "the machine", available, pool_size_bytes),
        _room("memory_cgroup", f"cgroup {group}", free, pool_size_bytes),
        _mount(shared_mount),
    ]


def _room(name: str, whose: str, free_bytes: int | None, pool_size_bytes: int) -> Finding:
    if free_bytes is None:
        limits = "no cgroup limit is seen" if name == "memory_cgroup" else "free memory is unknown"
        return Finding(name=name, verdict=Verdict.OK, message=f"{limits} from here")
    facts = {"free_bytes": free_bytes, "pool_size_bytes": pool_size_bytes}
    have = f"{whose} has {size_text(free_bytes)} free, and a pool of {size_text(pool_size_bytes)}"
    if free_bytes >= pool_size_bytes:
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


def _cgroup_allowances(proc: Path, cgroups: Path) -> Iterator[tuple[str, int]]:
    """Yield each group of this process that has a limit, and the bytes it still allows."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if not colon:
            continue  # no line of the kernel's
        if controllers == "":
            yield from _walk(cgroups, group, _FILES_V2)
        elif "memory" in controllers.split(","):
            yield from _walk(cgroups / "memory", group, _FILES_V1)


def _walk(root: Path, group: str, files: tuple[str, str, str]) -> Iterator[tuple[str, int]]:
    """Look at a group and at each parent: a limit above binds those below."""
    limit_file, usage_file, cache_line = files
    names = [name for name in group.split("/") if name not in ("", "..")]
    for depth in range(len(names), -1, -1):
        folder = root.joinpath(*names[:depth])
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None or limit >= _NO_LIMIT_BYTES:
            continue
        lines = _read(folder / "memory.stat").splitlines()
        cache = next((line.split()[1] for line in lines if line.startswith(f"{cache_line} ")), "0")
        yield f"/{'/'.join(names[:depth])}", max(0, limit - usage + min(int(cache), usage))


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
