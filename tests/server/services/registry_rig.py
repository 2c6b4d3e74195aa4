"""A server without an engine, and publishers and students that speak to it in raw messages."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import socket
import threading
from array import array
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, cast

import crc32c
import grpc
from google.rpc import status_pb2
from tests.clocks import AheadClock

from teacher_logits import keys
from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import DeadlinePassedError, ServerUnreachableError
from teacher_logits.grid import BatchGrid
from teacher_logits.keys import PayloadKey
from teacher_logits.layout import ColumnKind, ElementType, top_k_columns
from teacher_logits.payload import Extent, Payload
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.slab import CONTROL_BYTES, WriterSlab
from teacher_logits.terms import SERVER_WRITER, RoomFreed, StepFailure, StepGrant
from teacher_logits.transport import Transport, proof_of
from teacher_logits.v1 import (
    bulk_service_pb2,
    bulk_service_pb2_grpc,
    line_pb2,
    operator_service_pb2,
    operator_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits.v1 import teacher_logits_service_pb2_grpc as stubs
from teacher_logits.wire import student_to_wire, teacher_to_wire, transport_to_wire
from teacher_logits.wire.errors import DETAILS_KEY, from_status
from teacher_logits.wire.payloads import extent_to_wire, payload_to_wire
from teacher_logits.wire.steps import grant_from_wire, mail_from_wire
from teacher_logits.wire.transport import settlement_from_wire
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from pathlib import Path

    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.terms import LeaseTerms, Mail
    from teacher_logits_server.services.waiting import Waiting

T = TypeVar("T")
PATIENCE = 30.0
MIB = 1024**2
ROWS, VOCABULARY, TOP_K = 4, 96, 4
POSITIONS = (3, 2, 5, 1)
"""Of each row of a step."""


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[Wire]:
    """A server of published teachers, in a thread of this process, and a way to it."""
    config = ServerConfig(
        listen=(f"unix:{folder}/server.sock",),
        **{"pool_size_bytes": MIB, "slab_size_bytes": MIB, **settings},  # type: ignore[arg-type]
    )
    loop = asyncio.new_event_loop()
    server, clock = Server(config, lambda: ()), AheadClock()
    server._clock = clock
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)

    try:
        readiness = run(server.start())
        with Wire(readiness.address, drain=lambda: run(server.drain())) as wire:
            assert server._wired is not None
            wire.clock, wire.waiting = clock, server._wired.waiting
            yield wire
            run(server.stop(grace_seconds=0))
    finally:
        run(server.stop(grace_seconds=0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def a_teacher(shard: int = 0, *, of: int = 1, **given: object) -> TeacherProfile:
    """A publisher of one of a teacher's ``of`` shards."""
    grid = BatchGrid(global_batch_size=ROWS, data_parallel_size=of, micro_batch_size=1)
    profile = TeacherProfile(
        teacher_id="published",
        vocabulary_size=VOCABULARY,
        head_rows=VOCABULARY,
        top_k=TOP_K,
        max_row_tokens=64,
        batch_grid=grid,
        data_parallel_rank=shard,
    )
    return replace(profile, **given)  # type: ignore[arg-type]


def a_student(rank: int = 0, *, of: int = 1, **given: object) -> StudentProfile:
    grid = BatchGrid(global_batch_size=ROWS, data_parallel_size=of, micro_batch_size=1)
    profile = StudentProfile(batch_grid=grid, data_parallel_rank=rank, top_k=TOP_K)
    return replace(profile, **given)  # type: ignore[arg-type]


def a_payload(
    step: int = 0, shard: int = 0, *, of: int = 1, top_k: int = TOP_K, positions: int = 0
) -> Payload:
    """What a publisher announces of its rows; ``positions`` of the last row, if not the usual."""
    rows = rows_of(shard, of=of)
    positions = sum(counts_of(rows, positions))
    columns, size_bytes = top_k_columns(
        row_count=len(rows),
        position_count=positions,
        top_k=top_k,
        temperature_count=1,
        value_type=ElementType.FLOAT16,
    )
    return Payload(
        payload_id="",
        key=PayloadKey(teacher_id="published", step=step, shard=shard),
        teacher_id="published",
        teacher_revision="",
        first_row=rows.start,
        row_count=len(rows),
        position_count=positions,
        top_k=top_k,
        temperatures=(1.0,),
        vocabulary_size=VOCABULARY,
        columns=columns,
        size_bytes=size_bytes,
    )


