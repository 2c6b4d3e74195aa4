"""The devices that this process sees, and the context that each call to the driver runs in.

    call of ours   push the device's primary context -> call the driver -> pop it

A device's primary context is the one that torch uses. It is made at the device's first use here
and not before, and kept until the process ends: it costs some hundred MiB of the device.

Promises: whatever was current for a caller is so again when the call returns. Contexts do not
survive a fork; a child is refused, and told to be spawned. Devices are known by their UUIDs, as
``nvidia-smi -L`` prints them.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import TYPE_CHECKING

import torch

from teacher_logits.cuda_memory import calls as cuda_calls
from teacher_logits.cuda_memory.calls import check, refused
from teacher_logits.device_memory import Device, DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.cuda_memory.calls import DriverCalls


class Contexts:
    """One process's devices and their contexts. Any thread may use it."""

    def __init__(self, calls: DriverCalls) -> None:
        """Initialise the driver and look up its devices; makes no context.

        Raises:
            DeviceError: the driver does not start, as its number says.
        """
        self.calls = calls
        self._pid = os.getpid()
        check(calls, calls.cuInit(), "cuInit")
        result, count = calls.cuDeviceGetCount()
        check(calls, result, "cuDeviceGetCount")
        self._numbers = tuple(self._number(ordinal) for ordinal in range(count))
        self.devices = tuple(self._describe(ordinal) for ordinal in range(count))
        # Each change is one step of the dictionary, and so needs no lock: a finaliser that closes a
        # handle may come in anywhere, and would wait for its own thread.
        self._made: dict[int, int] = {}

    @contextlib.contextmanager
    def on(self, device: Device, call: str) -> Iterator[DriverCalls]:
        """Make a device's context current in this thread for the block.

        Raises:
            DeviceError: in a forked child, or for a device that is none of this process's.
        """
        self.check_process(call)
        if device not in self.devices:
            call = f"{call} on {device.uuid}, which is no device of this process"
            raise refused(self.calls, cuda_calls.INVALID_DEVICE, call)
        check(self.calls, self.calls.cuCtxPushCurrent(self._context(device)), "cuCtxPushCurrent")
        popped = cuda_calls.SUCCESS
        try:
            yield self.calls
        finally:
            popped, _ = self.calls.cuCtxPopCurrent()
        check(self.calls, popped, "cuCtxPopCurrent")

    def check_process(self, call: str) -> None:
        """Refuse a forked child.

        Raises:
            DeviceError: as the driver itself would say it, but before anything hangs.
        """
        if os.getpid() != self._pid:
            name = "CUDA_ERROR_NOT_INITIALIZED"
            raise DeviceError(
                f"{call}: CUDA was started in process {self._pid} and does not survive a fork into "
                f"{os.getpid()}: start workers with multiprocessing's spawn or forkserver",
                number=cuda_calls.NOT_INITIALIZED,
                name=name,
                call=call,
            )

    def at(self, ordinal: int) -> Device | None:
        """Return the device of a number; None where there is none."""
        return self.devices[ordinal] if 0 <= ordinal < len(self.devices) else None

    def any_device(self) -> Device:
        """Return a device for what concerns none: one that has a context, if there is one."""
        ordinal = next(iter(tuple(self._made)), 0)
        if not self._made and torch.cuda.is_initialized():
            ordinal = torch.cuda.current_device()
        return self.devices[ordinal]

    def attribute(self, attribute: int, device: Device) -> int:
        """Return a device's attribute; 0 where the driver does not know it."""
        result, value = self.calls.cuDeviceGetAttribute(attribute, self._numbers[device.ordinal])
        return value if result == cuda_calls.SUCCESS else 0

    def _context(self, device: Device) -> int:
        made = self._made.get(device.ordinal)
        if made is not None:
            return made
        number = self._numbers[device.ordinal]
        result, context = self.calls.cuDevicePrimaryCtxRetain(number)
        check(self.calls, result, "cuDevicePrimaryCtxRetain")
        # Where two threads came at once, the driver has counted both: harmless.
        return self._made.setdefault(device.ordinal, context)

    def _number(self, ordinal: int) -> int:
        result, number = self.calls.cuDeviceGet(ordinal)
        check(self.calls, result, "cuDeviceGet")
        return number

    def _describe(self, ordinal: int) -> Device:
        result, name = self.calls.cuDeviceGetName(self._numbers[ordinal])
        check(self.calls, result, "cuDeviceGetName")
        result, raw = self.calls.cuDeviceGetUuid(self._numbers[ordinal])
        check(self.calls, result, "cuDeviceGetUuid")
        # A part of a device is named after its kind, as in "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        # and the UUID is then the part's.
        is_mig = "MIG" in name.split()
        kind = "MIG" if is_mig else "GPU"
        return Device(
            ordinal=ordinal, uuid=f"{kind}-{uuid.UUID(bytes=raw)}", name=name, is_mig=is_mig
        )
