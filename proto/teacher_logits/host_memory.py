"""How much memory a slab may take before the kernel would kill somebody for it.

A memfd knows no mount limit: where a cgroup or the machine is full, touching it ends in an
out-of-memory kill and not in an error. So whoever creates a slab asks here first:

    machine     MemAvailable of /proc/meminfo
    cgroup v2   memory.max - (memory.current - inactive_file), own group and every parent
    cgroup v1   memory.limit_in_bytes - (memory.usage_in_bytes - total_inactive_file), likewise

``inactive_file`` is page cache that the kernel drops before it kills (a model's file that was
just read, mostly). What cannot be read limits nothing; on systems without /proc nothing does.
It reads files: not for a serving thread. ``proc`` and ``cgroups`` are where the system shows
its numbers; tests give folders of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits.errors import PoolFullError

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADROOM_BYTES = 64 << 20
"""What a slab must leave to everybody else."""

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_MEM_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Bytes that may still be taken, by one limit; ``source`` is the limit's name."""

    source: str
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Files:
    """The files of one cgroup version, and its line of memory.stat."""

    limit: str
    usage: str
    reclaimable: re.Pattern[str]


_V1 = _Files(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable=re.compile(r"^total_inactive_file (\d+)$", re.MULTILINE),
)
_V2 = _Files(
    limit="memory.max",
    usage="memory.current",
    reclaimable=re.compile(r"^inactive_file (\d+)$", re.MULTILINE),
)


def check_memory(
    need_bytes: int, *, way_out: str, proc: Path = PROC, cgroups: Path = CGROUPS
) -> None:
    """Refuse what the machine or a cgroup has no memory for.

    Args:
        way_out: what the caller's user can change, for the message.

    Raises:
        PoolFullError: with what is needed and free, and by which limit.
    """
    limits = [machine_allowance(proc=proc), tightest_cgroup(proc=proc, cgroups=cgroups)]
    least = min(
        (limit for limit in limits if limit is not None),
        key=lambda limit: limit.free_bytes,
        default=None,
    )
    if least is None or need_bytes + HEADROOM_BYTES <= least.free_bytes:
        return
    raise PoolFullError(
        f"a slab of {need_bytes} bytes would leave less than {HEADROOM_BYTES} of the "
        f"{least.free_bytes} bytes that {least.source} still allows: wait for memory, {way_out}",
        facts={
            "need_bytes": need_bytes,
            "free_bytes": least.free_bytes,
            "headroom_bytes": HEADROOM_BYTES,
            "limit": least.source,
        },
    )


def machine_allowance(*, proc: Path = PROC) -> Allowance | None:
    """Return what the machine still allows; None where it does not say."""
    available = _MEM_AVAILABLE.search(_read(proc / "meminfo"))
    if available is None:
        return None
    return Allowance(source="MemAvailable", free_bytes=int(available[1]) * 1024)


def tightest_cgroup(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Allowance | None:
    """Return what the tightest cgroup limit still allows; None where no limit is seen."""
    limits = cgroup_allowances(proc=proc, cgroups=cgroups)
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def cgroup_allowances(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Allowance]:
    """Yield what each cgroup of this process that has a limit still allows."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0":  # version 2, which has one hierarchy for all controllers
            yield from _walk(cgroups, group, _V2)
            yield from _walk(cgroups / "unified", group, _V2)
        elif "memory" in controllers.split(","):
            yield from _walk(cgroups / "memory", group, _V1)


def _walk(root: Path, group: str, files: _Files) -> Iterator[Allowance]:
    """Yield the allowance of a group and of each parent; a limit above binds those below.

    In a container the group's path may be the host's while the root shown is the container's
    own: levels that are not there are passed over.
    """
    names = [name for name in group.split("/") if name not in ("", "..")]
    for depth in range(len(names), -1, -1):
        folder = root.joinpath(*names[:depth])
        limit, usage = _number(folder / files.limit), _number(folder / files.usage)
        if limit is None or usage is None or limit >= _NO_LIMIT_BYTES:
            continue
        reclaimable = files.reclaimable.search(_read(folder / "memory.stat"))
        cache = min(int(reclaimable[1]), usage) if reclaimable is not None else 0
        free = max(0, limit - (usage - cache))
        yield Allowance(
            source=f"{files.limit} of cgroup /{'/'.join(names[:depth])}", free_bytes=free
        )


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
