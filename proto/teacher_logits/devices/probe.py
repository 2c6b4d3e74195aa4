"""The probe of a writer with device memory: readers prove by it that they can open what it has.

A probe is a small allocation of its own with 32 bytes that only a process which really shares the
device's memory can read: a reader opens it once at its handshake, before any payload.

Promises: a process has one probe a device, whichever of its writers shows it, and keeps it to its
end. A trial open may hang in a reader's driver for any time, and no lock says so, since a reader
has nothing of the writer's to lock yet. To free the memory meanwhile would be undefined
(``left_over``), so it never is.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from teacher_logits.device_memory import PROBE_BYTES, DeviceError

if TYPE_CHECKING:
    from teacher_logits.device_memory import Device, DeviceMemory, ExportedMemory

_Place: TypeAlias = "tuple[int, str]"
"""A process and a device's UUID: a fork has no share in its parent's memory."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A probe, and the driver and device that it was made with.

    ``challenge`` is what lies where it begins.
    """

    memory: DeviceMemory
    device: Device
    challenge: bytes
    exported: ExportedMemory


@dataclass(frozen=True, kw_only=True)
class _Kept:
    address: int
    challenge: bytes
    exported: ExportedMemory


_kept: weakref.WeakKeyDictionary[DeviceMemory, dict[_Place, _Kept]] = weakref.WeakKeyDictionary()
# Guards the table; the driver is never called under it.
_lock = threading.Lock()


def probe_of(memory: DeviceMemory, device: Device) -> Probe:
    """Return this process's probe of a device, which the first call allocates and exports.

    Raises:
        DeviceError: the driver refuses; nothing is left then.
    """
    place = (os.getpid(), device.uuid)
    with _lock:
        kept = _kept.setdefault(memory, {}).get(place)
    if kept is None:
        made = _make(memory, device)
        with _lock:
            kept = _kept[memory].setdefault(place, made)
        if kept is not made:  # another thread was quicker, and nobody was shown ours
            memory.free(made.address, device=device)
    return Probe(memory=memory, device=device, challenge=kept.challenge, exported=kept.exported)


def _make(memory: DeviceMemory, device: Device) -> _Kept:
    challenge = secrets.token_bytes(PROBE_BYTES)
    address = memory.allocate(PROBE_BYTES, device=device)
    try:
        memory.copy_to_device(address, memoryview(challenge), device=device)
        return _Kept(address=address, challenge=challenge, exported=memory.export(address))
    except BaseException:
        with suppress(DeviceError):  # what the driver said first is what matters
            memory.free(address, device=device)
        raise
