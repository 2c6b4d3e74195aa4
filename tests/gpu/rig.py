"""What the stages of the GPU check stand on: a driver, sizes that fit, and other processes.

A stage is a function that takes a ``Rig`` and returns its numbers; ``Failed`` and ``Skipped``
say why it has none. Each runs in a process of its own, since a device error may spoil a process
for whatever comes after, and has a share of the check's seconds. What the driver is, is said by one
word to every process: ``cuda``, or a pretended node's ``Spec`` as JSON, which is how the check
itself is tested where there is no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tests import forked
from tests.gpu.clock import Clock

from teacher_logits.cuda_memory import find_driver
from teacher_logits.devices.views import DeviceView, device_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from teacher_logits.device_memory import Device, DeviceMemory

ROOT = Path(__file__).parents[2]
CUDA = "cuda"
MIB = 1 << 20
GIB = 1 << 30

Numbers = dict[str, object]


class Failed(Exception):
    """A stage found what must not be."""

    def __init__(self, message: str, **numbers: object) -> None:
        super().__init__(message)
        self.numbers = numbers


class Skipped(Exception):
    """A stage cannot be run here; the message says what it would take."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage: its function, and its share of the check's seconds (``clock``)."""

    run: Callable[[Rig], Numbers]
    share: float
    #: Whether a pretended driver carries it.
    on_fake: bool = True

    @property
    def name(self) -> str:
        """What it is called in the report."""
        return self.run.__name__


def memory_of(driver: str) -> DeviceMemory | None:
    """Return the driver that a word stands for."""
    if driver == CUDA:
        return find_driver()
    from tests.fake_cuda.spec import Spec

    return Spec.loads(driver).memory()


@dataclass(frozen=True, kw_only=True)
class Rig:
    """What a stage has: the driver, one device of it, and how much memory to use.

    ``other_pythons`` are interpreters with another torch (T16), as the command line gave them;
    ``clock`` says how long the stage may take.
    """

    driver: str
    memory: DeviceMemory
    device: Device
    small_bytes: int
    large_bytes: int
    rounds: int
    other_pythons: tuple[str, ...] = ()
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def of(
        cls,
        driver: str,
        *,
        ordinal: int,
        other_pythons: tuple[str, ...],
        clock: Clock | None = None,
    ) -> Rig | None:
        """Make it; None where there is no such device."""
        memory = memory_of(driver)
        if memory is None or ordinal >= len(memory.devices()):
            return None
        device = memory.devices()[ordinal]
        if driver != CUDA:
            small, large, rounds = 1 * MIB, 16 * MIB, 3
        else:
            free, _ = torch.cuda.mem_get_info(ordinal)
            # A publisher holds up to three steps of the large size, and checks take room, too.
            small, large, rounds = 1 * MIB, min(4 * GIB, free // 6 // MIB * MIB), 20
        return cls(
            driver=driver,
            memory=memory,
            device=device,
            small_bytes=small,
            large_bytes=large,
            rounds=rounds,
            other_pythons=other_pythons,
            clock=clock or Clock(),
        )

    @property
    def is_fake(self) -> bool:
        """Whether there is no device behind the driver."""
        return self.driver != CUDA

    @property
    def torch_device(self) -> torch.device:
        """Where tensors over device memory are."""
        return DeviceView(0, 0, device=self.memory.view_device(self.device)).torch_device

    def view(self, address: int, size_bytes: int) -> DeviceView:
        """Return a view of device memory."""
        return DeviceView(address, size_bytes, device=self.memory.view_device(self.device))

    def words(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return device memory as int32."""
        return device_tensor(
            self.view(address, size_bytes), dtype=torch.int32, shape=(size_bytes // 4,)
        )

    def free_bytes(self) -> int:
        """Return how much device memory is free; 0 where nobody knows."""
        return 0 if self.is_fake else torch.cuda.mem_get_info(self.device.ordinal)[0]

    @contextmanager
    def peer(self, module: str, *arguments: str, python: str = sys.executable) -> Iterator[Peer]:
        """Run another process of the check: ``python -m module DRIVER ORDINAL arguments``."""
        command = [python, "-m", module, self.driver, str(self.device.ordinal), *arguments]
        peer = Peer(command, forks=self.is_fake and python == sys.executable)
        try:
            yield peer
        finally:
            peer.end()


class Peer:
    """Another process, which answers each line of JSON with one.

    It is forked only over the fake: no process that has to do with a real driver should be.
    """

    def __init__(self, command: list[str], *, forks: bool = False) -> None:
        popen: type[subprocess.Popen[str]] = forked.Popen if forks else subprocess.Popen
        self._command = command
        self._process = popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, call: str, **given: object) -> Numbers:
        """Have it do something and wait for the answer.

        Raises:
            Failed: it could not, or has ended.
        """
        self.start(call, **given)
        return self.answer()

    def start(self, call: str, **given: object) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": call, **given}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Numbers:
        """Wait for what came of it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"{' '.join(self._command[:3])} ended with {self._process.wait()}")
        said: Numbers = json.loads(line)
        if "failed" in said:
            raise Failed(str(said["failed"]))
        return said

    def kill(self) -> None:
        """End it as the kernel would."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """End it, kindly first."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


def answer_lines(calls: Mapping[str, Callable[..., Numbers]]) -> None:
    """Do what standard input says, a line each, until it ends. An error is an answer, too."""
    for line in sys.stdin:
        given = json.loads(line)
        try:
            said = calls[given.pop("call")](**given)
        except Exception as error:
            said = {"failed": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
            number = getattr(error, "number", None)
            if number is not None:
                said = {"refused": number, "name": getattr(error, "name", "")}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def pid_namespace() -> int:
    """Return the number of this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino
