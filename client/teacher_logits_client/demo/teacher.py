"""The teacher's process: ``teacher-logits serve`` as anyone would run it, on a socket of its own.

Promises: the process is gone when the block is left, whatever happened inside; what it logged
stays in a file. Refuses to wait for a server that has died, and says what its log said.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, NotAvailable

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

TEACHER_ID = "demo-teacher"

_STOP_SECONDS = 20
_LOG_LINES = 5


class TeacherProcess:
    """A server in a process of its own, as a context manager."""

    def __init__(self, *, model: Path, threads: int, dtype: str, log: Path) -> None:
        """Start the process; ``wait_until_ready`` waits for the server in it."""
        self._folder = tempfile.TemporaryDirectory(prefix="tl-")
        self._log = log
        self._ready, ready_end = os.pipe()
        self.address = f"unix:{os.path.join(self._folder.name, 't.sock')}"
        command = [sys.executable, "-m", "teacher_logits", "serve"]
        command += ["--model", str(model), "--teacher-id", TEACHER_ID, "--listen", self.address]
        command += ["--dtype", dtype, "--device", "cpu", "--threads", str(threads)]
        command += ["--pool-size", "256MiB", "--slab-size", "64MiB", "--default-wait", "10min"]
        command += ["--drain-grace", "5s", "--ready-fd", str(ready_end)]
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[ready_end],
                )
        except BaseException:
            os.close(self._ready)
            self._folder.cleanup()
            raise
        finally:
            os.close(ready_end)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server has loaded its teacher and serves.

        Raises:
            NotAvailable: the process ended first, with the last lines of its log.
            DeadlinePassedError: it did not serve within ``timeout`` seconds.
        """
        line, until = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._ready], [], [], left)[0]:
                raise DeadlinePassedError(
                    f"waited {span_text(timeout)} for the teacher's server to come up; its log is "
                    f"{self._log}",
                    facts={"deadline_seconds": timeout, "log": str(self._log)},
                )
            piece = os.read(self._ready, 4096)
            if not piece:
                raise self._died()
            line += piece
        self.address = str(json.loads(line)["address"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._ready)
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _died(self) -> NotAvailable:
        code = self._process.wait()
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        said = " / ".join(lines[-_LOG_LINES:]) or "nothing"
        return NotAvailable(
            f"the teacher's server ended with exit code {code} before it served. It said: {said}",
            facts={"exit_code": code, "log": str(self._log)},
        )


def native_dtype(processor: Path = Path("/proc/cpuinfo")) -> str:
    """Return ``bfloat16`` where the processor multiplies it in hardware, else ``float32``.

    In hardware it more than halves the teacher's time; emulated it would lengthen it.
    """
    try:
        text = processor.read_text("ascii", "replace")
    except OSError:
        return "float32"
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    words = set(flags[1].split()) if flags else set()
    return "bfloat16" if words & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"