def rows_of(rank: int, *, of: int) -> range:
    return range(rank * ROWS // of, (rank + 1) * ROWS // of)


def counts_of(rows: range, last: int = 0) -> list[int]:
    """Positions of each row."""
    counts = [POSITIONS[row] for row in rows]
    return [*counts[:-1], last or counts[-1]]


def positions_of(payload: Payload) -> list[int]:
    """Positions of each row of a payload: what the others do not have, the last one has."""
    rows = range(payload.first_row, payload.first_row + payload.row_count)
    others = counts_of(rows)[:-1]
    return [*others, payload.position_count - sum(others)]


def bytes_of(payload: Payload, *, seed: int = 0) -> bytes:
    """Bytes that a payload may have: right in its rows, and random elsewhere."""
    data = bytearray(random.Random(f"{payload.key} {seed}").randbytes(payload.size_bytes))
    counts = positions_of(payload)
    offsets = [sum(counts[:row]) for row in range(len(counts) + 1)]
    windows = [number for count in counts for number in (0, count)]
    for kind, content in (
        (ColumnKind.ROW_OFFSETS, array("q", offsets).tobytes()),
        (ColumnKind.ROW_WINDOWS, array("i", windows).tobytes()),
        (ColumnKind.ROW_STATUS, bytes(payload.row_count)),
    ):
        column = payload.column(kind)
        data[column.offset_bytes : column.end_bytes] = content
    return bytes(data)


def refused(call: Callable[[], T]) -> T:
    """Make an RPC; raises the error of the tree that it ends with."""
    try:
        return call()
    except grpc.RpcError as failure:
        raise error_of(failure) from None


def error_of(failure: grpc.RpcError) -> TeacherLogitsError:
    call = cast("grpc.Call", failure)
    details = dict(cast("Sequence[tuple[str, bytes]]", call.trailing_metadata()))
    if DETAILS_KEY not in details and call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassedError("the call's own deadline passed before the server answered")
    gone = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # the server, or our channel
    if DETAILS_KEY not in details and call.code() in gone:
        return ServerUnreachableError("the connection ended before the server answered")
    error = from_status(status_pb2.Status.FromString(details[DETAILS_KEY]))
    assert error is not None
    return error


class Wire:
    """A channel to a server, and what its callers have opened."""

    def __init__(self, address: str, *, drain: Callable[[], bool] = lambda: True) -> None:
        self.address = address
        self.drain = drain
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.max_send_message_length", 16 * MIB)]
        )
        self.students = stubs.TeacherLogitsServiceStub(self.channel)
        self.registry = registry_service_pb2_grpc.RegistryServiceStub(self.channel)
        self.bulk = bulk_service_pb2_grpc.BulkServiceStub(self.channel)
        self.operator = operator_service_pb2_grpc.OperatorServiceStub(self.channel)
        #: Those of a server in this process.
        self.clock, self.waiting = AheadClock(), cast("Waiting | None", None)
        self.lines: list[LineEnd] = []
        self.slabs: list[WriterSlab] = []

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self.lines:
            line.close()
        for slab in self.slabs:
            slab.close()
        self.channel.close()

    def publisher(self, profile: TeacherProfile, *, streams: bool = False) -> Publisher:
        """A publisher that has settled."""
        opened = refused(
            lambda: self.registry.OpenPublisher(
                registry_service_pb2.OpenPublisherRequest(
                    request_id=keys.new_id("r", "test"),
                    protocol_version=PROTOCOL_VERSION,
                    profile=teacher_to_wire(profile),
                ),
                timeout=PATIENCE,
            )
        )
        line = self._settle(opened, streams=streams)
        return Publisher(wire=self, session_id=opened.session.session_id, line=line)

    def student(
        self, profile: StudentProfile, *, streams: bool = False, timeout: float = PATIENCE
    ) -> Student:
        """A student that has settled."""
        if streams:
            profile = replace(profile, transports=(Transport.STREAM,))
        opened = refused(
            lambda: self.students.OpenSession(
                messages.OpenSessionRequest(
                    request_id=keys.new_id("r", "test"),
                    protocol_version=PROTOCOL_VERSION,
                    profile=student_to_wire(profile),
                ),
                timeout=timeout,
            )
        )
        line = self._settle(opened, streams=streams)
        return Student(wire=self, session_id=opened.session.session_id, line=line)

    def _settle(
        self,
        opened: registry_service_pb2.OpenPublisherResponse | messages.OpenSessionResponse,
        *,
        streams: bool,
    ) -> LineEnd | None:
        line, proofs = None, []
        if not streams:
            self.lines.append(line := LineEnd(opened.broker_path))
            hello = line_pb2.HelloRequest(session_id=opened.session.session_id, nonce=opened.nonce)
            size = line.call(hello=hello).hello.challenge_size_bytes
            challenge = os.pread(line.descriptors[-1], size, 0)
            transport = Transport.SHARED_MEMORY
            proofs = [
                messages.LocalityProof(
                    writer_id=SERVER_WRITER,
                    transport=transport_to_wire(transport),
                    mac=proof_of(challenge, nonce=opened.nonce, transport=transport),
                )
            ]
        request = messages.ProveLocalityRequest(session_id=opened.session.session_id, proofs=proofs)
        session = self.students.ProveLocality(request, timeout=PATIENCE).session
        wanted = Transport.STREAM if streams else Transport.SHARED_MEMORY
        for settled in session.transports:
            assert settlement_from_wire(settled).transport is wanted, settled
        return line

    def be_impatient(self, seconds: float = 0.1) -> None:
        """Have calls wait no longer from here on, as with a short --default-wait."""
        assert self.waiting is not None
        self.waiting.longest_seconds = seconds

    def be_patient(self) -> None:
        """Have calls wait as long as they do where nothing is said."""
        self.be_impatient(PATIENCE)

    def inspect(self) -> operator_service_pb2.InspectResponse:
        return self.operator.Inspect(operator_service_pb2.InspectRequest(), timeout=PATIENCE)

    def await_that(self, holds: Callable[[operator_service_pb2.InspectResponse], bool]) -> None:
        """Ask until something is so."""
        limit = MonotonicClock().now() + PATIENCE
        while not holds(self.inspect()):
            assert MonotonicClock().now() < limit


