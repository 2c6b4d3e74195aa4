"""The server's slabs: it is their one writer, and creates them as the pool asks for room.

Promises: memory is asked for before it is taken, and taken before it is promised, so that a
full machine shows as ``PoolFullError`` and kills nobody; slabs are created by whoever wants
room (the scorer's thread), under no lock. A slab in which nothing lies makes way for one of
another size; a reader that still maps it keeps its pages, and reads nothing new there.
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

    from teacher_logits.payload import Extent

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


class ServerSlabs:
    """The slabs of one server, by id.

    Args:
        epoch: this life of the server; slab ids carry it.
        check_memory: raises ``PoolFullError`` where so many bytes cannot be had.
    """

    def __init__(self, *, epoch: str, check_memory: Callable[[int], None] = check_memory) -> None:
        self._epoch = epoch
        self._check_memory = check_memory
        self._numbers = itertools.count(1)
        self._slabs: dict[str, WriterSlab] = {}
        # Guards the table, and keeps a slab in it while its slot is written. Slabs are created
        # and closed outside, since the ledger waits for ``mark``.
        self._lock = threading.Lock()

    def room_for(self, ledger: RoomLedger, size_bytes: int) -> Extent:
        """Reserve room, and create the slab for it where there is none. Not for the serving
        thread: a new slab of 1 GiB takes a quarter of a second.

        Raises:
            PoolFullError: pool or machine have no room for it now, or the budget never will.
        """
        while True:
            try:
                answer = ledger.reserve(size_bytes)
                if not isinstance(answer, Growth):
                    return answer
                self._grow(ledger, self._affordable(answer.size_bytes, size_bytes))
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
        """Return a slab; it stays open while an extent of it is in use.

        Raises:
            KeyError: there is none of that id, or none any more.
        """
        with self._lock:
            return self._slabs[slab_id]

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
        """Return the bytes of an extent in use, writable."""
        return self.find(extent.slab_id).room(extent)

    def close(self) -> None:
        """Close every slab; memory that somebody still maps lives on with them."""
        for slab_id in list(self._slabs):
            self._close(slab_id)

    def _affordable(self, usual_bytes: int, least_bytes: int) -> int:
        """Return the size of a slab that there is memory for: the usual one, or just enough."""
        try:
            self._check_memory(usual_bytes)
        except PoolFullError:
            least = round_up(max(least_bytes, 1), PAGE_BYTES)
            self._check_memory(least)
            return least
        return usual_bytes

    def _grow(self, ledger: RoomLedger, size_bytes: int) -> None:
        slab_id = f"slab-{self._epoch}-{next(self._numbers)}"
        try:
            slab = WriterSlab(slab_id, size_bytes)
        except OSError as error:
            raise PoolFullError(
                f"the system gave no slab of {size_bytes} bytes ({error.strerror}): give the "
                "server more memory, or lower --slab-size or --pool-size",
                facts={"need_bytes": size_bytes, "errno": error.errno or 0},
            ) from error
        with self._lock:
            self._slabs[slab_id] = slab
        try:
            ledger.add_slab(slab_id, size_bytes)
        except PoolFullError:  # another slab came first: ask again
            self._close(slab_id)

    def _close(self, slab_id: str) -> None:
        with self._lock:
            slab = self._slabs.pop(slab_id)
        slab.close()
