"""The maker of a publisher's slabs: memory is asked for before it is taken.

A full machine shows as ``PoolFullError`` and kills nobody. Where the usual size cannot be had,
a slab of just the size that is needed may do. Making one takes a quarter of a second a GiB.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from teacher_logits import host_memory
from teacher_logits.errors import PoolFullError
from teacher_logits.layout import round_up
from teacher_logits.payload_room import HostRoom
from teacher_logits.pool import PAGE_BYTES
from teacher_logits.slab import WriterSlab

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.layout import Column
    from teacher_logits.payload import Extent
    from teacher_logits.payload_room import WriterRoom

_WAY_OUT = "give the process more, or lower pool_size_bytes or slab_size_bytes of open_publisher"


def check_memory(need_bytes: int) -> None:
    """Refuse a slab that the machine or a cgroup has no memory for (``PoolFullError``)."""
    host_memory.check_memory(need_bytes, way_out=_WAY_OUT)


class HostSlab(WriterSlab):
    """A slab of the host, as a publisher has it; see ``slab_shelf.PublisherSlab``."""

    device_part: DeviceMemoryPart | None = None

    def draft_room(self, extent: Extent, size_bytes: int) -> WriterRoom:
        """Return an extent's bytes, cut to a payload's."""
        return HostRoom(self.room(extent)[:size_bytes])

    def copy_to_host(self, extent: Extent, columns: Sequence[Column]) -> None:
        """Do nothing: it is there."""


class SlabMaker:
    """Makes slabs, each with an id of its own. One thread at a time.

    Args:
        check_memory: raises ``PoolFullError`` where so many bytes cannot be had.
    """

    def __init__(self, *, check_memory: Callable[[int], None] = check_memory) -> None:
        self._check_memory = check_memory
        self._prefix = f"slab-{secrets.token_hex(6)}"
        #: Slabs that were made.
        self.count = 0

    @property
    def awaits_memory(self) -> bool:
        """No: what readers still map of a dropped slab is the system's affair."""
        return False

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Do nothing: nobody waits for memory of the host."""

    def make(self, usual_bytes: int, least_bytes: int, *, until: float) -> HostSlab:
        """Return a new slab of the usual size, or with just enough room.

        Raises:
            PoolFullError: there is no memory for it.
        """
        size = self._affordable(usual_bytes, least_bytes)
        try:
            slab = HostSlab(f"{self._prefix}-{self.count + 1}", size)
        except OSError as error:
            raise PoolFullError(
                f"the system gave no slab of {size} bytes ({error.strerror}): {_WAY_OUT}",
                facts={"need_bytes": size, "errno": error.errno or 0},
            ) from error
        self.count += 1
        return slab

    def _affordable(self, usual_bytes: int, least_bytes: int) -> int:
        try:
            self._check_memory(usual_bytes)
        except PoolFullError:
            least = round_up(max(least_bytes, 1), PAGE_BYTES)
            self._check_memory(least)
            return least
        return usual_bytes
