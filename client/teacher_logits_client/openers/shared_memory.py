"""Opener for ``shared_memory``: the writer's slab, mapped here once for the whole session.

    control    shared, read-only     slots with the generations
    extents    private, writable     ``COW``: a page that is written into becomes the reader's
               shared, read-only     ``READ_ONLY``

The bytes move for nobody. Every lease shows what the writer wrote, whoever writes into
another: pages that the reader dirtied are dropped when their lease is vacated, and a lease on
room that another has in the slab's map gets a private map of its own. A slab whose writer
has let it go, or that the server says is gone, is unmapped with the last lease on it.

Any thread may open. A slab is asked for by one of them at a time; the others wait for it, each
no longer than its own deadline, and then try themselves.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import DeadlinePassedError
from teacher_logits.slab import check_extent, is_retired
from teacher_logits.transport import Transport
from teacher_logits_client.config import MapMode
from teacher_logits_client.openers import extent_of, stale, taken_back
from teacher_logits_client.openers.reader_slab import ReaderSlab

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_client.openers.reader_slab import Room, Watch

    GetSlab = Callable[[str, float], int]
    _Place = tuple[str, int]


class SharedMemoryPayload:
    """A payload in a mapped slab."""

    copied = False

    def __init__(
        self,
        slab: ReaderSlab,
        lease: LeaseTerms,
        extent: Extent,
        *,
        room: Room,
        vacate: Callable[[], int],
        is_revoked: Callable[[], bool],
    ) -> None:
        self.buffer = room.view[: lease.payload.size_bytes]
        self._slab = slab
        self._extent = extent
        self._vacate = vacate
        self._is_revoked = is_revoked

    def is_current(self) -> bool:
        """Say whether the room still holds this payload, and will while the lease is open."""
        return self._slab.holds(self._extent) and not self._is_revoked()

    def vacate(self) -> int:
        """Drop the pages that were dirtied; return their bytes."""
        return self._vacate()


class SharedMemoryOpener:
    """Maps the slabs of one session, each once.

    Args:
        get_slab: returns a slab's descriptor, which the opener closes; called with the
            slab's id and the seconds that it may take.
        mode: ``COW`` or ``READ_ONLY``; for ``COPY`` the caller copies, and maps read-only.
        is_revoked: whether a lease was taken back by force, whatever its room holds.
        watch: has whoever waits woken when a file is touched, and returns what ends that.
    """

    transport = Transport.SHARED_MEMORY

    def __init__(
        self,
        get_slab: GetSlab,
        *,
        mode: MapMode = MapMode.COW,
        is_revoked: Callable[[str], bool] = lambda lease_id: False,
        watch: Watch = lambda fd: lambda: None,
    ) -> None:
        self._get_slab = get_slab
        self._is_revoked = is_revoked
        self._watch = watch
        self._mode = mode
        self._slabs: dict[str, ReaderSlab] = {}
        #: Slabs that some thread is asking for.
        self._asked: set[str] = set()
        #: Slabs of which the server has said that nothing will lie there again.
        self._gone: set[str] = set()
        #: Leases on each slab that are not vacated.
        self._leases: Counter[str] = Counter()
        #: Extents, by slab and slot, that a lease has in their slab's map until it is vacated.
        self._taken: set[_Place] = set()
        # Held by the lock's own `with`, in which no signal handler of Python's runs: a
        # KeyboardInterrupt on the way out of a Condition's leaves it locked for ever.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def slab_count(self) -> int:
        """Slabs that are mapped."""
        return len(self._slabs)

    def has(self, slab_id: str) -> bool:
        """Say whether a slab is mapped."""
        return slab_id in self._slabs

    def open(
        self, lease: LeaseTerms, *, until: float, is_announced: bool = False
    ) -> SharedMemoryPayload:
        """Return the lease's bytes in the mapped slab. See ``Opener.open``.

        Where it ``is_announced`` nothing there may be read before its seal (``seal_of``).
        """
        extent = extent_of(lease, self.transport)
        slab = self._slab(extent.slab_id, until)
        check_extent(extent, size_bytes=slab.size_bytes)
        if not is_announced:
            _check_sealed(slab, lease, extent)
        if self._is_revoked(lease.lease_id):
            raise taken_back(lease)
        place = (extent.slab_id, extent.slot)
        with self._lock:
            shares = not slab.is_writable or place not in self._taken
            room = slab.room(extent) if shares else slab.own_room(extent)
            self._leases[extent.slab_id] += 1
            if shares:
                self._taken.add(place)
        return SharedMemoryPayload(
            slab,
            lease,
            extent,
            room=room,
            vacate=partial(self._vacated, room, place, shares=shares),
            is_revoked=partial(self._is_revoked, lease.lease_id),
        )

    def seal_of(self, extent: Extent, *, until: float) -> Callable[[], bool]:
        """Return what says whether an extent is sealed; whoever waits is woken then.

        Raises:
            SlabOpenError, DeadlinePassedError: as for ``open``; or its slab cannot be watched.
        """
        slab = self._slab(extent.slab_id, until)
        check_extent(extent, size_bytes=slab.size_bytes)
        slab.watch(self._watch)
        return partial(slab.holds, extent)

    def forget(self, slab_ids: Collection[str]) -> None:
        """Let go of slabs that are gone, as soon as no lease is on them."""
        with self._lock:
            self._gone |= {each for each in slab_ids if each in self._slabs or each in self._asked}
            self._forget_retired()

    def close(self) -> None:
        """Forget all slabs; each is unmapped when no tensor views it any more."""
        with self._lock:
            for slab in self._slabs.values():
                slab.let_go()
            self._slabs.clear()

    def _slab(self, slab_id: str, until: float) -> ReaderSlab:
        mine = False
        try:
            with self._lock:
                while slab_id not in self._slabs and slab_id in self._asked:
                    self._wait_for_slab(slab_id, until)
                if slab_id in self._slabs:
                    return self._slabs[slab_id]
                mine = True
                self._asked.add(slab_id)
            slab = self._ask(slab_id, until)
            with self._lock:
                self._forget_retired()
                self._slabs[slab_id] = slab
            return slab
        finally:
            if mine:
                with self._lock:
                    self._asked.discard(slab_id)
                    self._changed.notify_all()

    def _wait_for_slab(self, slab_id: str, until: float) -> None:
        left = min(until - time.monotonic(), threading.TIMEOUT_MAX)
        if left <= 0:
            raise DeadlinePassedError(
                f"slab {slab_id}, which another thread asks for, had not come when the deadline "
                "passed: the server is stopped, or gone",
                facts={"slab_id": slab_id},
            )
        self._changed.wait(left)

    def _ask(self, slab_id: str, until: float) -> ReaderSlab:
        fd = self._get_slab(slab_id, until - time.monotonic())
        try:
            return ReaderSlab(slab_id, fd, self._mode)
        except BaseException:
            os.close(fd)
            raise

    def _vacated(self, room: Room, place: _Place, *, shares: bool) -> int:
        try:
            dropped = room.drop_dirtied()
        except OSError:
            if shares:
                raise  # and the place stays taken: what is leased there next is mapped anew
            dropped = 0  # this map is nobody else's, and goes
        slab_id, _ = place
        with self._lock:
            if shares:
                self._taken.discard(place)
            self._leases[slab_id] -= 1
            if not self._leases[slab_id]:
                del self._leases[slab_id]
            self._forget_retired()
        return dropped

    def _forget_retired(self) -> None:
        for slab_id, slab in list(self._slabs.items()):
            is_gone = slab_id in self._gone or is_retired(slab.control)
            if is_gone and slab_id not in self._leases:
                self._slabs.pop(slab_id).let_go()
                self._gone.discard(slab_id)


def _check_sealed(slab: ReaderSlab, lease: LeaseTerms, extent: Extent) -> None:
    found = slab.generation(extent.slot)
    if found != extent.generation:
        raise stale(lease, expected=extent.generation, found=found)
