"""Last reads: what a device may still do with a lease's memory after its owner is done with it.

Work that is given to a device goes on after the call that gave it, and autograd gives some more
behind the owner's back. So a lease's memory goes back only when the device has passed it:

    closed, no view left    an event behind all work of the current stream, and of each stream
                            that was noted, on its own device; they are waited for
    closed, views outlive   whoever has them may read on any stream: when the last is gone, all
    never closed            work of the devices is waited for

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
        #: Streams that were noted, each with its device: a sibling may read this one's memory.
        self._streams: dict[torch.cuda.Stream, Device] = {}
        self._events: list[Event] | None = None

    @property
    def is_known(self) -> bool:
        """Whether ``finish`` could note how far the owner has read."""
        return self._events is not None

    def note_stream(self, stream: torch.cuda.Stream) -> None:
        """Have another stream than the current one waited for too."""
        ordinal = stream.device.index
        of_it = (each for each in self._memory.devices() if each.ordinal == ordinal)
        self._streams[stream] = next(of_it, self._device)

    def finish(self, *, outlived: bool) -> None:
        """Note that the owner is done; ``outlived`` where some view of the memory is not."""
        if outlived:
            return
        try:
            events = [self._memory.record(device=self._device)]
            for stream, device in self._streams.items():
                with current(stream):
                    events.append(self._memory.record(device=device))
        except DeviceError:
            return  # ``wait`` asks the devices for all of it, and is told the same
        self._events = events

    def wait(self) -> None:
        """Wait on the host until the devices read no more.

        Raises:
            DeviceError: the driver cannot say; then the memory must not be used anew.
        """
        if self._events is None:
            for device in {self._device, *self._streams.values()}:
                self._memory.synchronise(device=device)
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


def torch_devices(memory: DeviceMemory) -> tuple[Device, ...]:
    """Return the devices that torch has memory on: it copies to no others. Not for a hot path."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(each for each in memory.devices() if torch.cuda.memory_reserved(each.ordinal))
