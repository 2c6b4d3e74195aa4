"""The ``ray_object`` transport: a leased payload as one flat object in a Ray cluster's store.

    reader --PutObject--> here --put--> Ray process --copy, once--> object store
           <--ticket-----      <--done--            --keep--> holder
           ==== token ===================================> holder
           <=== reference ================================

The first reader has it put, all share it, and it is let go of when the last one's lease ends. The
bytes lie in a slab until they are put, and the payload is pinned for that; what stays where it was
computed has tickets of its own (``bringing``). References travel from the holder in Ray's own
messages, and in none of ours. What is out and what waits is decided in ``object_table``; nobody
here waits for Ray (``ray_link``). Where the cluster is lost, readers are streamed to, and it is
joined anew as soon as there is one.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError, TeacherLogitsError
from teacher_logits.slab import CONTROL_BYTES
from teacher_logits.terms import ObjectTicket
from teacher_logits.transport import Transport
from teacher_logits.views import ObjectStoreView
from teacher_logits_server.exporters import object_errors
from teacher_logits_server.exporters.object_table import Drop, ObjectTable, Put, Undo
from teacher_logits_server.exporters.ray_channel import number, text
from teacher_logits_server.exporters.ray_holder import token_of
from teacher_logits_server.exporters.shared_memory import descriptor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from teacher_logits.terms import StoredTicket
    from teacher_logits_server.exporters.bringing import StoredTickets
    from teacher_logits_server.exporters.ray_channel import Message
    from teacher_logits_server.exporters.ray_link import RayLink
    from teacher_logits_server.exporters.shared_memory import Descriptors
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.lending.rooms import Pinned

_log = logging.getLogger(__name__)

REJOIN_SECONDS = 10.0
"""How often a lost cluster is looked for."""

_STORE_SHARE = 0.8
"""Of a call's time, how much a put may wait for room that others have in the store: the rest is for
its answer, which has the numbers."""


class RayObjectExporter:
    """Has leased payloads put into the object store, and says who hands them out.

    Args:
        slabs: where slabs are looked for, one behind the other.
        link: the Ray process, which is the exporter's from here on.
        join: makes another, or raises a ``ConfigError``.
        stored: has the tickets of what stays where it was computed, if anything does.
    """

    transport = Transport.RAY_OBJECT

    def __init__(
        self,
        *,
        ledger: Ledger,
        slabs: Sequence[Descriptors],
        link: RayLink,
        join: Callable[[], RayLink],
        stored: StoredTickets | None = None,
    ) -> None:
        self._ledger = ledger
        self._slabs = slabs
        self._join = join
        self._stored = stored
        self._use(link)
        self._pins: dict[str, ExitStack] = {}
        self._is_lost = False
        self._over = threading.Event()
        self._tell: Callable[[], None] = lambda: None
        # Taken for a look into the table and no longer; never while the ledger's is held.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Take readers from now on."""
        self._ledger.on_objects_let_go(self._let_go)
        self._offer()

    def stop(self) -> None:
        """Have the Ray process end, and all objects with it. Doing so twice is fine."""
        self._over.set()
        with self._lock:
            self._link.hang_up()

    def close(self) -> None:
        """Wait for the end of the Ray process."""
        self._link.stop()

    def _use(self, link: RayLink) -> None:
        """Put into a cluster that was joined; nothing is there yet."""
        joined = link.joined
        self._link, self._joined, self.holder = link, joined, joined.holder
        self._store_used = self._spilled = self._restarts = 0
        self._table = ObjectTable(epoch=joined.epoch, budget_bytes=joined.budget_bytes)

    def _offer(self) -> None:
        self._ledger.add_objects(self._joined.challenge)
        self._link.listen(self._hear, self._lose)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when a ticket may have come, or room; it should only wake."""
        self._tell = callback
        if self._stored is not None:
            self._stored.on_change(callback)

    def ticket(
        self, session_id: str, lease_id: str, *, seconds: float
    ) -> ObjectTicket | StoredTicket | None:
        """Return what a lease's reader shows the holder; None while its payload is being put.

        ``seconds`` is how long the put may wait for room that others have in the store.

        Raises:
            ObjectLostError: the cluster is gone, or the payload could not be put.
            PoolFullError: it is larger than the budget, or the store stayed full.
            ProducerLostError: it is lost with the node that computed it.
            NotAllowedError: the lease is read another way.
            TeacherLogitsError: whatever the ledger says of the session and the lease.
        """
        with ExitStack() as pin:
            pinned = pin.enter_context(self._ledger.pin(session_id, lease_id))
            if not pinned.as_object:
                raise object_errors.not_settled(lease_id)
            payload = pinned.payload
            if pinned.extent is None and self._stored is not None:
                asked = session_id, lease_id, payload.payload_id
                return self._stored.ticket(*asked, seconds=seconds)
            with self._lock:
                if self._is_lost:
                    raise object_errors.cluster_lost()
                self._table.find(lease_id)  # what failed is told before it is tried again
                work = self._table.ask(lease_id, payload.payload_id, payload.size_bytes)
                if work is not None and self._put(work, pinned, seconds):
                    self._pins[work.object_id] = pin.pop_all()
                object_id = self._table.find(lease_id)
        self._check_lasts(session_id, lease_id)
        if object_id is None:
            return None
        token = token_of(self._joined.key, object_id, lease_id)
        return ObjectTicket(holder=self.holder, object_id=object_id, token=token)

    def waits(self, lease_id: str) -> bool:
        """Say whether a lease waits for room in the budget."""
        with self._lock:
            return self._table.waits(lease_id) is not None

    def give_up(self, lease_id: str) -> None:
        """Learn that nobody waits for a lease's ticket any more."""
        with self._lock:
            self._table.give_up(lease_id)

    def too_late(self, lease_id: str, waited: float) -> TeacherLogitsError:
        """Return the error for a ticket that did not come in time."""
        with self._lock:
            size_bytes = self._table.waits(lease_id)
            if size_bytes is not None:
                return self._table.full(size_bytes)
        return object_errors.not_there(lease_id, waited)

    def view(self) -> ObjectStoreView:
        """Describe the objects and the store at this instant."""
        with self._lock:
            return ObjectStoreView(
                state="lost" if self._is_lost else "joined",
                budget_bytes=self._table.budget_bytes,
                used_bytes=self._table.used_bytes,
                object_count=len(self._table),
                waiting_count=self._table.waiting_count,
                store_bytes=self._joined.store_bytes,
                store_used_bytes=self._store_used,
                spilled_bytes=self._spilled,
                holder=self.holder.name,
                holder_restarts=self._restarts,
            )

    def _check_lasts(self, session_id: str, lease_id: str) -> None:
        """Have no object for a lease that ended between its look-up and its entry here."""
        try:
            with self._ledger.pin(session_id, lease_id):
                pass
        except TeacherLogitsError:
            self._let_go([lease_id])
            raise

    # To the Ray process, under the lock

    def _put(self, work: Put, pinned: Pinned, seconds: float) -> bool:
        """Send a payload's slab to be put; return whether it is on its way."""
        extent = pinned.room
        try:
            descriptor = descriptor_of(self._slabs, extent.slab_id)
        except OSError as error:
            said = f"the server cannot pass its slab: {error.strerror}"
            self._table.put_failed(work.object_id, object_errors.not_put(work.object_id, said))
            return False
        runs = [[s.source_offset_bytes, s.offset_bytes, s.size_bytes] for s in pinned.segments]
        self._link.send(
            "put",
            descriptor=descriptor,
            object=work.object_id,
            start=CONTROL_BYTES + extent.offset_bytes,
            room=extent.size_bytes,
            size=pinned.payload.size_bytes,
            runs=runs,
            milliseconds=int(seconds * 1000 * _STORE_SHARE),
        )
        return True

    def _send(self, undo: Undo) -> None:
        if isinstance(undo, Drop):
            self._link.send("drop", object=undo.object_id)
        else:
            self._link.send("revoke", object=undo.object_id, lease=undo.lease_id)

    # From the Ray process, and from the ledger

    def _hear(self, message: Message) -> None:
        """Learn what the Ray process says, on the thread that it is heard on."""
        op, object_id = text(message, "op"), text(message, "object")
        undo: list[Undo] = []
        pin: ExitStack | None = None
        with self._lock:
            if op == "put_done":
                undo = self._table.put_done(object_id)
                pin = self._pins.pop(object_id, None)
            elif op == "put_failed":
                self._table.put_failed(object_id, object_errors.failure_of(message))
                pin = self._pins.pop(object_id, None)
            elif op == "holder":
                self._restarts = number(message, "restarts")
                self.holder = replace(self.holder, name=text(message, "name"))
                _log.warning("another holder", extra={"facts": {"holder": self.holder.name}})
            elif op == "store":
                self._note_store(number(message, "used"), number(message, "spilled"))
            for each in undo:
                self._send(each)
        if pin is not None:
            pin.close()
        self._tell()

    def _note_store(self, used: int, spilled: int) -> None:
        if spilled > self._spilled:
            facts = {"spilled_bytes": spilled, "store_used_bytes": used}
            _log.warning("the object store spills to disk", extra={"facts": facts})
        self._store_used, self._spilled = used, spilled

    def _let_go(self, lease_ids: Collection[str]) -> None:
        """Learn that leases have ended: their objects go with the last of them."""
        if self._stored is not None:
            self._stored.let_go(lease_ids)
        with self._lock:
            for each in self._table.let_go(lease_ids):
                self._send(each)
        self._tell()

    def _lose(self) -> None:
        """Learn that the Ray process is gone: whoever reads from here on is streamed to."""
        with self._lock:
            self._is_lost = True
            pins, self._pins = list(self._pins.values()), {}
        for pin in pins:
            pin.close()
        if not self._over.is_set():
            self._ledger.lose_objects()
            _log.error("the Ray cluster is gone", extra={"facts": {"holder": self.holder.name}})
            threading.Thread(target=self._rejoin, name="teacher-logits-join", daemon=True).start()
        self._tell()

    def _rejoin(self) -> None:
        """Join a cluster again, as soon as there is one and while the server lives."""
        self._link.stop()
        while not self._over.wait(REJOIN_SECONDS):
            try:
                link = self._join()
            except ConfigError as error:
                _log.debug("no cluster yet: %s", error.message)
                continue
            with self._lock:
                if self._over.is_set():
                    link.hang_up()
                    return
                self._use(link)
                self._is_lost = False
            self._offer()
            return
