"""Device slabs in the making: what one writer takes of its device, and what there is left of that.

    taken     allocated and not freed: slabs in use, and those that were given up and that somebody
              still has open
    budget    most of that

Promises: no more is taken than the budget, whatever readers do: one that is stopped, and lets go of
nothing, keeps its room and is counted. Where the usual size cannot be had, a slab of just the size
that is needed may do. Memory that is not to be had shows as ``PoolFullError`` and kills nobody;
whoever waits for some is told when a slab that was given up is free.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from teacher_logits.device_memory import DeviceError
from teacher_logits.devices.slab import DeviceSlab
from teacher_logits.errors import PoolFullError, SlabOpenError, TransportFailure
from teacher_logits.layout import round_up
from teacher_logits.pool import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.device_memory import Device

Slab = TypeVar("Slab", bound=DeviceSlab)

New: TypeAlias = "Callable[[str, int, Callable[[], None]], Slab]"
"""Makes a slab of an id and a size, which calls the last when its memory went back."""


class DeviceSlabs(Generic[Slab]):
    """The slabs of one writer on one device, as far as memory goes. Safe on any thread.

    Args:
        new: makes one.
        budget_bytes: most device memory of all of them.
        budget_name, way_out: for messages: what raises the budget, and what the writer's user can
            do where the device itself has no memory.
    """

    def __init__(
        self,
        new: New[Slab],
        *,
        device: Device,
        budget_bytes: int,
        budget_name: str,
        way_out: str,
    ) -> None:
        self.device = device
        self._new = new
        self._budget_bytes = budget_bytes
        self._budget_name = budget_name
        self._way_out = way_out
        self._lock = threading.Lock()
        self._taken_bytes = 0
        self._slabs: list[Slab] = []
        self._when_freed: Callable[[], None] = lambda: None

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when memory of a given up slab went back, on any thread.

        One alone; it should only wake somebody.
        """
        self._when_freed = callback

    @property
    def left_over_bytes(self) -> int:
        """Memory of slabs that were given up, which somebody has open yet."""
        with self._lock:
            self._slabs = self._in_use()
            return self._taken_bytes - sum(each.device_bytes for each in self._slabs)

    def make(self, slab_id: str, usual_bytes: int, least_bytes: int) -> Slab:
        """Return a new slab of the usual size, or with just enough room.

        Raises:
            PoolFullError: the budget or the device, or the host for the control page, has no
                memory for it.
        """
        least = round_up(max(least_bytes, 1), PAGE_BYTES)
        try:
            return self._make(slab_id, usual_bytes)
        except _NOT_MADE:
            try:
                return self._make(slab_id, least)
            except _NOT_MADE as error:
                raise self._none_left(least, error) from error

    def _make(self, slab_id: str, size_bytes: int) -> Slab:
        with self._lock:
            if self._taken_bytes + size_bytes > self._budget_bytes:
                raise _OverBudget
            self._taken_bytes += size_bytes
        try:
            slab = self._new(slab_id, size_bytes, partial(self._freed, size_bytes))
        except BaseException:
            with self._lock:
                self._taken_bytes -= size_bytes
            raise
        with self._lock:
            self._slabs = [*self._in_use(), slab]
        return slab

    def _in_use(self) -> list[Slab]:
        return [each for each in self._slabs if each.fd >= 0]

    def _freed(self, size_bytes: int) -> None:
        with self._lock:
            self._taken_bytes -= size_bytes
        self._when_freed()

    def _none_left(
        self, size_bytes: int, error: TransportFailure | OSError | _OverBudget
    ) -> PoolFullError:
        left_over = self.left_over_bytes
        still_open = f"{left_over} bytes of slabs that were given up are still open in readers"
        if isinstance(error, _OverBudget):
            why, way_out = (
                f"of its {self._budget_bytes} bytes {still_open}",
                (
                    "wait, end those that do not respond (`teacher-logits inspect` shows them), or "
                    f"raise {self._budget_name}"
                ),
            )
        else:
            said = error.message if isinstance(error, TransportFailure) else error.strerror
            why, way_out = f"{said}; {still_open}", self._way_out
        return PoolFullError(
            f"device {self.device.uuid} gave no slab of {size_bytes} bytes ({why}): {way_out}",
            facts={
                "need_bytes": size_bytes,
                "budget_bytes": self._budget_bytes,
                "left_over_bytes": left_over,
                "device_uuid": self.device.uuid,
            },
        )


class _OverBudget(Exception):
    """With one more slab, more than the budget would be taken."""


_NOT_MADE = (DeviceError, SlabOpenError, OSError, _OverBudget)
"""What stands in the way of a slab: the device, the lock of its twin, the host, the budget."""
