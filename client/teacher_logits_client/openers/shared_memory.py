"""Opener for ``shared_memory``: the writer's slab, mapped here once for the whole session.

The bytes move for nobody. Every lease shows what the writer wrote, whoever writes into
another: pages that the reader dirtied are dropped when their lease is vacated, and a lease on
room that another has in the slab's map gets a private map of its own. A slab whose writer
has let it go, or that the server says is gone, is unmapped with the last lease on it.

The host twin of a device slab is mapped here too, for its own sake (a payload with a host copy) or
for that of ``cuda_ipc``. What lies on the device alone is refused: the twin has holes there.

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

from teacher_logits.errors import DeadlinePassedError, SlabOpenError
from teacher_logits.slab import check_extent, is_retired
from teacher_logits.transport import Transport
from teacher_logits_client.config import MapMode
from teacher_logits_client.openers import extent_of, host_bytes_of, stale, taken_back
from teacher_logits_client.openers.mapped_payload import SharedMemoryPayload
from teacher_logits_client.openers.maps import ReaderSlab

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_client.line import PassedSlab
    from teacher_logits_client.openers.devices import Devices
    from teacher_logits_client.openers.maps import Room, Watch

    GetSlab = Callable[[str, float], PassedSlab]
    _Place = tuple[str, int]


class SharedMemoryOpener:
    """Maps the slabs of one session, each once.

    Args:
        get_slab: returns a slab, whose descriptor the opener closes; called with the slab's id
            and the seconds that it may take.
        mode: ``COW``, ``READ_ONLY`` or ``PINNED``; for ``COPY`` the caller copies, and maps
            read-only.
        is_revoked: whether a lease was taken back by force, whatever its room holds.
        pinner: whose driver, which is known, pins the slabs' pages for ``PINNED``.
        watch: has whoever waits woken when a file is touched, and returns what ends that.
    """

    transport = Transport.SHARED_MEMORY

    def __init__(
        self,
        get_slab: GetSlab,
        *,
        mode: MapMode = MapMode.COW,
        is_revoked: Callable[[str], bool] = lambda lease_id: False,
        pinner: Devices | None = None,
        watch: Watch = lambda fd: lambda: None,
    ) -> None:
        self._get_slab = get_slab
        self._is_revoked = is_revoked
        self._watch = watch
        self._mode = mode
        self._devices = pinner
        self._pinner = None if pinner is None else pinner.known
        #: Called with each slab that was let go of, by whoever did so.
        self.when_forgotten: Callable[[str], None] = lambda slab_id: None
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
        """Return the lease's bytes in the mapped slab. See ``Opener.open``."""
        if lease.on_device:
            raise SlabOpenError(
                f"payload {lease.payload.payload_id} lies in device memory alone, and its writer "
                "made no host copy of it",
                facts={"payload_id": lease.payload.payload_id},
            )
        return self.open_host_part(lease, self.transport, until=until, is_announced=is_announced)

    def open_host_part(
        self,
        lease: LeaseTerms,
        transport: Transport,
        *,
        until: float,
        is_announced: bool = False,
    ) -> SharedMemoryPayload:
        """Return what of a lease lies on the host, for ``transport``; otherwise as ``open``.

        Where it ``is_announced`` nothing there may be read before its seal (``seal_of``).
        """
        extent = extent_of(lease, transport)
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
        # Of what lies on a device only columns over rows are handed out here.
        written = room.part(*host_bytes_of(lease.payload)) if lease.on_device else room
        return SharedMemoryPayload(
            slab,
            lease,
            extent,
            room=room,
            vacate=partial(self._vacated, written, place, shares=shares),
            is_revoked=partial(self._is_revoked, lease.lease_id),
            pinner=None if slab.is_twin else self._pinner,
        )

    def device_part(self, slab: ReaderSlab, *, until: float) -> DeviceMemoryPart | None:
        """Return a slab's part on a device; None where the server passes this session none.

        It is asked for again where it did not come with the slab: the session may have been settled
        to read it there since.
        """
        if slab.device is None and slab.is_twin:
            passed = self._get_slab(slab.slab_id, until - time.monotonic())
            os.close(passed.descriptor)
            slab.device = passed.device
        return slab.device

    def seal_of(self, extent: Extent, *, until: float) -> Callable[[], bool]:
        """Return what says whether an extent is sealed; whoever waits is woken then.

        Raises:
            SlabOpenError, DeadlinePassedError: as for ``open``; or its slab cannot be watched.
        """
        slab = self._slab(extent.slab_id, until)
        check_extent(extent, size_bytes=slab.size_bytes)
        slab.watch(self._watch)
        return partial(slab.holds, extent)

    def forget(self, slab_ids: Collection[str] | None) -> None:
        """Let go of slabs that are gone, or of all, as soon as no lease is on them."""
        with self._lock:
            known = self._slabs.keys() | self._asked
            self._gone |= known if slab_ids is None else known.intersection(slab_ids)
            forgotten = self._forget_retired()
        self._say_forgotten(forgotten)

    def close(self) -> None:
        """Forget all slabs; each is unmapped when no tensor views it any more."""
        with self._lock:
            forgotten = list(self._slabs)
            for slab in self._slabs.values():
                slab.let_go()
            self._slabs.clear()
        self._say_forgotten(forgotten)

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
                forgotten = self._forget_retired()
                self._slabs[slab_id] = slab
            self._say_forgotten(forgotten)
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
        passed = self._get_slab(slab_id, until - time.monotonic())
        slab = ReaderSlab(slab_id, passed, self._mode)
        if self._devices is None or self._pinner is None or slab.is_twin:
            return slab
        return self._devices.calls.before(
            until,
            partial(slab.pin, self._pinner),
            undo=lambda slab: None,  # it is unpinned as it goes
            what=f"the pinning of slab {slab_id}",
        )

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
            forgotten = self._forget_retired()
        self._say_forgotten(forgotten)
        return dropped

    def _forget_retired(self) -> list[str]:
        """Forget slabs that are gone and have no lease, and return them. Under the lock."""
        forgotten = []
        for slab_id, slab in list(self._slabs.items()):
            is_gone = slab_id in self._gone or is_retired(slab.control)
            if is_gone and slab_id not in self._leases:
                self._slabs.pop(slab_id).let_go()
                self._gone.discard(slab_id)
                forgotten.append(slab_id)
        return forgotten

    def _say_forgotten(self, slab_ids: Collection[str]) -> None:
        """Say what was forgotten; outside the lock, since a driver may be slow."""
        for slab_id in slab_ids:
            self.when_forgotten(slab_id)


def _check_sealed(slab: ReaderSlab, lease: LeaseTerms, extent: Extent) -> None:
    found = slab.generation(extent.slot)
    if found != extent.generation:
        raise stale(lease, expected=extent.generation, found=found)
