"""A device slab as a reader has it: its handle, opened once a session and device.

The driver maps whole allocations; the slab is a part of one, and a payload a part of that. What
the writer says of them, checked as it came (``device_ranges``), is held against what the driver
says before anybody reads.

Promises: a handle stays open while a view of it, or a tensor over one, is there, and is then
closed once the device has done its work. As long as it is open the twin is locked, so that the
writer does not free what is read (``left_over``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from typing import TYPE_CHECKING

from teacher_logits.device_memory import DeviceError
from teacher_logits.devices.left_over import Held, let_go, open_lock
from teacher_logits.devices.ranges import check_device_column, outside_allocation
from teacher_logits.devices.views import DeviceView
from teacher_logits.errors import SlabOpenError
from teacher_logits.slab import HEADER_BYTES, is_retired

if TYPE_CHECKING:
    from teacher_logits.device_memory import Device, DeviceMemory, ExportedMemory
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent

_log = logging.getLogger("teacher_logits")


class OpenedDevice:
    """The device part of a slab as a reader has it: its handle is opened here, once.

    ``device`` is the reader's own device of that UUID, or a peer of it.
    """

    def __init__(
        self,
        slab_id: str,
        exported: ExportedMemory,
        size_bytes: int,
        *,
        twin_fd: int,
        memory: DeviceMemory,
        device: Device,
    ) -> None:
        """Open an allocation, of which the slab is ``size_bytes`` from its base offset on.

        ``twin_fd`` is the twin's descriptor; it stays the caller's.

        Raises:
            SlabOpenError: the writer has retired it, or the driver says otherwise of its size.
            DeviceError: the driver refused to open it.
        """
        self.slab_id = slab_id
        self.device = device
        self.device_bytes = size_bytes
        self._memory = memory
        lock = open_lock(twin_fd)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if is_retired(memoryview(os.pread(lock, HEADER_BYTES, 0))):
                raise SlabOpenError(f"slab {slab_id} is retired", facts={"slab_id": slab_id})
            base = memory.open(exported.handle, device=device)
        except BaseException:
            let_go(lock)
            raise
        self._held: Held | None = Held()
        weakref.finalize(self._held, _close, memory, base, device, lock, os.getpid()).atexit = False
        try:
            there = memory.locate(base).allocation_bytes
            if exported.base_offset_bytes + size_bytes > there:
                raise outside_allocation(slab_id, exported, size_bytes, there)
        except BaseException:
            self._held = None
            raise
        self.address = base + exported.base_offset_bytes

    def view(self, extent: Extent, column: Column) -> DeviceView:
        """Return device memory from the payload's first byte to a column's last.

        The handle stays open while the view, or a tensor over it, is there.

        Raises:
            SlabOpenError: the column lies elsewhere, or this was closed.
        """
        size = check_device_column(extent, column, device_bytes=self.device_bytes)
        if self._held is None:
            raise SlabOpenError(f"slab {self.slab_id} was closed", facts={"slab_id": self.slab_id})
        return DeviceView(
            self.address + extent.offset_bytes,
            size,
            device=self._memory.view_device(self.device),
            owner=self._held,
        )

    def close(self) -> None:
        """Close the handle, with the last view of it; twice is fine."""
        self._held = None


def _close(memory: DeviceMemory, address: int, device: Device, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a fork has no share in its parent's handle
        try:
            memory.synchronise(device=device)  # a kernel that reads it may have been given since
            memory.close(address, device=device)
        except DeviceError as error:
            # Then it is open, and the lock says so until this process ends.
            _log.warning("opened device memory was not closed: %s", error.message)
            return
        let_go(lock)
    else:
        os.close(lock)
