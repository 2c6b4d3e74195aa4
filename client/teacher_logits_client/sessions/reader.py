"""The reader: how one session's leases are opened, and how they go back.

It has the session's openers (``openers``), tries another where the settled one fails
(``fallback``), and owns the broker line, which it lets go of after the session is closed and the
last lease is back, and not before: its end tells the server that nobody here reads any more.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import DeadlinePassedError, NotAvailable, TeacherLogitsError
from teacher_logits.transport import Transport
from teacher_logits_client.config import MapMode
from teacher_logits_client.openers import OpenedLease, is_failure_of_leases, is_vacated
from teacher_logits_client.openers.own import OwnPayload
from teacher_logits_client.payloads import LeasedPayload
from teacher_logits_client.sessions.late_proofs import LateProofs
from teacher_logits_client.sessions.line_watch import LineWatch
from teacher_logits_client.sessions.openers import SessionOpeners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.terms import LeaseTerms, ObjectTicket, StepGrant, StoredTicket
    from teacher_logits.transport import Settlement
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.openers import OpenedPayload
    from teacher_logits_client.openers.buffers import BufferPool
    from teacher_logits_client.openers.devices import Devices
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.sessions.agreement import Agreed

_log = logging.getLogger("teacher_logits_client")

RETURN_TIMEOUT_SECONDS = 5.0
"""How long one try to return a lease may take; it is tried again."""


class Reader:
    """Opens the leases of one session."""

    def __init__(
        self,
        agreed: Agreed,
        *,
        calls: Calls,
        returner: Returner,
        buffers: BufferPool,
        mode: MapMode,
        check_digest: bool,
        devices: Devices,
    ) -> None:
        self.line = line = agreed.line
        self._session_id = agreed.terms.session_id
        self._calls = calls
        self._returner = returner
        self._mode = mode
        self._check_digest = check_digest
        self._devices = devices
        self._settled = {s.writer_id: s.transport for s in agreed.terms.settlements}
        self._watch = None if line is None else LineWatch(line, when_ended=self.forget_slabs)
        self._late = LateProofs(agreed, calls=calls, devices=devices, settle=self.settle)
        self._openers = SessionOpeners(
            agreed,
            devices=devices,
            mode=mode,
            buffers=buffers,
            read=self._read,
            read_as_written=partial(self._read, as_written=True),
            count=returner.count,
            withdraw=self._late.withdraw,
            put_object=self._put_object,
        )
        self._lock = threading.Lock()
        self._out: set[str] = set()
        self._stuck: set[str] = set()
        #: Leases that go back unread; each change is one step of the set.
        self._unread: set[str] = set()
        self._closed = False
        self.when_returned: Callable[[], None] = lambda: None
        """Called on the returner's thread after each return, while nobody waits."""

    @property
    def transports(self) -> dict[str, Transport | None]:
        """The settled transport of each writer, by its id."""
        return dict(self._settled)

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Learn of writers that came after the handshake, or came back from elsewhere."""
        if settlements:
            with self._lock:
                self._settled = {**self._settled, **{s.writer_id: s.transport for s in settlements}}
            self._late.prove(settlements)

    def try_probes(self, probes: Sequence[DeviceProbe]) -> None:
        """Try the device memory of writers that have come, soon; returns at once."""
        self._late.try_probes(probes)

    def forget_slabs(self, slab_ids: Sequence[str] | None = None) -> None:
        """Let go of slabs that are gone, soon, and once no lease is on them; returns at once.

        Of all of them where none is named, as with the line's end, after which nothing is granted.
        On the thread of the returns, since a device may have to be waited for.
        """
        self._returner.later(partial(self._openers.forget_slabs, slab_ids))

    def open(self, lease: LeaseTerms, *, until: float, keep_if_late: bool = False) -> LeasedPayload:
        """Return a lease's payload; a lease that cannot be opened is given back.

        With ``keep_if_late`` one whose deadline passed stays the caller's, to be opened again
        or discarded.

        Raises:
            TransportFailure: no transport that the session may use brought the bytes.
            StalePayloadError, DeadlinePassedError: see ``Opener.open``.
        """
        try:
            (opened,) = self.open_bytes([lease], until=until, keep=True)
            return self.adopt(opened)
        except BaseException as error:  # an interrupt's too, whenever it comes
            is_kept = keep_if_late and isinstance(error, DeadlinePassedError)
            if not is_kept and lease.lease_id not in self._stuck:
                self.discard(lease.lease_id)
            raise

    def open_ahead(self, grant: StepGrant, *, until: float) -> tuple[OpenedLease, ...] | None:
        """Return the memory of a grant; None of an announced one that is copied when it is taken.

        Raises:
            TransportFailure, StalePayloadError, DeadlinePassedError: all leases stay the caller's.
        """
        if grant.awaited and self._mode is MapMode.COPY:
            return None
        return tuple(
            self.open_bytes(grant.leases, until=until, keep=True, is_announced=bool(grant.awaited))
        )

    def seals_of(self, grant: StepGrant, *, until: float) -> tuple[Callable[[], bool], ...]:
        """Return what says of each payload that a grant awaits whether it is sealed.

        Whoever waits on the line is woken then.

        Raises:
            TransportFailure, DeadlinePassedError: seals there cannot be seen.
        """
        return tuple([self._openers.seal_of(extent, until=until) for extent in grant.awaited])

    def opens_at_once(self, grant: StepGrant) -> bool:
        """Say whether a grant can be opened without waiting for anybody."""
        return all(map(self._openers.has, grant.awaited)) and all(
            self._openers.opens_at_once(lease, settled=self._settled.get(lease.writer_id))
            for lease in grant.leases
        )

    def open_bytes(
        self,
        leases: Sequence[LeaseTerms],
        *,
        until: float,
        keep: bool = False,
        is_announced: bool = False,
    ) -> list[OpenedLease]:
        """Return the memory of leases that belong together, to be adopted or put away.

        Where one cannot be opened all are given back, unless ``keep`` says otherwise or it is no
        failure of theirs: then all stay the caller's. What ``is_announced`` is not sealed yet.

        Raises:
            TransportFailure, StalePayloadError, DeadlinePassedError: as for ``open``.
        """
        with self._lock:
            self._out.update(lease.lease_id for lease in leases)
        opened: list[OpenedLease] = []
        try:
            for lease in leases:
                memory, transport = self._open(lease, until, is_announced=is_announced)
                opened.append(OpenedLease(lease=lease, memory=memory, transport=transport))
                if self._mode is MapMode.COPY:
                    own = OwnPayload(memory, lease.payload.columns)
                    opened[-1] = replace(opened[-1], memory=own)
                    if transport is Transport.CUDA_IPC:
                        own.copy_by(until, self._devices.calls)
                    else:
                        own.copy()
        except BaseException as error:
            self._stuck |= {e.lease.lease_id for e in opened if not is_vacated(e.memory)}
            for lease in (each for each in leases if each.lease_id not in self._stuck):
                if keep or not is_failure_of_leases(error):
                    self._no_longer_out(lease.lease_id)
                else:
                    self.discard(lease.lease_id)
            raise
        return opened

    def _open(
        self, lease: LeaseTerms, until: float, *, is_announced: bool
    ) -> tuple[OpenedPayload, Transport]:
        settled = self._settled.get(lease.writer_id)
        has_slab = lease.extent is not None and settled is not Transport.LOCAL
        if has_slab and self._watch is not None:
            self._watch.start()
        if is_announced:
            return self._openers.open_announced(lease, until=until)
        return self._openers.open(lease, settled=settled, until=until)

    def adopt(self, opened: OpenedLease) -> LeasedPayload:
        """Return the payload of an opened lease, which is its owner's from now on."""
        return self.payload_of(opened).adopt()

    def payload_of(self, opened: OpenedLease) -> LeasedPayload:
        """Return the payload of an opened lease, to be adopted or dropped."""
        lease_id = opened.lease.lease_id
        return LeasedPayload(
            lease=opened.lease,
            opened=opened.memory,
            transport=opened.transport,
            returner=self._returner,
            give_back=partial(self._give_back, lease_id),
            check_digest=self._check_digest,
        )

    def put_away(self, opened: Sequence[OpenedLease]) -> None:
        """Let go of memory that nobody adopted; its leases stay the session's, unread."""
        for each in opened:
            if is_vacated(each.memory):
                self._no_longer_out(each.lease.lease_id)

    def note_unread(self, lease_id: str) -> None:
        """Have a lease go back as one that nobody has read: its step still waits for us."""
        self._unread.add(lease_id)

    def discard(self, lease_id: str) -> None:
        """Give back a lease that nobody has opened, unread; safe in a finaliser."""
        self.note_unread(lease_id)
        self._returner.later(lambda: self._give_back(lease_id))

    def give_up(self, request_id: str) -> None:
        """Give back what a request was granted, or will be; on the returner's thread."""
        self._give_back("", request_id)

    def close(self) -> None:
        """Let go of the line and the slabs once the last lease is back."""
        with self._lock:
            self._closed = True
            idle = not self._out
        if idle:
            self.let_go()

    def _read(self, lease_id: str, at: int, timeout: float, **more: bool) -> Iterator[bytes]:
        read = partial(self._calls.read_payload, self._session_id, lease_id, at)
        return read(timeout=timeout, **more)

    def _put_object(self, lease_id: str, **given: float) -> ObjectTicket | StoredTicket:
        return self._calls.objects.put(self._session_id, lease_id, **given)

    def _give_back(self, lease_id: str, request_id: str = "") -> None:
        """Tell the server; on the returner's thread. The line stays until it has heard."""
        with self._lock:
            self._out.add(lease_id or request_id)
        way = self._calls if self.line is None or self.line.has_ended else self.line
        try:
            if way is not self._calls or not self._calls.is_closed:
                way.release(
                    self._session_id,
                    lease_id,
                    timeout=RETURN_TIMEOUT_SECONDS,
                    request_id=request_id,
                    unread=lease_id in self._unread,
                )
        except NotAvailable:
            raise  # to be tried again
        except TeacherLogitsError as error:
            # The server ended the lease or the session, or lives anew: nothing is owed.
            _log.debug("%s is gone already: %s", lease_id or request_id, error.message)
        self._unread.discard(lease_id)
        self._no_longer_out(lease_id or request_id)
        self.when_returned()

    def _no_longer_out(self, what: str) -> None:
        with self._lock:
            self._out.discard(what)
            finished = self._closed and not self._out
        if finished:
            self.let_go()

    def let_go(self) -> None:
        """Let go of the line and the slabs; tensors keep what they view."""
        self._late.close()
        if self._watch is not None:
            self._watch.stop()
        if self.line is not None:
            self.line.close()
        self._openers.close()
