"""The maker of a publisher's slabs on a device: the publisher allocates and exports.

Promises: a device without memory shows as ``PoolFullError``, with the driver's own number and
name; where the usual size cannot be had, a slab of just the size that is needed may do.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from teacher_logits.device_memory import DeviceError
from teacher_logits.device_slab import DeviceSlab
from teacher_logits.errors import PoolFullError
from teacher_logits.layout import round_up
from teacher_logits.payload_room import DeviceRoom
from teacher_logits.pool import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.device_memory import Device, DeviceMemory
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent
    from teacher_logits.payload_room import WriterRoom


class PublishedDeviceSlab(DeviceSlab):
    """A slab on a device, as a publisher has it; see ``slab_shelf.PublisherSlab``."""

    def draft_room(self, extent: Extent, size_bytes: int) -> WriterRoom:
        """Return an extent of the device and of the twin."""
        return DeviceRoom(self, extent)

    def copy_to_host(self, extent: Extent, columns: Sequence[Column]) -> None:
        """Copy what lies on the device into the twin; see ``DeviceSlab.copy_to_twin``."""
        self.copy_to_twin(extent, columns)


class DeviceSlabMaker:
    """Makes slabs on one device, each with an id of its own. One thread at a time."""

    def __init__(self, memory: DeviceMemory, device: Device) -> None:
        self._memory = memory
        self._device = device
        self._prefix = f"slab-{secrets.token_hex(6)}"
        #: Slabs that were made.
        self.count = 0

    def make(self, usual_bytes: int, least_bytes: int) -> PublishedDeviceSlab:
        """Return a new slab of the usual size, or with just enough room.

        Raises:
            PoolFullError: the device, or the host for the control page, has no memory for it.
        """
        least = round_up(max(least_bytes, 1), PAGE_BYTES)
        try:
            slab = self._make(usual_bytes)
        except (DeviceError, OSError):
            try:
                slab = self._make(least)
            except (DeviceError, OSError) as error:
                raise self._none_left(least, error) from error
        self.count += 1
        return slab

    def _make(self, size_bytes: int) -> PublishedDeviceSlab:
        return PublishedDeviceSlab(
            f"{self._prefix}-{self.count + 1}", size_bytes, memory=self._memory, device=self._device
        )

    def _none_left(self, size_bytes: int, error: DeviceError | OSError) -> PoolFullError:
        why = error.message if isinstance(error, DeviceError) else error.strerror
        return PoolFullError(
            f"device {self._device.uuid} gave no slab of {size_bytes} bytes ({why}): free memory "
            "there, or lower pool_size_bytes or slab_size_bytes of open_publisher",
            facts={"need_bytes": size_bytes, "device_uuid": self._device.uuid},
        )
