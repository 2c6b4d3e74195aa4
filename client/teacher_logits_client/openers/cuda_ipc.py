"""Opener for ``cuda_ipc``: columns over positions in the writer's device memory, where they lie.

    columns over rows        in the slab's host twin, mapped as for ``shared_memory``
    columns over positions   on the device, by a handle that is opened once a slab and session

The bytes move for nobody. Generations, revocations and row checks are read on the host, so that
nobody waits for a device to learn that a lease is stale.

Nothing keeps a reader from writing into device memory: what is read here must not be written into.
Room is given back when the device has done what was given to it up to the lease's close, and behind
the last view (``last_reads``). A handle is closed as soon as its slab is gone and the last lease
on it is back, while the session is idle too (``line_watch``), or with the session. Should the
writer's process die, what becomes of its memory under a reader is the driver's affair: nobody
promises it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import SlabOpenError
from teacher_logits.layout import is_on_device
from teacher_logits.transport import Transport
from teacher_logits_client.openers import extent_of
from teacher_logits_client.openers.last_reads import LastRead

if TYPE_CHECKING:
    import torch

    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits.devices.opened import OpenedDevice
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent, Payload
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_client.openers import View
    from teacher_logits_client.openers.devices import OpenedSlabs
    from teacher_logits_client.openers.mapped_payload import SharedMemoryPayload
    from teacher_logits_client.openers.shared_memory import SharedMemoryOpener


class DevicePayload:
    """A payload in device memory.

    Args:
        host: what of it lies in the twin.
        slab: the device's part of its slab, opened by ``memory``.
    """

    copied = False

    def __init__(
        self,
        payload: Payload,
        extent: Extent,
        *,
        host: SharedMemoryPayload,
        slab: OpenedDevice,
        memory: DeviceMemory,
    ) -> None:
        """Look at every column before anybody may ask for one.

        Raises:
            SlabOpenError: one does not lie in the device's part of the slab.
        """
        #: Where its columns over positions are.
        self.device = host.device
        self._extent = extent
        self._host = host
        self._slab = slab
        self._memory = memory
        self._last_read = LastRead(memory, slab.device)
        self._is_shown = False
        for column in payload.columns:
            if is_on_device(column.kind):
                self.device = slab.view(extent, column).torch_device

    def view_of(self, column: Column) -> View:
        """Return a new object over a column's memory; see ``OpenedPayload.view_of``."""
        if is_on_device(column.kind):
            self._is_shown = True
            return self._slab.view(self._extent, column)
        return self._host.view_of(column)

    def bytes_of(self, column: Column) -> memoryview:
        """Return a column's bytes; a copy of those on the device, as they are now."""
        if not is_on_device(column.kind):
            return self._host.bytes_of(column)
        view, copy = self._slab.view(self._extent, column), bytearray(column.size_bytes)
        if copy:
            at = view.address + column.offset_bytes
            self._memory.copy_to_host(memoryview(copy), at, device=self._slab.device)
        return memoryview(copy)

    def note_stream(self, stream: torch.cuda.Stream) -> None:
        """Have another stream waited for too."""
        self._last_read.note_stream(stream)

    def finish(self, *, outlived: bool) -> None:
        """Note, in the owner's current stream, how far it has read."""
        self._last_read.finish(outlived=outlived)

    def is_current(self) -> bool:
        """Say whether the room still holds this payload, and will while the lease is open."""
        return self._host.is_current()

    def vacate(self) -> int:
        """Wait until the device has read what it was told to; drop dirtied pages of the twin.

        What nobody was shown costs no wait: the device may be the reason why.
        """
        if self._is_shown:
            self._last_read.wait()
        return self._host.vacate()


class CudaIpcOpener:
    """Opens the device slabs of one session, each once.

    Args:
        host: maps the slabs' host parts, and counts the leases on them.
        slabs: opens their device parts.
    """

    transport = Transport.CUDA_IPC

    def __init__(self, host: SharedMemoryOpener, slabs: OpenedSlabs) -> None:
        self._host = host
        self._slabs = slabs
        host.when_forgotten = slabs.close

    def has(self, slab_id: str) -> bool:
        """Say whether both parts of a slab are open."""
        return slab_id in self._slabs and self._host.has(slab_id)

    def open(self, lease: LeaseTerms, *, until: float) -> DevicePayload:
        """Return the lease's memory on its device. See ``Opener.open``."""
        host = self._host.open_host_part(lease, self.transport, until=until)
        try:
            extent = extent_of(lease, self.transport)
            part = self._host.device_part(host.slab, until=until)
            if part is None:
                raise SlabOpenError(
                    f"slab {extent.slab_id} was passed without its device memory, and payload "
                    f"{lease.payload.payload_id} lies there",
                    facts={"slab_id": extent.slab_id, "payload_id": lease.payload.payload_id},
                )
            return DevicePayload(
                lease.payload,
                extent,
                host=host,
                slab=self._slabs.open(host.slab, part, until=until),
                memory=self._slabs.memory,
            )
        except BaseException:
            host.vacate()
            raise

    def close(self) -> None:
        """Keep nothing of its own: handles are closed as the slabs' host parts are let go."""
