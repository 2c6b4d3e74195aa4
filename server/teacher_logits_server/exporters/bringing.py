"""Bringing: payloads that stay where they were computed, copied into a slab of the server's own.

    reader is streamed to, or its ticket did not work -> room in a slab -> fetched there, once

Promises: a payload is brought once, however many ask at a time; it is held while that lasts. Where
the pool is full it waits for room, as long as who asked first. Refuses (``ProducerLostError``) what
is lost with its node.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy

from teacher_logits.cuts import join_parts
from teacher_logits.errors import PoolFullError
from teacher_logits_server.lending.rooms import PayloadRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from teacher_logits.payload import Extent, Payload
    from teacher_logits.terms import StoredTicket
    from teacher_logits_server.engines.stored import StoredPart
    from teacher_logits_server.ledger import Ledger


CLOSE_SECONDS = 5.0


class Stores(Protocol):
    """Where payloads stay; ``replicas.stores``."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when a ticket may have come."""

    def ticket(self, payload_id: str, lease_id: str) -> StoredTicket | None:
        """Return what a lease's reader shows the holders; None while they have not all of it."""

    def is_handed_out(self, payload_id: str) -> bool:
        """Whether all holders of a payload live."""

    def revoke(self, lease_ids: Iterable[str]) -> None:
        """Hand nothing out for leases that have ended."""

    def fetch(self, payload_id: str, *, seconds: float) -> Sequence[tuple[StoredPart, memoryview]]:
        """Return a payload's parts with their bytes."""


class Slabs(Protocol):
    """Where they are copied to; ``slabs.ServerSlabs``."""

    def room_for(self, ledger: PayloadRoom, size_bytes: int) -> Extent:
        """Reserve room, and create a slab for it where none has any."""

    def room(self, extent: Extent) -> memoryview:
        """Return an extent's bytes, writable."""


class Bringing:
    """Brings payloads to the server, each on a thread of its own."""

    def __init__(self, *, ledger: Ledger, slabs: Slabs, stores: Stores) -> None:
        self._ledger = ledger
        self._slabs = slabs
        self._stores = stores
        self._under_way: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._freed = threading.Condition()
        self._freed_count = 0
        ledger.on_room_freed(self._on_freed)

    def start(self, session_id: str, lease_id: str, *, seconds: float) -> Future[None] | None:
        """Have a lease's payload brought within ``seconds``; None where it lies in a slab.

        Raises:
            TeacherLogitsError: whatever the ledger says of session and lease.
        """
        with self._ledger.pin(session_id, lease_id) as pinned:
            if pinned.extent is not None:
                return None
            payload_id = pinned.payload.payload_id
            with self._lock:
                if (known := self._under_way.get(payload_id)) is not None:
                    return known
                future = self._under_way[payload_id] = Future()
        until = time.monotonic() + seconds
        run = partial(self._run, session_id, lease_id, payload_id, future, until)
        threading.Thread(target=run, name="teacher-logits-bring", daemon=True).start()
        return future

    def close(self) -> None:
        """Wait for what is being written into slabs, before these are closed; but not for long."""
        with self._lock:
            under_way = list(self._under_way.values())
        wait(under_way, timeout=CLOSE_SECONDS)

    def _run(
        self, session_id: str, lease_id: str, payload_id: str, future: Future[None], until: float
    ) -> None:
        error: BaseException | None = None
        try:
            self._bring(session_id, lease_id, until)
        except BaseException as failed:
            error = failed
        with self._lock:
            del self._under_way[payload_id]
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def _bring(self, session_id: str, lease_id: str, until: float) -> None:
        with self._ledger.pin(session_id, lease_id) as pinned:
            payload = pinned.payload
            if pinned.extent is not None:
                return  # by who asked a moment before
            extent = self._take_room(payload, until)
            try:
                found = self._stores.fetch(
                    payload.payload_id, seconds=max(0.0, until - time.monotonic())
                )
                parts = [(each.rows, each.positions, data) for each, data in found]
                with memoryview(self._slabs.room(extent))[: payload.size_bytes] as room:
                    join_parts(payload, parts, room, copy=_copy)
            except BaseException:
                self._ledger.give_back(extent)
                raise
            self._ledger.bring(payload.payload_id, extent)

    def _take_room(self, payload: Payload, until: float) -> Extent:
        size_bytes = payload.size_bytes
        reserve = partial(self._ledger.reserve, size_bytes, teacher_id=payload.teacher_id)
        wanted = PayloadRoom(size_bytes=size_bytes, take=reserve, ledger=self._ledger)
        while True:
            with self._freed:
                seen = self._freed_count
            try:
                return self._slabs.room_for(wanted, size_bytes)
            except PoolFullError:
                if not self._await_freed(seen, until):
                    raise

    def _await_freed(self, seen: int, until: float) -> bool:
        """Wait for more room to come free than had been seen; return whether any did."""
        with self._freed:
            left = max(0.0, until - time.monotonic())
            return self._freed.wait_for(lambda: self._freed_count != seen, left)

    def _on_freed(self) -> None:
        with self._freed:
            self._freed_count += 1
            self._freed.notify_all()


class StoredTickets:
    """Tickets of payloads that stay where they were computed.

    Asked again for a lease that has one, or where a holder is gone, it has the payload brought:
    what its reader was handed did not work.
    """

    def __init__(self, *, stores: Stores, bringing: Bringing) -> None:
        self._stores = stores
        self._bringing = bringing
        self._given: set[str] = set()
        self._brought: dict[str, Future[None]] = {}
        self._tell: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when a ticket may have come; it should only wake."""
        self._tell = callback
        self._stores.on_change(callback)

    def ticket(
        self, session_id: str, lease_id: str, payload_id: str, *, seconds: float
    ) -> StoredTicket | None:
        """Return a lease's ticket; None while there is none, or its payload is being brought.

        Raises:
            ProducerLostError: it is lost with its node.
            PoolFullError, DeadlinePassedError: it could not be brought.
        """
        if lease_id not in self._given and self._stores.is_handed_out(payload_id):
            ticket = self._stores.ticket(payload_id, lease_id)
            if ticket is not None:
                self._given.add(lease_id)
            return ticket
        under_way = self._brought.get(lease_id)
        if under_way is not None and under_way.done():
            self._brought.pop(lease_id)
            under_way.result()
            return None
        if under_way is None:
            future = self._bringing.start(session_id, lease_id, seconds=seconds)
            if future is not None:
                self._brought[lease_id] = future
                future.add_done_callback(lambda _: self._tell())
        return None

    def let_go(self, lease_ids: Iterable[str]) -> None:
        """Learn that leases have ended."""
        for lease_id in lease_ids:
            self._given.discard(lease_id)
            self._brought.pop(lease_id, None)
        self._stores.revoke(lease_ids)


def _copy(found: memoryview, room: memoryview) -> None:
    """Copy bytes; other threads run meanwhile."""
    numpy.copyto(numpy.frombuffer(room, numpy.uint8), numpy.frombuffer(found, numpy.uint8))
