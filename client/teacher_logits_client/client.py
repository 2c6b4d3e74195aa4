"""The client: one connection to one server, and the sessions that are opened over it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import RequestInvalidError, ServerUnreachableError
from teacher_logits.profiles import StudentProfile
from teacher_logits.transport import Transport
from teacher_logits.words import word_of, words_of
from teacher_logits_client.config import (
    HostCopies,
    MapMode,
    check_timeout,
)
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.line import Line
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.devices import Devices
from teacher_logits_client.payloads.returns import Returner
from teacher_logits_client.publishing import (
    DEFAULT_POOL_BYTES,
    DEFAULT_SLAB_BYTES,
    WRITABLE,
    PublisherSettings,
    open_publisher,
)
from teacher_logits_client.sessions.agreement import shake_hands
from teacher_logits_client.sessions.reader import Reader
from teacher_logits_client.steps.mailbox import Mailbox
from teacher_logits_client.student import Session

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from teacher_logits.addresses import Address
    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.credentials import Credentials
    from teacher_logits_client.leased import ClientStatistics
    from teacher_logits_client.openers.device_choice import DeviceName
    from teacher_logits_client.publishing.publisher import Publisher
    from teacher_logits_client.sessions.agreement import Agreed


class Client:
    """A client of one server; a context manager. Made by ``connect``, used from any thread.

    It belongs to the process that made it: in a forked child every call is refused.
    """

    def __init__(
        self, calls: Calls, *, timeout: float, device_memory: DeviceMemory | None = None
    ) -> None:
        """Take over connections that work; ``connect`` does this."""
        self._calls = calls
        self._timeout = timeout
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._returner = Returner(
            finish=partial(_finish, calls, self._readers), hang_up=calls.close
        )
        self._buffers = BufferPool()
        self._devices = Devices(device_memory)
        self._sessions: weakref.WeakSet[Session | Publisher] = weakref.WeakSet()
        # A client that is dropped must not leave its thread behind.
        self._end = weakref.finalize(self, self._returner.stop)
        self._end.atexit = False

    @property
    def address(self) -> Address:
        """Where the server is."""
        return self._calls.address

    @property
    def credentials(self) -> Credentials:
        """What it shows there: its token and certificates."""
        return self._calls.credentials

    def open_session(
        self,
        profile: StudentProfile,
        *,
        timeout: float | None = None,
        mode: MapMode = MapMode.COW,
        check_digest: bool = False,
        prefetch: int = 1,
    ) -> Session:
        """Be admitted as a student rank, and settle how payloads come.

        Args:
            profile: what this rank says of itself; hints are filled in where it has none.
            timeout: seconds for the whole handshake; the client's where not given.
            mode: how memory that is shared with the writer is mapped.
            check_digest: compare the digest of each payload at the end of its lease with the
                one at its start. Reads every byte twice; for ``local``, where nothing else
                keeps a reader from writing into the writer's memory.
            prefetch: registered steps that are asked for ahead of the one acquired, 0 to 15:
                each holds its room from when it is ready, and where bytes are streamed they
                come in the background.

        Raises:
            RequestInvalidError: ``profile`` is none, or wants no transport at all, or
                ``prefetch`` is no such number.
            SessionRefusedError: with every rule that the profile breaks.
            NoCommonTransportError: with every refusal.
            UnknownTeacherError: with the teachers there are.
            NotAvailable: the server, the teacher or some of its publishers did not come within
                ``timeout``; it says which.
            ConfigError: pages are to be pinned, and there is no driver that could.
        """
        self._check()
        _check_profile(profile)
        mode = word_of(MapMode, mode, what="mode")
        seconds = self._seconds(timeout, what="open_session")
        if mode is MapMode.PINNED:
            self._devices.check_can_pin(timeout=seconds)
        late, mailbox = _LateLeases(), Mailbox(prefetch)
        agreed = shake_hands(
            self._calls,
            profile,
            timeout=seconds,
            make_line=partial(_make_line, late, mailbox),
            devices=self._devices,
        )
        reader = self._make_reader(agreed, mode=mode, check_digest=check_digest)
        late.reader = weakref.ref(reader)
        session = Session(
            agreed,
            calls=self._calls,
            returner=self._returner,
            reader=reader,
            mailbox=mailbox,
            owner=self,
            timeout=self._timeout,
        )
        self._sessions.add(session)
        return session

    def _make_reader(self, agreed: Agreed, *, mode: MapMode, check_digest: bool) -> Reader:
        reader = Reader(
            agreed,
            calls=self._calls,
            returner=self._returner,
            buffers=self._buffers,
            mode=mode,
            check_digest=check_digest,
            devices=self._devices,
        )
        self._readers.add(reader)
        return reader

    def open_publisher(
        self,
        profile: TeacherProfile,
        *,
        timeout: float | None = None,
        pool_size_bytes: int = DEFAULT_POOL_BYTES,
        slab_size_bytes: int = DEFAULT_SLAB_BYTES,
        transports: Sequence[Transport | str] = WRITABLE,
        device: DeviceName | None = None,
        host_copies: HostCopies | str = HostCopies.AS_NEEDED,
    ) -> Publisher:
        """Be admitted as a publisher: one data-parallel rank of a teacher.

        Args:
            profile: what the teacher says of itself, alike for all of its ranks but for
                ``data_parallel_rank``; it has a ``batch_grid``.
            timeout: seconds for the whole handshake; the client's where not given.
            pool_size_bytes: most bytes of its own slabs, where it shares memory with the server:
                room for the steps that students have not all read yet.
            slab_size_bytes: usual size of a slab; a larger payload has one of its own size.
            transports: ``shared_memory`` writes slabs of its own, ``stream`` sends bytes; the
                first that is proven is taken.
            device: where its slabs lie, as ``"cuda:0"`` or a GPU's UUID; the host where None.
                Students on this node read them there over ``cuda_ipc``.
            host_copies: ``as_needed`` copies a payload to the host where some student cannot read
                the device, ``always`` copies each.

        Raises:
            ConfigError: there is no such device.
            DeviceError: its driver refuses.
            RequestInvalidError: ``profile`` is none, or a transport is none of these.
            SessionRefusedError: with every rule that the profile breaks, among them those of
                the teacher's other publishers. One that may be dead is waited for.
            NoCommonTransportError: with every refusal.
            NotAvailable: the server did not answer within ``timeout``.
        """
        self._check()
        publisher = open_publisher(
            self._calls,
            profile,
            PublisherSettings(
                transports=words_of(Transport, transports, what="transports"),
                pool_size_bytes=pool_size_bytes,
                slab_size_bytes=slab_size_bytes,
                timeout=self._seconds(timeout, what="open_publisher"),
                device=device,
                host_copies=word_of(HostCopies, host_copies, what="host_copies"),
            ),
            returner=self._returner,
            buffers=self._buffers,
            owner=self,
            control_timeout=self._timeout,
            devices=self._devices,
        )
        self._sessions.add(publisher)
        return publisher

    def statistics(self) -> ClientStatistics:
        """Return what this client has and had, at this instant."""
        self._returner.check_here("client")
        return self._returner.statistics()

    def close(self) -> None:
        """Close all sessions; twice is fine, and in a forked child nothing happens.

        Tensors that still view leased memory stay good, and the connections last as long as
        they do.
        """
        if not self._returner.is_here or not self._end.alive:
            return
        for session in list(self._sessions):
            session.close()
        self._end()

    def __enter__(self) -> Client:
        self._check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a client")

    def __repr__(self) -> str:
        return f"<Client of {self.address} ({'open' if self._end.alive else 'closed'})>"

    def _seconds(self, timeout: float | None, *, what: str) -> float:
        return self._timeout if timeout is None else check_timeout(timeout, what=what)

    def _check(self) -> None:
        self._returner.check_here("client")
        if not self._end.alive:
            raise ServerUnreachableError(
                f"this client of {self.address} is closed; connect anew",
                facts={"address": str(self.address)},
            )


def _check_profile(profile: object) -> None:
    if not isinstance(profile, StudentProfile):
        raise RequestInvalidError(
            f"open_session was given a {type(profile).__name__}: give a StudentProfile, such as "
            "StudentProfile(batch_grid=BatchGrid(...), data_parallel_rank=0)",
            facts={"given": type(profile).__name__},
        )
    if not profile.transports:
        raise RequestInvalidError(
            "the profile wants no transport: name at least one, such as transports=('stream',), "
            "or leave it out to want all of them, best first",
            facts={"transports": 0},
        )


class _LateLeases:
    """Gives back leases that came after their call was given up, once there is a reader."""

    reader: weakref.ref[Reader] | None = None

    def __call__(self, lease_id: str) -> None:
        reader = self.reader() if self.reader is not None else None
        if reader is not None:
            reader.discard(lease_id)


def _make_line(late: _LateLeases, mailbox: Mailbox, path: str, timeout: float) -> Line:
    return Line(path, timeout=timeout, late_lease=late, on_mail=mailbox.put)


def _finish(calls: Calls, readers: weakref.WeakSet[Reader]) -> None:
    """Let go of everything, once no lease is left that could be returned."""
    for reader in list(readers):
        reader.let_go()
    calls.close()
