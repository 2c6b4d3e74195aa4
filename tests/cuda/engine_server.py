"""A server in a process of its own whose engine writes to a pretended device."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests import forked

from teacher_logits_client.testing import ServerProcess, toy_teacher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fake_cuda.spec import Spec

PATIENCE_SECONDS = 60.0
ROOT = Path(__file__).parents[2]
TOY = f"{toy_teacher.__module__}:{toy_teacher.__name__}"


class DidNotStart(Exception):
    """The server ended before it was ready: what it said, and its exit code."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"{code}: {said}")
        self.code = code
        self.said = said


@contextmanager
def serve_engine(spec: Spec, *, late: bool = False, **settings: object) -> Iterator[ServerProcess]:
    """Serve the toy teacher with a driver that a spec describes.

    Raises:
        DidNotStart: it refused to.
    """
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        log, reading, writing = Path(folder, "log"), *os.pipe()
        given = {
            "listen": f"unix:{folder}/s",
            "ready_fd": writing,
            "engine": TOY,
            "device": "cuda:0",
            **settings,
        }
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        with log.open("wb") as output:
            process: subprocess.Popen[bytes] = forked.Popen(
                [
                    *(sys.executable, "-m", "tests.fake_cuda.serve"),
                    *(spec.dumps(), "late" if late else "now"),
                    *flags,
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
            )
        os.close(writing)
        try:
            yield ServerProcess(process, _await_ready(process, reading, log), log)
        finally:
            os.close(reading)
            process.kill()
            process.wait()


def _await_ready(process: subprocess.Popen[bytes], reading: int, log: Path) -> dict[str, object]:
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([reading], [], [], PATIENCE_SECONDS)
        assert ready, f"the server is not ready: {log.read_text()}"
        part = os.read(reading, 65536)
        if not part:
            raise DidNotStart(process.wait(PATIENCE_SECONDS), log.read_text())
        line += part
    found: dict[str, object] = json.loads(line)
    return found
