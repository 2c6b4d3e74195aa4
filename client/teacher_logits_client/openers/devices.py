"""Devices: the driver of one client, found when it is first needed, and the slabs opened with it.

Nothing here is touched before a writer has device memory that this side wants: to start a driver
takes memory on the device, and a process that has started one cannot fork children that use it.

A driver may hang in a call. So those that a caller waits for run on threads of their own, each by a
deadline (``driver_threads``).
"""

from __future__ import annotations

import glob
import threading
import time
from typing import TYPE_CHECKING

from teacher_logits.cuda_memory import find_driver
from teacher_logits.device_memory import DeviceError
from teacher_logits.devices.opened import OpenedDevice
from teacher_logits.errors import ConfigError, DeadlinePassedError, SlabOpenError
from teacher_logits_client.openers.driver_threads import DriverThreads, late, seconds_until

if TYPE_CHECKING:
    from teacher_logits.device_memory import Device, DeviceMemory, DeviceMemoryPart
    from teacher_logits_client.openers.maps import ReaderSlab

_ABOUT_GPUS = "/proc/driver/nvidia/gpus/*/information"
_SEEN_SECONDS = 1.0


class Devices:
    """The driver of one client.

    Args:
        given: the driver, where the client was given one; else it is looked for.
    """

    def __init__(self, given: DeviceMemory | None = None) -> None:
        self.known = given
        """The driver, as far as it was given or found."""
        self.calls = DriverThreads()
        """Calls into it that somebody waits for."""
        self._has_looked = given is not None
        self._lock = threading.Lock()

    def find(self) -> DeviceMemory | None:
        """Return the driver; None where this machine has none."""
        with self._lock:
            if not self._has_looked:
                self.known = find_driver()
                self._has_looked = True
            return self.known

    def check_can_pin(self, *, timeout: float) -> None:
        """Look for the driver that pins pages.

        Raises:
            ConfigError: there is none.
            DeadlinePassedError: it has not started after ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        found = self.calls.before(until, self.find, undo=lambda found: None, what="its start")
        if found is None:
            raise ConfigError(
                "mode='pinned' is for a student on a GPU, and this process finds no CUDA driver "
                "(libcuda.so.1): use 'cow' or 'read_only'",
                facts={"mode": "pinned"},
            )

    def seen(self) -> tuple[str, ...]:
        """Return the UUIDs of devices, for messages, as far as they are had without a driver.

        A driver that was given to the client is asked, since it was given to be used.
        """
        if self.known is None:
            return tuple(
                uuid for path in sorted(glob.glob(_ABOUT_GPUS)) if (uuid := _uuid_in(path))
            )
        memory, until = self.known, time.monotonic() + _SEEN_SECONDS
        try:
            found = self.calls.before(
                until, memory.devices, undo=lambda found: None, what="its devices"
            )
        except (DeadlinePassedError, DeviceError):
            return ()
        return tuple(each.uuid for each in found)


def _uuid_in(path: str) -> str:
    """Return the UUID in a file of the NVIDIA kernel driver's; empty where it names none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return ""
    return next((value.strip() for key, _, value in lines if key.strip() == "GPU UUID"), "")


def device_of(memory: DeviceMemory, uuid: str) -> Device | None:
    """Return this process's own device of a UUID; None where it sees none."""
    return next((each for each in memory.devices() if each.uuid == uuid), None)


class OpenedSlabs:
    """The device parts of one session's slabs: each is opened once, and closed when it is gone.

    Whoever opens one has a lease on the slab's host part, so that none is closed under a lease.
    They are kept by their slabs' ids, which no two slabs have, and never by address: a driver
    gives the address of what was closed to what comes next.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._slabs: dict[str, OpenedDevice] = {}
        # One is opened at a time: the driver does it one by one in any case.
        self._opening = threading.Lock()

    def __len__(self) -> int:
        return len(self._slabs)

    def __contains__(self, slab_id: str) -> bool:
        return slab_id in self._slabs

    @property
    def memory(self) -> DeviceMemory:
        """The driver that they were opened with."""
        found = self._devices.known
        if found is None:
            raise SlabOpenError("no slab was opened on a device yet")
        return found

    def open(self, slab: ReaderSlab, part: DeviceMemoryPart, *, until: float) -> OpenedDevice:
        """Return the device part of a slab, whose host part is here, opened now or before.

        Raises:
            SlabOpenError, DeviceError: it cannot be opened here, and why.
            DeadlinePassedError: the driver was not done by ``until``.
        """
        slab_id = slab.slab_id
        found = self._slabs.get(slab_id)
        if found is not None:
            return found
        if not self._opening.acquire(timeout=seconds_until(until)):
            raise late(f"slab {slab_id}, which waits behind another,", 0.0)
        try:
            found = self._slabs.get(slab_id)
            if found is None:
                found = self._devices.calls.before(
                    until,
                    lambda: self._open(slab, part),
                    undo=OpenedDevice.close,
                    what=f"slab {slab_id}",
                )
                self._slabs[slab_id] = found
            return found
        finally:
            self._opening.release()

    def close(self, slab_id: str) -> None:
        """Close one that is gone, and on which no lease is; nothing, if it is not open."""
        found = self._slabs.pop(slab_id, None)
        if found is not None:
            found.close()

    def _open(self, slab: ReaderSlab, part: DeviceMemoryPart) -> OpenedDevice:
        memory, uuid = self._devices.find(), part.memory.device_uuid
        device = None if memory is None else device_of(memory, uuid)
        if memory is None or device is None:
            raise SlabOpenError(
                f"slab {slab.slab_id} lies on device {uuid}, which this process does not see",
                facts={"slab_id": slab.slab_id, "device_uuid": uuid},
            )
        return OpenedDevice(
            slab.slab_id,
            part.memory,
            part.size_bytes,
            twin_fd=slab.descriptor,
            memory=memory,
            device=device,
        )
