"""Device slabs: one allocation of device memory, and its host twin at the same offsets.

    host twin, a sparse slab      | control page | ....... row columns, host copies ....... |
    Extent.offset_bytes                          0        o                        twin end
    device memory                                | position columns ... | device end

A payload's columns over positions lie in device memory and those over rows in the twin, all at
the offsets that its description names (``layout.is_on_device``). Whoever guards, checks or counts
rows reads the twin alone. Readers that cannot open device memory read host copies of the
device's columns, which the writer puts into the twin at the same offsets.

Memory that its owner registers has a twin that is larger than itself: the row columns of its
payloads lie behind the device's last byte.

Promises: no view reaches outside what was exported (``device_ranges``). Memory goes back when no
tensor here views it and no reader has it open (``left_over``).
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from teacher_logits import host_memory
from teacher_logits.device_memory import DeviceMemoryPart
from teacher_logits.devices.left_over import (
    Held,
    LeftOver,
    Lent,
    Own,
    Views,
    is_locked,
    keep,
    leave_over,
    open_lock,
)
from teacher_logits.devices.ranges import check_device_column
from teacher_logits.devices.views import DeviceView
from teacher_logits.errors import SlabOpenError
from teacher_logits.layout import is_on_device, round_up
from teacher_logits.pool import PAGE_BYTES
from teacher_logits.slab import WriterSlab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from teacher_logits.device_memory import Device, DeviceMemory, ExportedMemory
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent

_WAY_OUT = (
    "give the process more, lower pool_size_bytes of open_publisher, or let students on this "
    "node list cuda_ipc, which needs no host copy"
)


class DeviceSlab:
    """A device slab as its one writer has it; its face is that of ``slab.WriterSlab``.

    ``size_bytes`` is the twin's room for extents, ``device_bytes`` what lies on the device, and
    ``exported`` what readers open it with. The object owns the twin, and the device memory unless
    its address was given.
    """

    def __init__(
        self,
        slab_id: str,
        size_bytes: int,
        *,
        memory: DeviceMemory,
        device: Device,
        address: int | None = None,
        owner: object = None,
        row_bytes: int = 0,
        when_freed: Callable[[], None] = lambda: None,
    ) -> None:
        """Allocate and export ``size_bytes`` of a device, or export those at an address.

        Args:
            address: of memory of another owner.
            owner: kept alive, such as a tensor, for as long as memory of one's own would be.
            row_bytes: room for row columns behind the device's bytes, in the twin alone.
            when_freed: called, on any thread, once memory of its own went back after ``close``.

        Raises:
            DeviceError: the driver has no such memory, or does not export it.
            OSError: the system gave no twin.
            SlabOpenError: there is no /proc, by which the twin is locked.
        """
        self.slab_id = slab_id
        self.device = device
        self.device_bytes = size_bytes
        self._memory = memory
        own = memory.allocate(size_bytes, device=device) if address is None else address
        try:
            self.exported: ExportedMemory = memory.export(own)
            room = round_up(size_bytes, PAGE_BYTES) + round_up(row_bytes, PAGE_BYTES)
            self._twin = WriterSlab(slab_id, room, is_sparse=True)
            try:
                self._lock = open_lock(self._twin.fd)
            except BaseException:
                self._twin.close()
                raise
        except BaseException:
            if address is None:
                memory.free(own, device=device)
            raise
        self.address = own
        self._what: Own | Lent = Lent(owner)
        if address is None:
            self._what = Own(memory=memory, address=own, device=device, when_freed=when_freed)
        self._close_lock = weakref.finalize(self, os.close, self._lock)
        self._close_lock.atexit = False
        self._held: Held | None = Held()

    @property
    def fd(self) -> int:
        """The twin's descriptor; -1 once it is closed."""
        return self._twin.fd

    @property
    def size_bytes(self) -> int:
        """Room for extents in bytes: that of the twin."""
        return self._twin.size_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the twin's whole memfd, the control page included."""
        return self._twin.total_bytes

    @property
    def device_part(self) -> DeviceMemoryPart:
        """What readers open."""
        return DeviceMemoryPart(memory=self.exported, size_bytes=self.device_bytes)

    def mark(self, slot: int, generation: int) -> None:
        """Write a slot of the twin: see ``WriterSlab.mark``."""
        self._twin.mark(slot, generation)

    def touch(self) -> None:
        """Wake who watches the twin: see ``WriterSlab.touch``."""
        self._twin.touch()

    def let_in(self, slot: int, generation: int) -> None:
        """Write a slot of the twin, and wake who watches it: see ``WriterSlab.let_in``."""
        self._twin.let_in(slot, generation)

    def generation(self, slot: int) -> int:
        """Read a slot."""
        return self._twin.generation(slot)

    def room(self, extent: Extent) -> memoryview:
        """Return the extent's bytes of the twin, writable: row columns and host copies."""
        return self._twin.room(extent)

    def device_view(self, extent: Extent, column: Column) -> DeviceView:
        """Return device memory from the payload's first byte to a column's last.

        Raises:
            SlabOpenError: the column lies elsewhere, or the slab was closed.
        """
        held = self._hold()
        size = check_device_column(extent, column, device_bytes=self.device_bytes)
        return DeviceView(
            self.address + extent.offset_bytes,
            size,
            device=self._memory.view_device(self.device),
            owner=held,
        )

    def copy_to_twin(self, extent: Extent, columns: Iterable[Column]) -> None:
        """Copy an extent's columns on the device to the same offsets of the twin.

        What writes the columns must be done: this waits for no stream. Host memory is asked for
        before it is taken; room that had a copy before costs none.

        Raises:
            PoolFullError: the machine or a cgroup has no memory for the copy.
            SlabOpenError, DeviceError: a column lies elsewhere; the driver refused.
        """
        held = self._hold()
        there = [c for c in columns if is_on_device(c.kind) and c.size_bytes]
        for column in there:
            check_device_column(extent, column, device_bytes=self.device_bytes)
        need = sum(
            self._twin.hole_bytes(extent.offset_bytes + c.offset_bytes, c.size_bytes) for c in there
        )
        if need:
            host_memory.check_memory(need, way_out=_WAY_OUT)
        room = self.room(extent)
        for column in there:
            self._memory.copy_to_host(
                room[column.offset_bytes : column.end_bytes],
                self.address + extent.offset_bytes + column.offset_bytes,
                device=self.device,
            )
        del held  # until here the memory stays, whoever closes the slab meanwhile

    def read_device(self, extent: Extent, column: Column) -> bytearray:
        """Return a copy of a column on the device, as it is now; waits for no stream."""
        held = self._hold()
        check_device_column(extent, column, device_bytes=self.device_bytes)
        copy = bytearray(column.size_bytes)
        if copy:
            at = self.address + extent.offset_bytes + column.offset_bytes
            self._memory.copy_to_host(memoryview(copy), at, device=self.device)
        del held
        return copy

    def _hold(self) -> Held:
        """Return what keeps the memory, while somebody has it."""
        held = self._held
        if held is None:
            raise SlabOpenError(f"slab {self.slab_id} was closed", facts={"slab_id": self.slab_id})
        return held

    def settle(self) -> None:
        """Wait on the host until the caller's current stream has done what it was given."""
        self._memory.record(device=self.device).wait()

    def is_open_elsewhere(self) -> bool:
        """Say whether a reader, in whatever process, has the device memory open.

        Whose memory it is may free it when it is closed, not in use, and this says no.
        """
        return is_locked(self._lock)

    def close(self, *, in_use: bool = False) -> None:
        """Give the twin back, and the device memory once no view and no reader has it.

        To free it under a reader is undefined (CUDA C++ programming guide, "Interprocess
        Communication"). So it goes when the last of them has let go (``left_over``), and this
        waits for nobody. What is ``in_use`` somebody may yet open; it stays allocated until this
        process ends. Memory of another owner is not freed here, and its owner kept alive as long.
        """
        if self._held is None:
            return
        self._twin.close(in_use=in_use)
        views, self._held = Views(self._held), None
        what, self._what = self._what, Lent(None)
        if in_use:
            keep(what)
            return
        lock = self._lock
        if isinstance(what, Own):
            self._close_lock.detach()  # whoever frees the memory closes it
        else:
            try:
                lock = os.dup(lock)  # its owner may ask on
            except OSError:
                keep(what)
                return
        leave_over(LeftOver(what=what, lock=lock, views=views, pid=os.getpid()))
