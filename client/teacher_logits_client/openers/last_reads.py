"""Last reads: what a device may still do with a lease's memory after its owner is done with it.

Work that is given to a device goes on after the call that gave it, and autograd gives some more
behind the owner's back. So a lease's memory goes back only when the device has passed it:

    closed, no view left    an event behind all work of the current stream, and of each stream
                            that was noted; it is waited for
    closed, views outlive   whoever has them may read on any stream: when the last is gone, all
    never closed            work of the device is waited for

``finish`` is on the owner's thread, whose current stream it is; ``wait`` is on the thread of the
returns, which may wait. A forked child calls neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.device_memory import DeviceError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from teacher_logits.device_memory import Device, DeviceMemory, Event


class LastRead:
    """The last read of one lease on one device."""

    def __init__(self, memory: DeviceMemory, device: Device) -> None:
        self._memory = memory
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        self._events: list[Event] | None = None

    def note_stream(self, stream: torch.cuda.Stream) -> None:
        """Have another stream than the current one waited for too."""
        if stream not in self._streams:
            self._streams.append(stream)

    def finish(self, *, outlived: bool) -> None:
        """Note that the owner is done; ``outlived`` where some view of the memory is not."""
        if outlived:
            return
        try:
            events = [self._memory.record(device=self._device)]
            for stream in self._streams:
                with current(stream):
                    events.append(self._memory.record(device=self._device))
        except DeviceError:
            return  # ``wait`` asks the device for all of it, and is told the same
        self._events = events

    def wait(self) -> None:
        """Wait on the host until the device reads no more.

        Raises:
            DeviceError: the driver cannot say; then the memory must not be used anew.
        """
        if self._events is None:
            self._memory.synchronise(device=self._device)
        for event in self._events or ():
            event.wait()


def current(stream: torch.cuda.Stream) -> AbstractContextManager[object]:
    """Make a stream the current one of its device for a block."""
    return torch.cuda.stream(stream)


def torch_device(memory: DeviceMemory) -> Device | None:
    """Return the device that torch gives work to on this thread; None where it has none yet."""
    if not torch.cuda.is_initialized():
        return None
    ordinal = torch.cuda.current_device()
    return next((each for each in memory.devices() if each.ordinal == ordinal), None)
