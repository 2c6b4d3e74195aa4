"""A driver without a device: the rules of CUDA's memory hand-over, over memfds, between processes.

``FakeCuda`` is a ``DeviceMemory``. Each process makes one with the devices that it sees and the
folder that all processes of one pretended node share. "Device" memory is a memfd that is mapped
in each process, so tensors over it are tensors on the CPU (DLPack ``kDLCPU``), and whoever has the
address reads the very bytes.

What it enforces, as CUDA does:

* a handle is 64 bytes and names a whole allocation; an inner address exports its base and offset
* no process opens a handle of its own (201)
* a handle opened again gives the same address and counts; as many closes as opens; one more is
  refused (1)
* a handle reaches nobody in another PID namespace, and nobody once its exporter is dead (201, or
  1 before it is reaped); a freed allocation's handle opens nothing (1), although address and
  descriptor are used anew
* a device is a process's own number for a UUID: another process's ``Device`` is refused (101);
  memory of a device that the reader does not see is refused (1), memory of one without peer access
  too (217, or 101), and MIG devices hand nothing over (801)
* memory of pools, virtual, managed and host memory is told apart, and not exported (1)
* what is given to a stream is done only when somebody waits for the stream or for an event behind
  it: a reader let in without a wait sees the bytes of before
* a freed or closed range reads as 0xDD, and the next allocation or mapping of its size gets its
  address
* a context is made at a device's first use, and is noted; nothing works in a forked child (3)

What only a log can hold against the caller is a *fault* in it: memory that was freed while a
reader had it open, private memory that was pinned.

What it cannot prove
--------------------
That a real driver keeps these rules: they are read, not measured (``make gpu-check`` does that).
Order: writes here become visible at once and in program order, while a device's may not; work can
be delayed by ``enqueue`` alone, since torch's own work on these tensors is done when the call
returns: a wait that is missing behind it does not show. Copies and access from device to device,
peer access that is switched on lazily, MIG as it is, a driver that leaks or dies. What becomes of
an importer's address when the exporter frees it or dies: undefined there, 0xDD or unchanged here.
Costs of any kind; device memory that is tight, or shared with an allocator. Whether torch takes a
capsule of a CUDA device: here it takes one of the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fake_cuda.allocations import Handle, open_exported
from tests.fake_cuda.numbers import refusal
from tests.fake_cuda.process import FakeProcess

from teacher_logits.device_memory import ExportedMemory, MemoryKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tests.fake_cuda.streams import FakeEvent, FakeStream

    from teacher_logits.device_memory import Device

_CPU = (1, 0)


class FakeCuda(FakeProcess):
    """One process's driver. ``log`` is what it was asked, and the folder has it from all."""

    # --- hand-over ----------------------------------------------------------

    def export(self, address: int) -> ExportedMemory:
        """Return the handle of the allocation around an address, and where in it that lies."""
        made = self._allocation_at(address)
        device = self._visible.find(made.uuid) if made else None
        with self._asked("export", device, address=address) as note:
            if made is None:
                raise refusal(1, "export", f"nothing that was allocated here is at {address:#x}")
            note(made.serial, address)
            if made.kind is not MemoryKind.PLAIN:
                raise refusal(1, "export", f"{made.kind.value} has no handle")
            if device is not None and device.is_mig:
                raise refusal(801, "export", f"{made.uuid} is a MIG device")
            handle = Handle(
                pid=self._pid,
                fd=made.fd,
                pid_namespace=self._namespace,
                serial=made.serial,
            )
            return ExportedMemory(
                handle=handle.pack(),
                device_uuid=made.uuid,
                base_offset_bytes=address - made.address,
                allocation_bytes=made.size_bytes,
            )

    def open(self, handle: bytes, *, device: Device) -> int:
        """Return the address of an exported allocation's first byte, in this process."""
        with self._asked("open", device) as note:
            named = Handle.unpack(handle)
            note(named.serial, 0)
            if (named.pid, named.pid_namespace) == (self._pid, self._namespace):
                raise refusal(201, "open", "a process cannot open a handle of its own")
            key = (named.serial, device.uuid)
            if opened := self._opened.get(key):
                opened.count += 1
                note(named.serial, opened.address)
                return opened.address
            opened = open_exported(named, pid_namespace=self._namespace)
            try:
                self._visible.check_reach(opened.uuid, device)
            except BaseException:
                opened.let_go()
                raise
            opened.address = self._addresses.map(opened.fd, opened.size_bytes)
            self._opened[key] = opened
            note(named.serial, opened.address)
            return opened.address

    def close(self, address: int, *, device: Device) -> None:
        """Undo one ``open``; the last one unmaps."""
        with self._asked("close", device, address=address) as note:
            for key, opened in self._opened.items():
                if opened.address == address and key[1] == device.uuid:
                    break
            else:
                raise refusal(1, "close", f"nothing is open at {address:#x} of {device.uuid}")
            note(key[0], address)
            opened.count -= 1
            if not opened.count:
                del self._opened[key]
                opened.let_go()
                self._addresses.give_back(address, opened.size_bytes)

    # --- copies and order ---------------------------------------------------

    def copy_to_host(self, target: memoryview, address: int, *, device: Device) -> None:
        """Fill ``target``. Waits for no stream: what still is to be written is not there."""
        with self._asked("copy_to_host", device, address=address, size_bytes=target.nbytes):
            self._check_range("copy_to_host", address, target.nbytes)
            target.cast("B")[:] = self._addresses.bytes_at(address, target.nbytes)

    def copy_to_device(self, address: int, source: memoryview, *, device: Device) -> None:
        """Write ``source``, at once."""
        with self._asked("copy_to_device", device, address=address, size_bytes=source.nbytes):
            self._check_range("copy_to_device", address, source.nbytes)
            self._addresses.bytes_at(address, source.nbytes)[:] = source.cast("B")

    def enqueue(self, work: Callable[[], None], *, device: Device) -> None:
        """Give the current stream something to do: done once somebody waits for it.

        Not of ``DeviceMemory``: the tests' stand-in for a kernel that takes long.
        """
        with self._asked("enqueue", device):
            self._streams.current(device.uuid).push(work)

    def new_stream(self, *, device: Device) -> FakeStream:
        """Return another stream of a device (not of ``DeviceMemory``)."""
        return self._streams.new(device.uuid, device.ordinal)

    def in_stream(self, stream: FakeStream) -> AbstractContextManager[None]:
        """Make a stream this thread's current one for the block (not of ``DeviceMemory``)."""
        return self._streams.use(stream)

    def record(self, *, device: Device) -> FakeEvent:
        """Return the point behind all work in this thread's current stream of a device."""
        with self._asked("record", device):
            return self._streams.current(device.uuid).event()

    def synchronise(self, *, device: Device) -> None:
        """Do what was given to any stream of a device."""
        with self._asked("synchronise", device):
            streams = self._streams.all(device.uuid)
        for stream in streams:
            stream.event().wait()

    def pin(self, address: int, size_bytes: int) -> None:
        """Note pages of host memory as pinned; a fault is noted if they are private ones."""
        with self._asked("pin", None, address=address, size_bytes=size_bytes):
            self._pinned.pin(address, size_bytes)

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        with self._asked("unpin", None, address=address):
            self._pinned.unpin(address)

    def view_device(self, device: Device) -> tuple[int, int]:
        """Return DLPack's CPU: the memory is mapped here."""
        del device
        return _CPU
