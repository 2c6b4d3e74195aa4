"""Faults around a driver: calls that fail, hang until they are let go, or give other bytes.

    {"call": "open", "error": 101}                       every open is refused
    {"call": "open", "error": 999, "after": 2, "times": 1}   the third one alone
    {"call": "open", "hang": "/folder/gate"}             waits for `let_go`, then works
    {"call": "copy_to_host", "flip": true}               what is read differs in its first byte

Faults are told to child processes as JSON (``spec``). A gate is a FIFO: to wait there costs
nothing, and a process that waits can be killed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.fake_cuda.numbers import refusal

if TYPE_CHECKING:
    from pathlib import Path

    from teacher_logits.device_memory import (
        Device,
        DeviceMemory,
        Event,
        ExportedMemory,
        Whereabouts,
    )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with calls of a name: not with the first ``after``, then ``times`` times."""

    call: str
    error: int = 0
    hang: str = ""
    flip: bool = False
    after: int = 0
    times: int | None = None


def gate(path: Path) -> str:
    """Make a gate, shut; return what a fault's ``hang`` is."""
    os.mkfifo(path)
    return str(path)


def let_go(path: str) -> None:
    """Let one caller through that waits at a gate; wait for it to come if none does yet."""
    os.close(os.open(path, os.O_WRONLY))


def is_held(path: str) -> bool:
    """Say whether a caller waits at a gate, or has waited there."""
    return os.path.exists(_mark(path))


def _mark(path: str) -> str:
    return f"{path}.held"


class FaultyMemory:
    """A ``DeviceMemory`` that does what another does, but for its faults."""

    def __init__(self, inner: DeviceMemory, faults: tuple[Fault, ...]) -> None:
        self.inner = inner
        self._faults = faults
        self._lock = threading.Lock()
        self._asked: dict[str, int] = {}

    def devices(self) -> tuple[Device, ...]:
        """Pass on."""
        self._disturb("devices")
        return self.inner.devices()

    def allocate(self, size_bytes: int, *, device: Device) -> int:
        """Pass on."""
        self._disturb("allocate")
        return self.inner.allocate(size_bytes, device=device)

    def free(self, address: int, *, device: Device) -> None:
        """Pass on."""
        self._disturb("free")
        self.inner.free(address, device=device)

    def locate(self, address: int) -> Whereabouts:
        """Pass on."""
        self._disturb("locate")
        return self.inner.locate(address)

    def export(self, address: int) -> ExportedMemory:
        """Pass on."""
        self._disturb("export")
        return self.inner.export(address)

    def open(self, handle: bytes, *, device: Device) -> int:
        """Pass on."""
        self._disturb("open")
        return self.inner.open(handle, device=device)

    def close(self, address: int, *, device: Device) -> None:
        """Pass on."""
        self._disturb("close")
        self.inner.close(address, device=device)

    def copy_to_host(self, target: memoryview, address: int, *, device: Device) -> None:
        """Pass on; a fault may change the first byte of what came."""
        fault = self._disturb("copy_to_host")
        self.inner.copy_to_host(target, address, device=device)
        if fault and fault.flip and target.nbytes:
            target.cast("B")[0] ^= 0xFF

    def copy_to_device(self, address: int, source: memoryview, *, device: Device) -> None:
        """Pass on."""
        self._disturb("copy_to_device")
        self.inner.copy_to_device(address, source, device=device)

    def record(self, *, device: Device) -> Event:
        """Pass on."""
        self._disturb("record")
        return self.inner.record(device=device)

    def synchronise(self, *, device: Device) -> None:
        """Pass on."""
        self._disturb("synchronise")
        self.inner.synchronise(device=device)

    def pin(self, address: int, size_bytes: int) -> None:
        """Pass on."""
        self._disturb("pin")
        self.inner.pin(address, size_bytes)

    def unpin(self, address: int) -> None:
        """Pass on."""
        self._disturb("unpin")
        self.inner.unpin(address)

    def view_device(self, device: Device) -> tuple[int, int]:
        """Pass on."""
        return self.inner.view_device(device)

    def _disturb(self, call: str) -> Fault | None:
        """Do a call's fault, if it has one this time."""
        with self._lock:
            count = self._asked.get(call, 0)
            self._asked[call] = count + 1
        for fault in self._faults:
            last = None if fault.times is None else fault.after + fault.times
            if fault.call != call or count < fault.after or (last is not None and count >= last):
                continue
            if fault.hang:
                os.close(os.open(_mark(fault.hang), os.O_CREAT | os.O_WRONLY, 0o600))
                os.close(os.open(fault.hang, os.O_RDONLY))
            if fault.error:
                raise refusal(fault.error, call, "by a fault of the test's")
            return fault
        return None
