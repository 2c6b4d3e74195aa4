"""Room under the ledger's lock: what writers ask of the pool, and who is told of changes.

The base of ``ledger.Ledger``, which adds the rest. One lock guards all tables; a method is
one step under it, does no I/O, does not wait, and calls no foreign code: whoever wants to hear
of freed room, or of other news, is called after the lock is let go (``Slots.mark`` alone is
called under it, one store into mapped memory).
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from teacher_logits.errors import DrainingError, PoolFullError
from teacher_logits.pool import SLOTS_PER_SLAB, Growth, Pool
from teacher_logits_server.lending import Lending
from teacher_logits_server.limits import ledger_caps
from teacher_logits_server.news import Listeners, News

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from teacher_logits.clock import Clock
    from teacher_logits.payload import Extent
    from teacher_logits.pool import PoolUsage
    from teacher_logits_server.lending import Slots
    from teacher_logits_server.lending.holdings import Held
    from teacher_logits_server.lending.own_device import OwnDevice
    from teacher_logits_server.limits import Limits


class Room:
    """The pool, shared by threads."""

    def __init__(self, *, limits: Limits, clock: Clock, slots: Slots) -> None:
        pool = Pool(
            budget_bytes=limits.pool_size_bytes,
            slab_size_bytes=limits.slab_size_bytes,
            slots_per_slab=SLOTS_PER_SLAB,
        )
        self._caps = ledger_caps(limits)
        self._lending = Lending(
            pool=pool,
            slots=slots,
            slab_cap=self._caps.slabs,
            max_quarantine=limits.max_quarantine,
            session_share=limits.max_session_share,
        )
        self._clock = clock
        self._listeners = Listeners()
        self._news = News()
        self._lock = threading.Lock()
        self._draining = False
        self._is_full = False

    @contextmanager
    def _step(self) -> Iterator[float]:
        """Hold the lock for one step; yields the time, and tells the news afterwards."""
        news: News | None = None
        try:
            with self._lock:
                try:
                    yield self._clock.now()
                finally:
                    news = self._take_news()
        finally:
            if news is not None:
                self._listeners.tell(news)

    def _take_news(self) -> News | None:
        """Return what this step has changed; None where that is nothing."""
        news = self._news
        news.room_freed = self._lending.freed.take()
        news.slabs_dropped = self._lending.relays.take_dropped()
        news.stored_freed = self._lending.freed.take_stored()
        if not news:
            return None
        self._news = News()
        return news

    def add_device(self, device: OwnDevice) -> None:
        """Let sessions that read device memory have what is scored there; before the first."""
        with self._step():
            self._lending.own_device = device

    def drain(self) -> None:
        """Take no new sessions from now on; those there are run out."""
        with self._step():
            self._draining = True

    @property
    def draining(self) -> bool:
        """Whether the server takes no new work."""
        return self._draining

    def on_room_freed(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after room came free, on whichever thread freed it.

        It is called outside the lock and should only wake somebody; so for the others here.
        """
        with self._step():
            self._listeners.room_freed.append(callback)

    def on_steps_changed(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after a step was completed, lost, retired or given up."""
        with self._step():
            self._listeners.steps_changed.append(callback)

    def on_teachers_changed(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after a publisher came, settled or went."""
        with self._step():
            self._listeners.teachers_changed.append(callback)

    def on_mail(self, callback: Callable[[Collection[str]], None]) -> None:
        """Have ``callback`` called with the ids of sessions for which there is mail."""
        with self._step():
            self._listeners.mail.append(callback)

    def on_slabs_dropped(self, callback: Callable[[Collection[str]], None]) -> None:
        """Have ``callback`` called with publishers' slabs whose descriptors nobody needs now."""
        with self._step():
            self._listeners.slabs_dropped.append(callback)

    def on_objects_let_go(self, callback: Callable[[Collection[str]], None]) -> None:
        """Have ``callback`` called with leases on payloads in an object store that have ended."""
        with self._step():
            self._listeners.objects_let_go.append(callback)

    def on_stored_freed(self, callback: Callable[[Collection[str]], None]) -> None:
        """Have ``callback`` called with payloads that nobody needs any more where they stay.

        Before those who wait for room are, which it may give back.
        """
        with self._step():
            self._listeners.stored_freed.append(callback)

    def check_fits(self, size_bytes: int, *, on_device: bool = False, teacher_id: str = "") -> None:
        """Refuse a payload that can never fit.

        Raises:
            PayloadInvalidError: it is larger than the budget, or than its teacher's share.
        """
        with self._step():
            self._lending.check_fits(size_bytes, on_device=on_device, teacher_id=teacher_id)

    def reserve(
        self,
        size_bytes: int,
        *,
        on_device: bool = False,
        teacher_id: str = "",
        session_id: str = "",
    ) -> Extent | Growth:
        """Take room for a writer, readers barred; or say which slab must be added first.

        ``on_device``: in the engines' device memory, if ``add_device`` brought some; so below.
        ``teacher_id``: of whose share of host memory, where the writer's teacher has one.
        ``session_id``: for whom it is scored, and counts until it is free again.

        Raises:
            PoolFullError: it does not fit now, the session has the most that one may have, or too
                much room is in quarantine.
            PayloadInvalidError: it never will.
        """
        with self._step():
            with self._noting_room():
                return self._lending.reserve(
                    size_bytes,
                    on_device=on_device,
                    teacher_id=teacher_id,
                    session_id=session_id,
                    is_shared=self._is_shared(),
                )

    def room_held(self, *, on_device: bool = False) -> Held:
        """Return what was scored for each session takes of a pool."""
        with self._step():
            return self._lending.room_held(on_device=on_device, is_shared=self._is_shared())

    def add_slab(self, slab_id: str, size_bytes: int, *, on_device: bool = False) -> None:
        """Take a slab that the caller has created into use.

        Raises:
            PoolFullError: the budget has no room for it any more; another slab came first.
        """
        with self._step():
            self._lending.add_slab(slab_id, size_bytes, on_device=on_device)

    def take_idle_slabs(self, *, on_device: bool = False) -> list[str]:
        """Drop the slabs in which nothing lies and return their ids; the caller closes them."""
        with self._step():
            return self._lending.take_idle_slabs(on_device=on_device)

    def give_back(self, extent: Extent) -> None:
        """Free room that was reserved and never published."""
        with self._step():
            self._lending.give_back(extent)

    def memory_freed(self) -> None:
        """Learn that there may be memory for one more slab: whoever waits for room looks again."""
        with self._step():
            self._lending.freed.note()

    @property
    def is_full(self) -> bool:
        """Whether the last reservation of room of the server's own found none."""
        return self._is_full

    def usage(self) -> PoolUsage:
        """Return where the bytes of the budget of host memory are."""
        with self._step():
            return self._lending.usage()

    @contextmanager
    def _noting_room(self) -> Iterator[None]:
        try:
            yield
        except PoolFullError:
            self._is_full = True
            raise
        self._is_full = False

    def _is_shared(self) -> bool:
        """Say whether several sessions may want room; the floors above know."""
        return False

    def _check_leases(self, session_id: str) -> None:
        """Refuse more leases to a session that has as many as it may."""
        self._caps.session_leases.check(self._lending.leases.count_of(session_id))

    def _check_draining(self) -> None:
        if self._draining:
            raise DrainingError(
                "the server is shutting down and takes no new sessions: try another, or this one "
                "again once it is back"
            )
