"""The maker of a publisher's slabs on a device: the publisher allocates and exports.

Promises: as ``device_slabs``, whose budget is the publisher's pool.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.devices.slab import DeviceSlab
from teacher_logits.devices.slabs import DeviceSlabs
from teacher_logits.payload_room import DeviceRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.device_memory import Device, DeviceMemory
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent
    from teacher_logits.payload_room import WriterRoom
    from teacher_logits_client.openers.driver_threads import DriverThreads


class PublishedDeviceSlab(DeviceSlab):
    """A slab on a device, as a publisher has it; see ``slab_shelf.PublisherSlab``."""

    def draft_room(self, extent: Extent, size_bytes: int) -> WriterRoom:
        """Return an extent of the device and of the twin."""
        return DeviceRoom(self, extent)

    def copy_to_host(self, extent: Extent, columns: Sequence[Column]) -> None:
        """Copy what lies on the device into the twin; see ``DeviceSlab.copy_to_twin``."""
        self.copy_to_twin(extent, columns)


#: The slabs of all publishers of this process, by id; each change is one step of the dictionary.
_made: weakref.WeakValueDictionary[str, PublishedDeviceSlab] = weakref.WeakValueDictionary()


def slab_between(start: int, end: int) -> PublishedDeviceSlab | None:
    """Return a slab of some publisher's of this process that has memory between two addresses."""
    for reference in _made.valuerefs():
        slab = reference()
        if slab is None or slab.fd < 0:
            continue
        if slab.address < end and start < slab.address + slab.device_bytes:
            return slab
    return None


class DeviceSlabMaker:
    """Makes slabs on one device, each with an id of its own. One thread at a time.

    Args:
        calls: into the driver, which may hang.
        pool_size_bytes: most device memory of all of them.
    """

    def __init__(
        self, memory: DeviceMemory, device: Device, *, calls: DriverThreads, pool_size_bytes: int
    ) -> None:
        self._memory = memory
        self._calls = calls
        self._numbers = itertools.count(1)
        self._prefix = f"slab-{secrets.token_hex(6)}"
        self._slabs = DeviceSlabs(
            self._new,
            device=device,
            budget_bytes=pool_size_bytes,
            budget_name="pool_size_bytes of open_publisher",
            way_out="free memory there, or lower pool_size_bytes or slab_size_bytes of "
            "open_publisher",
        )
        #: Slabs that were made.
        self.count = 0

    @property
    def awaits_memory(self) -> bool:
        """Whether memory of slabs that were dropped is yet to come back, from readers."""
        return self._slabs.left_over_bytes > 0

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on any thread, when some has."""
        self._slabs.on_freed(callback)

    def make(self, usual_bytes: int, least_bytes: int, *, until: float) -> PublishedDeviceSlab:
        """Return a new slab of the usual size, or with just enough room.

        Raises:
            PoolFullError: see ``DeviceSlabs.make``.
            DeadlinePassedError: the driver was not done by ``until``; its memory goes back then.
        """
        slab_id = f"{self._prefix}-{next(self._numbers)}"
        slab = self._calls.before(
            until,
            partial(self._slabs.make, slab_id, usual_bytes, least_bytes),
            undo=PublishedDeviceSlab.close,
            what=f"slab {slab_id}",
        )
        _made[slab_id] = slab
        self.count += 1
        return slab

    def _new(
        self, slab_id: str, size_bytes: int, when_freed: Callable[[], None]
    ) -> PublishedDeviceSlab:
        return PublishedDeviceSlab(
            slab_id,
            size_bytes,
            memory=self._memory,
            device=self._slabs.device,
            when_freed=when_freed,
        )
