"""What a process's memory is, as the kernel counts it. Linux alone."""

from __future__ import annotations

from pathlib import Path


def forget_peak() -> None:
    """Have the kernel count the highest resident set from now on (`man proc_pid_clear_refs`)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(name: str = "VmRSS") -> int:
    """Return `VmRSS`, this process's resident set, or `VmHWM`, the highest it has been."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}")
