"""What the service's stages stand on: a server, a client, publishers and students.

The server, the publisher (the stage's own process) and each student are processes of their own,
with default settings; nothing is pretended but, on the fake driver, the device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests import forked
from tests.gpu.rig import MIB, ROOT, Failed, Numbers, Peer, Rig
from tests.gpu.teacher import ROWS, profile_of, tokens_of, write

import teacher_logits_client as tl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

MODULE = "tests.gpu.student"
PATIENCE_SECONDS = 60.0
_SERVE = "import sys; from teacher_logits_server.cli import serve; sys.exit(serve(sys.argv[1:]))"
"""The command ``serve`` also where the project lies on the path and is not installed."""
STEPS_HELD = 3


class Server:
    """A server of registered steps."""

    def __init__(self, address: str, process: subprocess.Popen[bytes]) -> None:
        self.address = address
        self._process = process

    def has_driver(self) -> bool:
        """Say whether the server's process has the driver's library loaded."""
        return "libcuda" in Path(f"/proc/{self._process.pid}/maps").read_text(errors="replace")

    def stop(self) -> int:
        """End it in good order; return its exit code."""
        self._process.terminate()
        return self._process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        """End it as the kernel would."""
        self._process.kill()
        self._process.wait()


def serving_engine(rig: Rig, engine: str, *flags: str) -> AbstractContextManager[Server]:
    """Run a server with a teacher of its own on the device; a pretended one writes late."""
    given = (f"--engine={engine}", f"--device=cuda:{rig.device.ordinal}", *flags)
    if rig.is_fake:
        command = ("-m", "tests.fake_cuda.serve", rig.driver, "late")
        return serving(*command, *given, forks=True)
    return serving("-c", _SERVE, *given)


@contextmanager
def serving(*command: str, forks: bool = False) -> Iterator[Server]:
    """Run a server on a Unix socket; by default one that has no teacher of its own."""
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        reading, writing = os.pipe()
        flags = ["--listen", f"unix:{folder}/s", "--broker", f"{folder}/b", "--log-level", "error"]
        popen: type[subprocess.Popen[bytes]] = forked.Popen if forks else subprocess.Popen
        process = popen(
            [sys.executable, *(command or ("-c", _SERVE)), *flags, "--ready-fd", str(writing)],
            cwd=ROOT,
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(writing)
        try:
            with open(reading, encoding="utf-8") as ready:
                line = ready.readline()
            if not line:
                raise Failed(f"the server ended with {process.wait()} before it was ready")
            yield Server(str(json.loads(line)["address"]), process)
        finally:
            process.kill()
            process.wait()


class Service:
    """A server, a client of this process, and what is opened with them; ends with the stack."""

    def __init__(self, rig: Rig, stack: ExitStack) -> None:
        self.rig = rig
        self._stack = stack
        self.server = stack.enter_context(serving(forks=rig.is_fake))
        self.client = stack.enter_context(tl.connect(self.server.address, device_memory=rig.memory))

    def publisher(self, name: str, size_bytes: int, *, on_device: bool = True) -> tl.Publisher:
        """Open a teacher of payloads of about a size, on the device."""
        slab = STEPS_HELD * (size_bytes + 2 * MIB)
        return self._stack.enter_context(
            self.client.open_publisher(
                profile_of(name, tokens_of(size_bytes)),
                device=self.rig.device.uuid if on_device else None,
                pool_size_bytes=slab,
                slab_size_bytes=slab,
            )
        )

    def student(self, python: str = sys.executable) -> Peer:
        """Start a student's process."""
        return self._stack.enter_context(self.rig.peer(MODULE, self.server.address, python=python))


@contextmanager
def service(rig: Rig) -> Iterator[Service]:
    """Run one."""
    with ExitStack() as stack:
        yield Service(rig, stack)


def publish(publisher: tl.Publisher, step: int, size_bytes: int) -> int:
    """Publish a step; return its bytes."""
    with publisher.reserve(step, lengths=[tokens_of(size_bytes)] * ROWS) as draft:
        write(draft, step)
        return draft.payload.size_bytes


def join(student: Peer, teacher: str, **more: object) -> None:
    """Have a student admitted over CUDA IPC."""
    said = student.ask("open", teacher=teacher, **more)
    if said["transport"] != "cuda_ipc":
        raise Failed("the session did not come to cuda_ipc", **said)


def check_step(said: Numbers, rig: Rig) -> None:
    """Refuse a step that is not as it was written, or not on the device."""
    if said.get("wrong"):
        raise Failed(f"{said['wrong']} entries of a step are not its own", **said)
    if said["transport"] != ["cuda_ipc"] or said["device"] != str(rig.torch_device):
        raise Failed("a step did not come over the device", **said)
