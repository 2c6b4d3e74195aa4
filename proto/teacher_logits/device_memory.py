"""Device memory as the service uses it: one small interface, whoever drives the device.

A slab of device memory is plain memory of one writer. Its writer exports it once, each reader
opens it once a session and device, and closes it when nothing lies in it any more. What crosses
the wire is the driver's own 64 bytes, the device's UUID and plain numbers; never an ordinal, since
ordinals are a process's own, and never a structure of torch's.

    writer                                   reader, another process of the node
    allocate -> address                      open(handle) -> address of the whole allocation
    export(address) -> handle, base offset   views at base offset + extent + column
    synchronise the stream, then seal        events behind the last read, then release
    free, once nobody has it open            close

``CudaMemory`` (``cuda_memory``) is the interface over the CUDA driver. The tests have another,
whose memory is a memfd and which enforces CUDA's rules; every caller takes either.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import TransportFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.errors import Fact

HANDLE_BYTES = 64
"""Bytes of a legacy IPC handle (CUDA driver API, ``CUipcMemHandle``)."""

PROBE_BYTES = 32
"""Random bytes that a writer puts where its probe begins, and a reader reads back."""

MAX_ALLOCATION_BYTES = 1 << 46


class MemoryKind(enum.Enum):
    """Where an address points, by the driver's own word; and whether it can be exported."""

    PLAIN = "plain device memory"
    POOL = "a stream-ordered memory pool (cudaMallocAsync)"
    VIRTUAL = "virtual memory (cuMemCreate), as of expandable segments"
    MANAGED = "managed memory"
    HOST = "host memory"
    UNKNOWN = "memory that the driver does not know"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device that this process sees. ``uuid`` is what other processes know it by.

    ``ordinal`` is this process's number for it. ``uuid`` as the driver's tools print it,
    ``GPU-...`` or ``MIG-...``.
    """

    ordinal: int
    uuid: str
    name: str
    is_mig: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportedMemory:
    """What another process needs to read an allocation.

    A handle names the whole allocation that an address lies in: ``base_offset_bytes`` is from its
    first byte to the address that was exported, ``allocation_bytes`` its size.
    """

    handle: bytes
    device_uuid: str
    base_offset_bytes: int
    allocation_bytes: int


@dataclass(frozen=True, kw_only=True)
class DeviceMemoryPart:
    """The device's part of a slab, as it crosses the wire.

    ``size_bytes`` are the slab's, from ``memory.base_offset_bytes`` on: what lies around them in
    the allocation is none of it.
    """

    memory: ExportedMemory
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class DeviceProbe:
    """Device memory of a writer's that a reader opens on trial, and where its writer lives.

    The challenge lies in its first ``PROBE_BYTES`` bytes. ``writer_id`` is the server's to fill
    in; ``pid_namespace`` is the inode number of the writer's PID namespace, and it and ``host`` are
    for messages only.
    """

    writer_id: str
    memory: ExportedMemory
    pid_namespace: int = 0
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What the driver says of an address: its kind, device and allocation."""

    kind: MemoryKind
    device: Device | None
    base: int
    allocation_bytes: int


class DeviceError(TransportFailure):
    """The driver refused a call: ``number`` and ``name`` are its own, as 201 and its name."""

    def __init__(self, message: str, *, number: int, name: str, call: str) -> None:
        facts: dict[str, Fact] = {"number": number, "name": name, "call": call}
        super().__init__(message, facts=facts)
        self.number = number
        self.name = name
        self.call = call


class Event(Protocol):
    """A point in a stream's work."""

    def is_past(self) -> bool:
        """Say whether all work before the point is done. Never waits."""

    def wait(self) -> None:
        """Wait on the host until it is."""


class DeviceMemory(Protocol):
    """What the service asks of a driver. Safe to call from any thread.

    Every call raises ``DeviceError`` where the driver refuses, with the driver's own number
    and name. No call changes which device is current for its caller.
    """

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that this process sees."""

    def allocate(self, size_bytes: int, *, device: Device) -> int:
        """Return the address of new plain memory, which can be exported."""

    def free(self, address: int, *, device: Device) -> None:
        """Give memory back. To do so while a reader has it open is the caller's fault."""

    def locate(self, address: int) -> Whereabouts:
        """Return what lies at an address."""

    def export(self, address: int) -> ExportedMemory:
        """Return what another process needs to read the allocation that an address lies in."""

    def open(self, handle: bytes, *, device: Device) -> int:
        """Return the address of an exported allocation's first byte, in this process.

        A handle that is open already gives the same address and counts once more.
        """

    def close(self, address: int, *, device: Device) -> None:
        """Undo one ``open``."""

    def copy_to_host(self, target: memoryview, address: int, *, device: Device) -> None:
        """Fill ``target`` from device memory, and return when it is filled."""

    def copy_to_device(self, address: int, source: memoryview, *, device: Device) -> None:
        """Write ``source`` to device memory, and return when it is written."""

    def record(self, *, device: Device) -> Event:
        """Return the point behind all work in the caller's current stream of a device."""

    def synchronise(self, *, device: Device) -> None:
        """Wait on the host for all work that this process has given a device."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Let devices read host memory without a staging copy; its map may be read-only."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""

    def view_device(self, device: Device) -> tuple[int, int]:
        """Return the DLPack device, (type, number), under which tensors view its memory."""


def find_device(name: str, devices: Sequence[Device]) -> Device | None:
    """Return the one that ``cuda``, which is the first, ``cuda:1``, an ordinal or a UUID names."""
    name = name.removeprefix("cuda:")
    wanted = "0" if name == "cuda" else name
    return next((each for each in devices if wanted in (each.uuid, str(each.ordinal))), None)


def device_names(devices: Sequence[Device]) -> str:
    """Return what a message says of the devices that there are."""
    return ", ".join(f"cuda:{each.ordinal} ({each.uuid})" for each in devices) or "none"
