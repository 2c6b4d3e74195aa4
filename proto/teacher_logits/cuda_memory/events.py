"""Points in the work of a stream: what a writer waits for before it lets readers in.

The stream is the caller's current one, as torch has it for this thread and device; where torch
has not started CUDA, nobody can have given it another than the default stream.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

import torch

from teacher_logits.cuda_memory import calls as cuda_calls
from teacher_logits.cuda_memory.calls import check

if TYPE_CHECKING:
    from teacher_logits.cuda_memory.calls import DriverCalls
    from teacher_logits.cuda_memory.contexts import Contexts
    from teacher_logits.device_memory import Device


class CudaEvent:
    """A point in a stream's work; destroyed with this object."""

    def __init__(self, contexts: Contexts, device: Device, event: int) -> None:
        self._contexts = contexts
        self._device = device
        self._event = event
        weakref.finalize(self, _destroy, contexts.calls, event, os.getpid()).atexit = False

    def is_past(self) -> bool:
        """Say whether all work before the point is done. Never waits."""
        with self._contexts.on(self._device, "cuEventQuery") as calls:
            result = calls.cuEventQuery(self._event)
        if result == cuda_calls.NOT_READY:
            return False
        check(calls, result, "cuEventQuery")
        return True

    def wait(self) -> None:
        """Wait on the host until it is."""
        with self._contexts.on(self._device, "cuEventSynchronize") as calls:
            check(calls, calls.cuEventSynchronize(self._event), "cuEventSynchronize")


def record(contexts: Contexts, device: Device) -> CudaEvent:
    """Return the point behind all work in the caller's current stream of a device."""
    with contexts.on(device, "cuEventCreate") as calls:
        result, event = calls.cuEventCreate(cuda_calls.EVENT_DISABLE_TIMING)
        check(calls, result, "cuEventCreate")
        made = CudaEvent(contexts, device, event)
        check(calls, calls.cuEventRecord(event, current_stream(device)), "cuEventRecord")
    return made


def current_stream(device: Device) -> int:
    """Return the caller's current stream of a device; the default one where torch has none."""
    if not torch.cuda.is_initialized():
        return 0
    stream: int = torch.cuda.current_stream(device.ordinal).cuda_stream
    return stream


def _destroy(calls: DriverCalls, event: int, pid: int) -> None:
    """Destroy an event. There is nobody to tell if the driver refuses: it goes with its context."""
    if os.getpid() == pid:
        calls.cuEventDestroy(event)
