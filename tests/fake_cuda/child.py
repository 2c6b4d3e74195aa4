"""A driver in a process of its own, which does what its standard input says. It is no test.

python -m tests.fake_cuda.child SPEC, then a line of JSON a call:

    {"call": "open", "args": ["<hex>"], "device": 0}   ->   {"value": 1234} or {"refused": 201}

Bytes go as hex. Beside the driver's calls: ``read`` and ``write`` of mapped bytes, as a kernel
would, and ``delay``, a write that is given to the stream.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fake_cuda.spec import Spec

from teacher_logits.device_memory import DeviceError, Event, ExportedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 30


class Refused(Exception):
    """A child's driver refused a call."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Child:
    """A child's driver, as the test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        """The process; what a wrapper such as unshare starts has another."""
        return self.process.pid

    def start(self, call: str, *args: int | str | bytes, device: int | None = 0) -> None:
        """Ask without waiting for the answer."""
        plain = [each.hex() if isinstance(each, bytes) else each for each in args]
        assert self.process.stdin is not None
        line = json.dumps({"call": call, "args": plain, "device": device})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        """Wait for an answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(PATIENCE_SECONDS)}"
        said = json.loads(line)
        if "refused" in said:
            raise Refused(said["refused"])
        value: object = said["value"]
        return value

    def ask(self, call: str, *args: int | str | bytes, device: int | None = 0) -> object:
        """Ask and wait."""
        self.start(call, *args, device=device)
        return self.answer()

    def number(self, call: str, *args: int | str | bytes, device: int | None = 0) -> int:
        """Ask for a number."""
        value = self.ask(call, *args, device=device)
        assert isinstance(value, int)
        return value

    def export(self, address: int) -> ExportedMemory:
        """Export an address."""
        value = self.ask("export", address, device=None)
        assert isinstance(value, dict)
        return ExportedMemory(**{**value, "handle": bytes.fromhex(value["handle"])})

    def read(self, address: int, size_bytes: int) -> bytes:
        """Read mapped bytes."""
        return bytes.fromhex(str(self.ask("read", address, size_bytes, device=None)))

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)


@contextmanager
def child(spec: Spec, *, wrapper: Sequence[str] = ()) -> Iterator[Child]:
    """Run one."""
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-m", "tests.fake_cuda.child", spec.dumps()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.communicate()


def main(spec: Spec) -> None:
    """Do what is asked for."""
    fake = spec.fake()
    memory = spec.around(fake)
    events: list[Event] = []

    def delay(address: int, written: str, *, device: object) -> None:
        fake.enqueue(lambda: write(address, written), device=device)  # type: ignore[arg-type]

    def record(*, device: object) -> int:
        events.append(memory.record(device=device))  # type: ignore[arg-type]
        return len(events) - 1

    def copy_to_host(address: int, size_bytes: int, *, device: object) -> str:
        target = bytearray(size_bytes)
        memory.copy_to_host(memoryview(target), address, device=device)  # type: ignore[arg-type]
        return target.hex()

    def copy_to_device(address: int, written: str, *, device: object) -> None:
        source = memoryview(bytes.fromhex(written))
        memory.copy_to_device(address, source, device=device)  # type: ignore[arg-type]

    calls: dict[str, Callable[..., object]] = {
        "read": lambda address, size_bytes: ctypes.string_at(address, size_bytes).hex(),
        "write": write,
        "delay": delay,
        "record": record,
        "copy_to_host": copy_to_host,
        "copy_to_device": copy_to_device,
        "wait": lambda number: events[number].wait(),
        "is_past": lambda number: events[number].is_past(),
        "export": lambda address: dataclasses.asdict(memory.export(address)),
        "open": lambda handle, device: memory.open(bytes.fromhex(handle), device=device),
        "kind_of": lambda address: memory.locate(address).kind.name,
    }
    for line in sys.stdin:
        asked = json.loads(line)
        call = calls.get(asked["call"]) or getattr(memory, asked["call"])
        device = asked["device"]
        given = {} if device is None else {"device": memory.devices()[device]}
        try:
            value = call(*asked["args"], **given)
        except DeviceError as error:
            say({"refused": error.number})
        else:
            say({"value": value})


def write(address: int, written: str) -> None:
    """Write mapped bytes."""
    ctypes.memmove(address, bytes.fromhex(written), len(written) // 2)


def say(what: dict[str, object]) -> None:
    """Answer."""
    packed = json.dumps(what, default=lambda each: each.hex() if isinstance(each, bytes) else None)
    sys.stdout.write(packed + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Spec.loads(sys.argv[1]))