class LineEnd:
    """A client's end of a line."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(path)  # blocking: with a timeout, a full backlog refuses at once
        self.socket.settimeout(PATIENCE)
        self.descriptors: list[int] = []
        self._mail: deque[Mail] = deque()
        self._calls = 0

    def close(self) -> None:
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def send(self, descriptors: Sequence[int] = (), **body: object) -> int:
        """Send a request; return its call id."""
        self._calls += 1
        request = line_pb2.LineRequest(call_id=self._calls, **body)  # type: ignore[arg-type]
        if descriptors:
            socket.send_fds(self.socket, [request.SerializeToString()], list(descriptors))
        else:
            self.socket.send(request.SerializeToString())
        return self._calls

    def call(self, descriptors: Sequence[int] = (), **body: object) -> line_pb2.LineReply:
        """Make a call; raises the error that it is answered with. Mail meanwhile is kept."""
        call_id = self.send(descriptors, **body)
        while True:
            reply = self.receive()
            if reply.call_id == 0 and not reply.status:
                self._mail.append(mail_from_wire(reply))
                continue
            assert reply.call_id == call_id
            if reply.status:
                error = from_status(status_pb2.Status.FromString(reply.status))
                assert error is not None
                raise error
            return reply

    def receive(self) -> line_pb2.LineReply:
        """Return the next packet; its descriptors go onto ``descriptors``."""
        packet, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 4)
        if not packet:
            raise EOFError("the broker hung up")
        self.descriptors += descriptors
        return line_pb2.LineReply.FromString(packet)

    def mail(self) -> Mail:
        """Return the next piece of mail."""
        if self._mail:
            return self._mail.popleft()
        reply = self.receive()
        assert reply.call_id == 0
        return mail_from_wire(reply)


@dataclass(kw_only=True)
class Publisher:
    """A publisher's session."""

    wire: Wire
    session_id: str
    line: LineEnd | None
    slab: WriterSlab | None = None
    _next_slot: int = 0

    @property
    def own_line(self) -> LineEnd:
        assert self.line is not None
        return self.line

    def close(self) -> None:
        request = messages.CloseSessionRequest(session_id=self.session_id)
        self.wire.students.CloseSession(request, timeout=PATIENCE)
        if self.line is not None:
            self.line.close()

    def put_slab(self, slab_id: str = "", *, size_bytes: int = 256 * 1024) -> WriterSlab:
        """Make a slab and pass it."""
        self.slab = WriterSlab(slab_id or keys.new_id("slab", "test"), size_bytes)
        self.wire.slabs.append(self.slab)
        request = line_pb2.PutSlabRequest(
            slab_id=self.slab.slab_id, size_bytes=self.slab.total_bytes
        )
        self.own_line.call([self.slab.fd], put_slab=request)
        return self.slab

    def reserve_request(
        self, payload: Payload, *, request_id: str = ""
    ) -> registry_service_pb2.ReservePayloadRequest:
        return registry_service_pb2.ReservePayloadRequest(
            session_id=self.session_id,
            request_id=request_id or keys.new_id("r", "test"),
            payload=payload_to_wire(payload),
            row_positions=positions_of(payload),
        )

    def reserve(
        self, payload: Payload, *, request_id: str = "", timeout: float = PATIENCE
    ) -> registry_service_pb2.ReservePayloadResponse:
        """Reserve, over the line where there is one."""
        request = self.reserve_request(payload, request_id=request_id)
        if self.line is not None:
            return self.line.call(reserve=request).reserve
        return refused(lambda: self.wire.registry.ReservePayload(request, timeout=timeout))

    def place(self, data: bytes) -> Extent:
        """Write bytes into the slab, in room of their own."""
        assert self.slab is not None
        size = -(-len(data) // 4096) * 4096
        extent = Extent(
            slab_id=self.slab.slab_id,
            offset_bytes=self._next_slot * size,
            size_bytes=size,
            slot=self._next_slot,
            generation=2,
        )
        self._next_slot += 1
        self.slab.room(extent)[: len(data)] = data
        self.slab.mark(extent.slot, extent.generation)
        return extent

    def seal_request(
        self, payload_id: str, extent: Extent | None = None, **given: object
    ) -> registry_service_pb2.SealPayloadRequest:
        return registry_service_pb2.SealPayloadRequest(
            session_id=self.session_id,
            payload_id=payload_id,
            extent=None if extent is None else extent_to_wire(extent),
            **given,  # type: ignore[arg-type]
        )

    def seal(self, payload_id: str, extent: Extent | None = None, **given: object) -> None:
        """Seal, over the line where there is one."""
        request = self.seal_request(payload_id, extent, **given)
        if self.line is not None:
            self.line.call(seal=request)
        else:
            self.seal_by_rpc(request)

    def seal_by_rpc(self, request: registry_service_pb2.SealPayloadRequest) -> None:
        refused(lambda: self.wire.registry.SealPayload(request, timeout=PATIENCE))

    def write(
        self,
        chunks: Sequence[registry_service_pb2.WritePayloadRequest],
        *,
        timeout: float = PATIENCE,
    ) -> int:
        """Stream chunks; return the offset that was reached."""
        written = refused(lambda: self.wire.registry.WritePayload(iter(chunks), timeout=timeout))
        return written.offset_bytes

    def publish(self, payload: Payload, data: bytes, **given: object) -> str:
        """Reserve, write and seal; return the payload's id."""
        payload_id, extent = self.reserve(payload).payload_id, None
        if self.line is None:
            self.write(chunks_of(self.session_id, payload_id, data))
        else:
            extent = self.place(data)
        self.seal(payload_id, extent, **given)
        return payload_id


@dataclass(kw_only=True)
class Student:
    """A student's session."""

    wire: Wire
    session_id: str
    line: LineEnd | None
    _slabs: dict[str, mmap.mmap] = field(default_factory=dict)

    @property
    def own_line(self) -> LineEnd:
        assert self.line is not None
        return self.line

    def want(self, first_step: int, count: int = 1) -> None:
        request = line_pb2.WantStepsRequest(
            session_id=self.session_id, first_step=first_step, count=count
        )
        self.own_line.call(want_steps=request)

    def mailed(self) -> StepGrant:
        """Return the step that comes next over the line."""
        mail = self.own_line.mail()
        if isinstance(mail, StepFailure):
            raise mail.error
        assert isinstance(mail, StepGrant)
        return mail

    def acquire_request(self, step: int, request_id: str = "") -> messages.AcquireStepRequest:
        return messages.AcquireStepRequest(
            session_id=self.session_id,
            request_id=request_id or keys.new_id("r", "test"),
            step=step,
        )

    def acquire(self, step: int, *, request_id: str = "", timeout: float = PATIENCE) -> StepGrant:
        """Ask for a step by RPC, which waits for it."""
        request = self.acquire_request(step, request_id)
        reply = refused(lambda: self.wire.students.AcquireStep(request, timeout=timeout))
        grant = grant_from_wire(reply.grant)
        assert isinstance(grant, StepGrant)
        return grant

    def read(self, lease: LeaseTerms) -> bytes:
        """Return a lease's bytes, mapped or streamed."""
        if lease.extent is None:
            request = bulk_service_pb2.ReadPayloadRequest(
                session_id=self.session_id, lease_id=lease.lease_id
            )
            chunks = self.wire.bulk.ReadPayload(request, timeout=PATIENCE)
            return b"".join(chunk.data for chunk in chunks)
        slab_id, start = lease.extent.slab_id, CONTROL_BYTES + lease.extent.offset_bytes
        if slab_id not in self._slabs:
            request_slab = line_pb2.GetSlabRequest(slab_id=slab_id)
            size = self.own_line.call(get_slab=request_slab).get_slab.size_bytes
            descriptor = self.own_line.descriptors.pop()
            self._slabs[slab_id] = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
            os.close(descriptor)
        return self._slabs[slab_id][start : start + lease.payload.size_bytes]

    def release(self, grant: StepGrant) -> None:
        for lease in grant.leases:
            request = messages.ReleasePayloadRequest(
                session_id=self.session_id, lease_id=lease.lease_id
            )
            if self.line is not None:
                self.line.call(release=request)
            else:
                self.wire.students.ReleasePayload(request, timeout=PATIENCE)


def chunks_of(
    session_id: str, payload_id: str, data: bytes, *, start: int = 0, size: int = 1000
) -> list[registry_service_pb2.WritePayloadRequest]:
    """Cut a payload's bytes into chunks."""
    return [
        registry_service_pb2.WritePayloadRequest(
            session_id=session_id if offset == start else "",
            payload_id=payload_id if offset == start else "",
            offset_bytes=offset,
            crc32c=crc32c.crc32c(data[offset : offset + size]),
            data=data[offset : offset + size],
        )
        for offset in range(start, len(data), size)
    ]


def holders_of(descriptor: int) -> int:
    """How many descriptors of this process, the server's among them, are of the same file."""
    wanted, count = os.fstat(descriptor), 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found = os.fstat(int(each))
            count += (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)
    return count


def freed_of(mail: Mail) -> set[str]:
    """The payloads that a publisher is told are free."""
    assert isinstance(mail, RoomFreed)
    return set(mail.payload_ids)
