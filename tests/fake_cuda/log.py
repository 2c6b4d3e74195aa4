"""What every process of a pretended node asked its driver: one line of JSON a call, a file each.

A line is written with the call, so that it is there although the process is killed right after.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from teacher_logits.device_memory import PROBE_BYTES, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call: ``error`` is 0, or the number that it was refused with.

    ``serial`` is the allocation's, the same in every process and never used again. ``fault``
    says what the call did that CUDA leaves undefined.
    """

    pid: int
    call: str
    uuid: str = ""
    serial: str = ""
    address: int = 0
    size_bytes: int = 0
    error: int = 0
    fault: str = ""


class Log:
    """One process's calls: in memory, and in its file of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.operations: list[Operation] = []

    @contextlib.contextmanager
    def asked(
        self, call: str, *, uuid: str, address: int = 0, size_bytes: int = 0
    ) -> Iterator[Callable[[bytes, int], None]]:
        """Write a call when it is over; what is yielded adds the allocation to it."""
        found: dict[str, str | int] = {"serial": "", "address": address}

        def note(serial: bytes, address: int) -> None:
            found.update(serial=serial.hex(), address=address)

        error = 0
        try:
            yield note
        except DeviceError as refused:
            error = refused.number
            raise
        finally:
            self.note(call, uuid=uuid, size_bytes=size_bytes, error=error, **found)

    def fault(self, call: str, what: str, *, serial: bytes = b"") -> None:
        """Write down what a call did that it must not."""
        self.note(call, fault=what, serial=serial.hex())

    def note(self, call: str, **about: str | int) -> None:
        """Write a line."""
        operation = Operation(pid=os.getpid(), call=call, **about)  # type: ignore[arg-type]
        self.operations.append(operation)
        line = json.dumps(asdict(operation)) + "\n"
        path = self.folder / f"{operation.pid}.jsonl"
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


def read_log(folder: Path) -> list[Operation]:
    """Return what all processes of a node asked, each one's calls in their order.

    They may be writing: a line without its end is not there yet.
    """
    return [
        Operation(**json.loads(line))
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().split("\n")[:-1]
    ]


def faults(operations: Sequence[Operation]) -> list[str]:
    """Return what was done that CUDA leaves undefined."""
    return [f"{each.pid} {each.call}: {each.fault}" for each in operations if each.fault]


def done(operations: Sequence[Operation], call: str) -> list[Operation]:
    """Return the calls of a name that were not refused."""
    return [each for each in operations if each.call == call and not each.error and not each.fault]


def still_open(operations: Sequence[Operation]) -> Counter[tuple[int, str]]:
    """Return (pid, serial) with how many opens of it have no close."""
    count: Counter[tuple[int, str]] = Counter()
    count.update((each.pid, each.serial) for each in done(operations, "open"))
    count.subtract((each.pid, each.serial) for each in done(operations, "close"))
    return +count


def still_allocated(operations: Sequence[Operation]) -> set[tuple[int, str]]:
    """Return (pid, serial) of what was allocated and not freed."""
    return {(each.pid, each.serial) for each in done(operations, "allocate")} - {
        (each.pid, each.serial) for each in done(operations, "free")
    }


def leaked(operations: Sequence[Operation]) -> set[tuple[int, str]]:
    """Return what is still allocated, but for probes: each process keeps its own to its end."""
    return still_allocated(operations) - probes(operations)


def holders(operations: Sequence[Operation]) -> set[int]:
    """Return the processes that have memory open, or allocated but for probes."""
    return {pid for pid, _ in (*still_open(operations), *leaked(operations))}


def probes(operations: Sequence[Operation]) -> set[tuple[int, str]]:
    """Return (pid, serial) of what was allocated for readers to open on trial."""
    allocated = done(operations, "allocate")
    return {(each.pid, each.serial) for each in allocated if each.size_bytes == PROBE_BYTES}
