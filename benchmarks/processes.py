"""The other processes of a benchmark: started, heard, used, ended.

A child writes a line of JSON when it is ready, works until its standard input ends, on what
that says, and may write more. A server of ours says its line on a descriptor of its own and is
ended by SIGTERM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 60.0


class Child:
    """`python -m module arguments`, once it has said that it is ready."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, object]:
        """Wait for the next line and return it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._module} ended with {self._process.wait()}, see above")
        told: dict[str, object] = json.loads(line)
        return told

    def tell(self, line: str) -> None:
        """Give it a line to work on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def finish(self) -> None:
        """Tell it that it is enough."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        """Wait for its end; kill it where that does not come."""
        self.finish()
        assert self._process.stdout is not None
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def child(module: str, *arguments: str) -> Iterator[Child]:
    """Start a child, and end it after the block."""
    started = Child(module, *arguments)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def our_server(*flags: str) -> Iterator[dict[str, object]]:
    """Run a server with the benchmarks' teacher; yields its readiness, ``pid`` and all."""
    reading, writing = os.pipe()
    engine = ["--engine", "benchmarks.teacher:make", "--ready-fd", str(writing)]
    process = subprocess.Popen(
        [sys.executable, "-m", "teacher_logits", "serve", *engine, "--log-level", "error", *flags],
        cwd=ROOT,
        pass_fds=(writing,),
    )
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as ready:
            line = ready.readline()
        if not line:
            raise SystemExit(f"the server ended with {process.wait()} before it was ready")
        yield json.loads(line)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, all its threads together. Linux alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
