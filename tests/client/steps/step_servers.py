"""Servers of registered steps, as far as one student sees them: a broker line, or calls.

Both do as the test tells them. What they hold is real: packets over a socket, a slab of a
writer's, chunks of a stream.
"""

import array
import itertools
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tests.client.losses.shards import VOCABULARY_SIZE, K, Shard
from tests.client.steps.step_calls import StepCalls

from teacher_logits.grid import BatchGrid
from teacher_logits.payload import Extent
from teacher_logits.profiles import StudentProfile, TeacherProfile
from teacher_logits.slab import WriterSlab
from teacher_logits.terms import LeaseTerms, Mail, SessionTerms, StepGrant
from teacher_logits.transport import Locality, Settlement, Transport
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.errors import to_status
from teacher_logits.wire.steps import mail_to_wire
from teacher_logits_client.config import MapMode
from teacher_logits_client.line import Line
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.devices import Devices
from teacher_logits_client.payloads.returns import Returner
from teacher_logits_client.sessions.agreement import Agreed
from teacher_logits_client.sessions.reader import Reader
from teacher_logits_client.steps.mailbox import Mailbox
from teacher_logits_client.student import Session

if TYPE_CHECKING:
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits_client.calls import Calls

SOON, LONG = 0.05, 30.0
SESSION_ID = "s-1"
WRITER = "publisher-0-12345678"
SLAB_BYTES = 1 << 20
TEACHER = TeacherProfile(
    teacher_id="teacher",
    vocabulary_size=VOCABULARY_SIZE,
    head_rows=VOCABULARY_SIZE,
    top_k=K,
    max_row_tokens=64,
)


