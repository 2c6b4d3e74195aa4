"""A real server in a process of its own, for tests of whoever uses this client.

    from teacher_logits_client import connect, testing

    with testing.serve(pool_size="64MiB") as server, connect(server.address) as client:
        ...

Without an engine it serves ``ToyTeacher``, which needs no model and answers the same on every
machine. Nothing is waited for by sleeping: the server tells by a pipe that it is ready. It is
killed on leaving, and its folder removed with its socket and log.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from teacher_logits.clock import span_text
from teacher_logits.errors import ConfigError, DeadlinePassedError, ServerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START_TIMEOUT_SECONDS = 60.0
_LOG_TAIL_CHARS = 2000


class ServerProcess:
    """A server that runs: where it listens, who it is, and what it has said.

    ``readiness`` is what it told when it was ready; ``log_text`` what it logged, which is gone
    with the server's folder: read it inside the ``with`` block.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], readiness: Mapping[str, object], log: Path
    ) -> None:
        self._process = process
        self._log = log
        self.readiness = readiness

    def __repr__(self) -> str:
        code = self._process.poll()
        state = "running" if code is None else f"ended with {code}"
        return f"<ServerProcess {self.pid} at {self.address} ({state})>"

    @property
    def address(self) -> str:
        """What ``connect`` takes."""
        return str(self.readiness["address"])

    @property
    def pid(self) -> int:
        """The process; signals may be sent to it."""
        return self._process.pid

    def log_text(self) -> str:
        """Return everything that the server has logged so far, its errors' tracebacks included."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout: float) -> int:
        """Wait for the end of a server that was told to stop; return its exit code."""
        return self._process.wait(timeout)


@contextmanager
def serve(
    engine: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    start_timeout: float = START_TIMEOUT_SECONDS,
    **settings: object,
) -> Iterator[ServerProcess]:
    """Run ``teacher-logits serve`` on a Unix socket in a folder of its own.

    Args:
        engine: ``package.module:factory`` of an engine, the path of a model (one with a colon
            in it as a ``Path``), or None for ``ToyTeacher``.
        folder: where the engine's module is looked for too; the current one by default.
        start_timeout: seconds that the server may take to be ready.
        settings: flags of ``teacher-logits serve``, by their names with underscores:
            ``pool_size="64MiB"``, ``insecure=True``, ``listen=["127.0.0.1:0"]``.

    Raises:
        ConfigError: the server refused its settings, with what it said.
        ServerUnreachableError: it ended before it was ready, with what it said.
        DeadlinePassedError: it was not ready in time.
    """
    home = Path(tempfile.mkdtemp(prefix="tl-"))
    log = home / "log"
    reading, writing = os.pipe()
    process = None
    try:
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    _command(engine, home, writing, settings),
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writing,),
                )
        finally:
            os.close(writing)
        readiness = _await_ready(process, reading, log, start_timeout)
        yield ServerProcess(process, readiness, log)
    finally:
        os.close(reading)
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _command(
    engine: str | os.PathLike[str] | None,
    home: Path,
    ready_fd: int,
    settings: Mapping[str, object],
) -> list[str]:
    flags: dict[str, object] = {"listen": f"unix:{home / 's'}", "ready_fd": ready_fd}
    if engine is None:
        flags["engine"] = f"{__name__}:{toy_teacher.__name__}"
    elif isinstance(engine, str) and ":" in engine:
        flags["engine"] = engine
    else:
        flags["model"] = os.path.abspath(engine)
    command = [sys.executable, "-m", "teacher_logits", "serve"]
    for name, value in {**flags, **settings}.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command += [flag] if value else []
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                command += [flag, str(each)]
    return command


def _await_ready(
    process: subprocess.Popen[bytes], reading: int, log: Path, timeout: float
) -> Mapping[str, object]:
    until = time.monotonic() + timeout
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise DeadlinePassedError(
                f"waited {span_text(timeout)} for the server to be ready{_tail(log)}",
                facts={"deadline_seconds": timeout},
            )
        part = os.read(reading, 65536)
        if not part:
            code = process.wait()
            kind = ConfigError if code == 2 else ServerUnreachableError
            raise kind(
                f"{_last_line(log)} (the server ended with exit code {code} before it was ready)"
                f"{_tail(log)}",
                facts={"exit_code": code},
            )
        line += part
    found: dict[str, object] = json.loads(line)
    return found


def _last_line(log: Path) -> str:
    """Return what the server said last, which is why it ended."""
    return (_said(log).splitlines() or ["it said nothing"])[-1].strip()


def _tail(log: Path) -> str:
    said = _said(log)[-_LOG_TAIL_CHARS:]
    return f"; it said:\n{said}" if said else ""


def _said(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").strip()


# --- the toy teacher: fulfils the server's protocol for engines, without knowing the server


@dataclass(frozen=True, kw_only=True)
class ToyProfile:
    """What the toy says of itself."""

    name: str = "toy"
    vocabulary_size: int = 256
    head_rows: int = 256
    max_row_tokens: int = 4096
    arithmetic_type: str = "float32"
    revision: str = "1"
    tokenizer_fingerprint: str = ""


class ToyRow(Protocol):
    """A row to score: token ids int64 [L], first position wanted, and how many."""

    token_ids: torch.Tensor
    first: int
    count: int


class ToyTeacher:
    """A teacher that is no model: its logits depend on a token and, less, on all before it."""

    _WIDTH = 32

    def __init__(self, profile: ToyProfile | None = None) -> None:
        self.profile = profile or ToyProfile()
        generator = torch.Generator().manual_seed(20)
        size = (self.profile.head_rows, self._WIDTH)
        self._embeddings = torch.randn(size, generator=generator)
        self._head = torch.randn(size, generator=generator)

    def logits(self, rows: Sequence[ToyRow]) -> Iterator[torch.Tensor]:
        """Yield the logits of each row's wanted positions, fp32 [count, head_rows]."""
        for row in rows:
            tokens = self._embeddings[row.token_ids]
            before = tokens.cumsum(0) - tokens
            hidden = torch.tanh(tokens + 0.1 * before)
            yield hidden[row.first : row.first + row.count] @ self._head.T


def toy_teacher(config: object) -> ToyTeacher:
    """Make the toy; what ``serve`` names as its engine."""
    del config
    torch.set_num_threads(1)  # more would only wait for one another
    return ToyTeacher()
