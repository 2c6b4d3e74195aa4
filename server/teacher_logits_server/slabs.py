"""The server's slabs: it is their one writer, and creates them as the pool asks for room.

Promises: memory is asked for before it is taken, and taken before it is promised, so that a
full machine shows as ``PoolFullError`` and kills nobody; slabs are created by whoever wants
room (the scorer's thread), under no lock. A slab in which nothing lies makes way for one of
another size; a reader that still maps it keeps its pages, and reads nothing new there.

Slabs of the engine's device (``engine_device``) are among them. Their host twins are marked,
passed and read as the others are.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Protocol

from teacher_logits import host_memory
from teacher_logits.errors import PoolFullError
from teacher_logits.layout import round_up
from teacher_logits.pool import PAGE_BYTES, Growth
from teacher_logits.slab import WriterSlab

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.devices.slab import DeviceSlab
    from teacher_logits.payload import Extent

    Slab: TypeAlias = WriterSlab | DeviceSlab
    Make: TypeAlias = Callable[[str, int, int], Slab]

_WAY_OUT = "give the server more, or lower --slab-size or --pool-size"


def check_memory(need_bytes: int) -> None:
    """Refuse a slab that the machine or a cgroup has no memory for (``PoolFullError``)."""
    host_memory.check_memory(need_bytes, way_out=_WAY_OUT)


class RoomLedger(Protocol):
    """What ``room_for`` needs of the ledger; see there."""

    def reserve(self, size_bytes: int) -> Extent | Growth:
        """Take room, or say which slab must be added first."""

    def add_slab(self, slab_id: str, size_bytes: int) -> None:
        """Take a slab into use."""

    def take_idle_slabs(self) -> list[str]:
        """Drop the slabs in which nothing lies."""


class DeviceLedger(Protocol):
    """What ``room_on_device`` needs of the ledger; as ``RoomLedger``."""

    def reserve(self, size_bytes: int, *, on_device: bool, session_id: str) -> Extent | Growth:
        """Take room, or say which slab must be added first."""

    def add_slab(self, slab_id: str, size_bytes: int, *, on_device: bool) -> None:
        """Take a slab into use."""

    def take_idle_slabs(self, *, on_device: bool) -> list[str]:
        """Drop the slabs in which nothing lies."""


class MakesDeviceSlabs(Protocol):
    """What makes the slabs of a device; ``engine_device.EngineDevice``."""

    def make(self, slab_id: str, usual_bytes: int, least_bytes: int) -> DeviceSlab:
        """Return one of the usual size, or of just enough; ``PoolFullError`` without memory."""


class ServerSlabs:
    """The slabs of one server, by id.

    Args:
        epoch: this life of the server; slab ids carry it.
        check_memory: raises ``PoolFullError`` where so many bytes cannot be had.
        device: makes slabs of device memory, where the server has some.
    """

    def __init__(
        self,
        *,
        epoch: str,
        check_memory: Callable[[int], None] = check_memory,
        device: MakesDeviceSlabs | None = None,
    ) -> None:
        self._device = device
        self._epoch = epoch
        self._check_memory = check_memory
        self._numbers = itertools.count(1)
        self._slabs: dict[str, Slab] = {}
        # Guards the table, and keeps a slab in it while its slot is written. Slabs are created
        # and closed outside, since the ledger waits for ``mark``.
        self._lock = threading.Lock()

    def room_for(self, ledger: RoomLedger, size_bytes: int) -> Extent:
        """Reserve room, and create the slab for it where there is none. Not for the serving
        thread: a new slab of 1 GiB takes a quarter of a second.

        Raises:
            PoolFullError: pool or machine have no room for it now, or the budget never will.
        """
        return self._find_room(ledger, size_bytes, self._make)

    def room_on_device(
        self, ledger: DeviceLedger, size_bytes: int, *, session_id: str = ""
    ) -> Extent:
        """Reserve room in device memory, and create the slab for it where there is none.

        Raises:
            PoolFullError: as for ``room_for``; or the device has no memory.
        """
        if self._device is None:
            raise ValueError("this server has no device memory of its own")
        return self._find_room(_OnDevice(ledger, session_id), size_bytes, self._device.make)

    def _find_room(self, ledger: RoomLedger, size_bytes: int, make: Make) -> Extent:
        while True:
            try:
                answer = ledger.reserve(size_bytes)
                if not isinstance(answer, Growth):
                    return answer
                slab_id = f"slab-{self._epoch}-{next(self._numbers)}"
                self._add(ledger, make(slab_id, answer.size_bytes, size_bytes))
            except PoolFullError:
                idle = ledger.take_idle_slabs()
                for slab_id in idle:
                    self._close(slab_id)
                if not idle:
                    raise

    def mark(self, extent: Extent, generation: int) -> None:
        """Write an extent's slot; a slab that is closed has nobody to tell."""
        with self._lock:
            slab = self._slabs.get(extent.slab_id)
            if slab is not None:
                slab.mark(extent.slot, generation)

    def find(self, slab_id: str) -> WriterSlab:
        """Return a slab of host memory; it stays open while an extent of it is in use.

        Raises:
            KeyError: there is none of that id, or none any more.
        """
        slab = self._find(slab_id)
        if not isinstance(slab, WriterSlab):
            raise KeyError(slab_id)
        return slab

    def find_on_device(self, slab_id: str) -> DeviceSlab:
        """Return a slab of device memory; otherwise as ``find``."""
        slab = self._find(slab_id)
        if isinstance(slab, WriterSlab):
            raise KeyError(slab_id)
        return slab

    def device_part(self, slab_id: str) -> DeviceMemoryPart:
        """Return what readers of a slab of device memory open; KeyError as for ``find``."""
        return self.find_on_device(slab_id).device_part

    def copy(self, slab_id: str) -> tuple[int, int]:
        """Return a copy of a slab's descriptor, which the caller closes, and its size in bytes.

        Raises:
            KeyError: as for ``find``.
            OSError: this process has no descriptors left.
        """
        with self._lock:
            slab = self._slabs[slab_id]
            return os.dup(slab.fd), slab.total_bytes

    def room(self, extent: Extent) -> memoryview:
        """Return the bytes of an extent in use, writable; on the host, if some are elsewhere."""
        return self._find(extent.slab_id).room(extent)

    def close(self) -> None:
        """Close every slab; memory that somebody still maps lives on with them."""
        for slab_id in list(self._slabs):
            self._close(slab_id)

    def _find(self, slab_id: str) -> Slab:
        with self._lock:
            return self._slabs[slab_id]

    def _make(self, slab_id: str, usual_bytes: int, least_bytes: int) -> WriterSlab:
        """Return a slab that there is memory for: of the usual size, or with just enough room."""
        size_bytes = usual_bytes
        try:
            self._check_memory(usual_bytes)
        except PoolFullError:
            size_bytes = round_up(max(least_bytes, 1), PAGE_BYTES)
            self._check_memory(size_bytes)
        try:
            return WriterSlab(slab_id, size_bytes)
        except OSError as error:
            raise PoolFullError(
                f"the system gave no slab of {size_bytes} bytes ({error.strerror}): give the "
                "server more memory, or lower --slab-size or --pool-size",
                facts={"need_bytes": size_bytes, "errno": error.errno or 0},
            ) from error

    def _add(self, ledger: RoomLedger, slab: Slab) -> None:
        with self._lock:
            self._slabs[slab.slab_id] = slab
        try:
            ledger.add_slab(slab.slab_id, slab.size_bytes)
        except PoolFullError:  # another slab came first: ask again
            self._close(slab.slab_id)

    def _close(self, slab_id: str) -> None:
        with self._lock:
            slab = self._slabs.pop(slab_id)
        slab.close()


class _OnDevice:
    """The room of a ledger's in device memory, as a ``RoomLedger``."""

    def __init__(self, ledger: DeviceLedger, session_id: str) -> None:
        self._ledger = ledger
        self._session_id = session_id

    def reserve(self, size_bytes: int) -> Extent | Growth:
        return self._ledger.reserve(size_bytes, on_device=True, session_id=self._session_id)

    def add_slab(self, slab_id: str, size_bytes: int) -> None:
        self._ledger.add_slab(slab_id, size_bytes, on_device=True)

    def take_idle_slabs(self) -> list[str]:
        return self._ledger.take_idle_slabs(on_device=True)