class Broker:
    """The server's end of one line, on a thread of its own, and a slab of a publisher's."""

    def __init__(self, connection: socket.socket, slab: WriterSlab) -> None:
        self.slab = slab
        self.wanted: queue.Queue[tuple[int, int]] = queue.Queue()
        self.released: queue.Queue[str] = queue.Queue()
        self.unread: list[str] = []
        self.refusal: TeacherLogitsError | None = None
        self.lacking = ""
        self.deaf = threading.Event()
        self._socket = connection
        self._slots = itertools.count()
        self._end = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def lease(self, shard: Shard) -> LeaseTerms:
        """Put a shard into the slab, and lease it."""
        slot, size = next(self._slots), shard.payload.size_bytes
        size = -(-size // 4096) * 4096
        extent = Extent(
            slab_id=self.slab.slab_id,
            offset_bytes=self._end,
            size_bytes=size,
            slot=slot,
            generation=2,
        )
        self._end += size
        self.slab.room(extent)[: len(shard.data)] = shard.data
        self.slab.mark(slot, 2)
        return LeaseTerms(
            lease_id=f"l-{slot}", payload=shard.payload, writer_id=WRITER, extent=extent
        )

    def overwrite(self, lease: LeaseTerms) -> None:
        """Use a lease's room anew, as only an operator's reclaim can."""
        assert lease.extent is not None
        self.slab.mark(lease.extent.slot, 4)

    def spoil(self, lease: LeaseTerms) -> None:
        """Do so, and write there."""
        self.overwrite(lease)
        assert lease.extent is not None
        room = self.slab.room(lease.extent)
        room[: len(room)] = b"\xff" * len(room)

    def send(self, *mail: Mail) -> None:
        for each in mail:
            self._socket.send(mail_to_wire(each).SerializeToString())

    def hang_up(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with suppress(OSError):
            while packet := self._socket.recv(65536):
                self._answer(line_pb2.LineRequest.FromString(packet))

    def _answer(self, request: line_pb2.LineRequest) -> None:
        reply, beside = line_pb2.LineReply(call_id=request.call_id), []
        kind = request.WhichOneof("body")
        if kind == "want_steps" and not request.want_steps.count:
            reply.want_steps.lacking = self.lacking
        elif kind == "want_steps":
            self.wanted.put((request.want_steps.first_step, request.want_steps.count))
            if self.refusal is not None:
                reply.status = to_status(self.refusal).SerializeToString()
            else:
                reply.want_steps.SetInParent()
        elif kind == "release":
            self.unread += [request.release.lease_id] if request.release.unread else []
            self.released.put(request.release.lease_id)
            reply.release.SetInParent()
        elif kind == "get_slab":
            reply.get_slab.slab_id = request.get_slab.slab_id
            rights = array.array("i", [self.slab.fd])
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        if not self.deaf.is_set():
            self._socket.sendmsg([reply.SerializeToString()], beside)


def a_grant(
    step: int,
    leases: Sequence[LeaseTerms],
    *,
    real_rows: int,
    global_count: int | None = None,
    transport: Transport = Transport.SHARED_MEMORY,
) -> StepGrant:
    settled = Settlement(writer_id=WRITER, transport=transport)
    return StepGrant(
        step=step,
        leases=tuple(leases),
        real_rows=real_rows,
        global_count=global_count,
        settlements=(settled,),
    )


def a_profile(**given: object) -> StudentProfile:
    grid = BatchGrid(global_batch_size=8, data_parallel_size=2, micro_batch_size=2)
    return StudentProfile(**{"batch_grid": grid, "top_k": K, **given})  # type: ignore[arg-type]


def _terms(default_wait: float) -> SessionTerms:
    return SessionTerms(
        session_id=SESSION_ID,
        epoch="e",
        ttl=timedelta(hours=1),
        renew_interval=timedelta(hours=1),
        default_wait=timedelta(seconds=default_wait),
        teacher=TEACHER,
        checks=(),
        vocabulary_size=VOCABULARY_SIZE,
        max_request_tokens=1 << 20,
        settlements=(),
    )


@contextmanager
def _session(
    calls: StepCalls,
    profile: StudentProfile,
    line: Line | None,
    mailbox: Mailbox,
    *,
    mode: MapMode,
) -> Iterator[Session]:
    terms = _terms(LONG)
    agreed = Agreed(terms=terms, profile=profile, refusals=(), line=line, resident=None)
    real = cast("Calls", calls)
    returner = Returner()
    reader = Reader(
        agreed,
        calls=real,
        returner=returner,
        buffers=BufferPool(),
        mode=mode,
        check_digest=False,
        devices=Devices(),
    )
    session = Session(
        agreed,
        calls=real,
        returner=returner,
        reader=reader,
        mailbox=mailbox,
        owner=None,
        timeout=LONG,
    )
    try:
        yield session
    finally:
        session.close()
        reader.let_go()
        returner.stop()


@contextmanager
def local_session(
    folder: Path,
    *,
    prefetch: int = 1,
    mode: MapMode = MapMode.COW,
    profile: StudentProfile | None = None,
) -> Iterator[tuple[Session, Broker]]:
    """A session with a line, and its broker."""
    path = str(folder / "broker")
    mailbox = Mailbox(prefetch)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        line = Line(path, timeout=LONG, on_mail=mailbox.put)
        connection, _ = listener.accept()
    os.unlink(path)
    slab = WriterSlab("slab-1", SLAB_BYTES)
    with connection:
        broker = Broker(connection, slab)
        chosen = profile or a_profile(locality=Locality.PREFER)
        with _session(StepCalls(), chosen, line, mailbox, mode=mode) as session:
            yield session, broker
    slab.close()


@contextmanager
def streamed_session(
    *, prefetch: int = 1, profile: StudentProfile | None = None
) -> Iterator[tuple[Session, StepCalls]]:
    """A session without a line, and what it calls."""
    calls = StepCalls()
    chosen = profile or a_profile(transports=(Transport.STREAM,))
    with _session(calls, chosen, None, Mailbox(prefetch), mode=MapMode.COW) as session:
        yield session, calls


def streamed(calls: StepCalls, shards: Sequence[Shard], rows: range) -> list[LeaseTerms]:
    """Lease a rank's rows of some shards, to be streamed."""
    leases = []
    for shard in shards:
        payload = shard.payload
        first = max(rows.start, payload.first_row)
        stop = min(rows.stop, payload.first_row + payload.row_count)
        if first < stop:
            cut = shard.cut(first, stop - first)
            lease_id = f"l-{payload.payload_id}"
            calls.data[lease_id] = cut.data
            leases.append(
                LeaseTerms(lease_id=lease_id, payload=cut.payload, writer_id=WRITER, extent=None)
            )
    return leases
