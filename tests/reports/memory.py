"""What a process's memory is, as the kernel counts it."""

from pathlib import Path


def forget_peak(pid: int) -> int:
    """Have the highest resident set be counted from now on; return what it is now, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def peak_bytes(pid: int) -> int:
    """Return the highest resident set since then: private pages and shared ones."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not count the resident set of {pid}")
