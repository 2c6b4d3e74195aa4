"""A namespace that has nothing but loopback: the only place where a benchmark starts Ray.

Ray listens on every interface, whatever it is told. The process namespace takes along what it
leaves behind.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from benchmarks.processes import ROOT

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_SOURCES = ("", "proto", "server", "client")


def is_alone() -> bool:
    """Say whether this process sees no interface but loopback."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def run_alone(module: str, argv: list[str]) -> int:
    """Run `python -m module argv` in such a namespace, on the same standard output."""
    into = ("unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "--")
    shell = ("sh", "-c", 'ip link set lo up && "$0" "$@"; exit $?')
    paths = [str(ROOT / part) for part in _SOURCES] + [os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [*into, *shell, sys.executable, "-m", module, *argv]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
