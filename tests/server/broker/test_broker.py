"""The broker: real sockets, real processes, and whatever a peer may send or leave undone."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.held import left_behind, open_descriptors, running_threads
from tests.some_payload import some_payload

from teacher_logits import keys
from teacher_logits.clock import ManualClock, MonotonicClock
from teacher_logits.errors import (
    NotAllowedError,
    RequestInvalidError,
    SessionExpiredError,
    TeacherLogitsError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile, TeacherProfile
from teacher_logits.slab import read_header
from teacher_logits.transport import RefusalReason, Transport, proof_of
from teacher_logits.v1 import line_pb2
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits.wire.errors import from_status
from teacher_logits.wire.payloads import lease_from_wire
from teacher_logits_server.broker import Broker, leaving, lines
from teacher_logits_server.broker.lines import MAX_PACKET_BYTES, Line
from teacher_logits_server.broker.peers import Peer
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.exporters.shared_memory import SharedMemoryExporter
from teacher_logits_server.foreign import ForeignSlabs
from teacher_logits_server.ledger import Ledger, OpenedSession
from teacher_logits_server.metrics.refusals import Refusals
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.services.line import LineDesk
from teacher_logits_server.services.publishing import PublisherCalls
from teacher_logits_server.slabs import ServerSlabs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.clock import Clock
    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms

PATIENCE = 30.0
MIB = 1024**2
STUDENT = StudentProfile(
    batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1), top_k=8
)
TEACHER = TeacherProfile(
    teacher_id="teacher", vocabulary_size=100, head_rows=128, top_k=64, max_row_tokens=512
)

# A student that says hello, shows what it read, and then does nothing until it is ended.
# With "fork" it leaves a child that inherits its line, and that shows it instead; with
# "unread" it leaves a reply on the line. At a byte on its input it becomes another program with
# "exec", which lets go of the line, and shuts the line down with "shut".
STUDENT_PROCESS = """
import os, socket, sys
from teacher_logits.v1 import line_pb2
path, session_id, nonce, manner = sys.argv[1:]
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(path)
hello = line_pb2.HelloRequest(session_id=session_id, nonce=bytes.fromhex(nonce))
line.send(line_pb2.LineRequest(call_id=1, hello=hello).SerializeToString())
_, descriptors, _, _ = socket.recv_fds(line, 65536, 1)
challenge = os.pread(descriptors[0], 32, 0).hex()
if manner == "unread":
    line.send(b"nonsense")
if manner == "fork" and os.fork():
    os.read(0, 1)
    os._exit(0)
os.write(1, f"{os.getpid()} {challenge}\\n".encode())
os.read(0, 1)
if manner == "exec":
    os.execv("/bin/cat", ["cat"])
if manner == "shut":
    line.shutdown(socket.SHUT_WR)
    os.read(0, 1)
"""


@dataclass(kw_only=True)
class Rim:
    """A ledger, its slabs, and a broker before them."""

    path: str
    ledger: Ledger
    slabs: ServerSlabs
    desk: LineDesk
    broker: Broker
    registry: CollectorRegistry
    freed: threading.Event = field(default_factory=threading.Event)

    def open_session(self, *transports: Transport) -> OpenedSession:
        """A session that waits for its proof."""
        wanted = transports or (Transport.SHARED_MEMORY,)
        profile = StudentProfile(batch_grid=STUDENT.batch_grid, top_k=8, transports=wanted)
        return self.ledger.open_session(
            request_id=keys.new_id("r", "test"), protocol_version=PROTOCOL_VERSION, profile=profile
        )

    def prove(self, opened: OpenedSession, challenge: bytes) -> Transport | None:
        """Show a challenge; return what the session settles on."""
        mac = proof_of(challenge, nonce=opened.nonce, transport=Transport.SHARED_MEMORY)
        terms = self.ledger.prove_locality(
            opened.terms.session_id, proofs={Transport.SHARED_MEMORY: mac}, failures=[]
        )
        return terms.settlements[0].transport

    def lend(self, opened: OpenedSession) -> LeaseTerms:
        """A payload that a session has leased."""
        columns, size_bytes = top_k_columns(
            row_count=1,
            position_count=16,
            top_k=8,
            temperature_count=1,
            value_type=ElementType.FLOAT16,
        )
        payload = some_payload(
            payload_id=keys.new_id("p", self.ledger.epoch),
            position_count=16,
            top_k=8,
            vocabulary_size=100,
            columns=columns,
            size_bytes=size_bytes,
        )
        extent = self.slabs.room_for(self.ledger, size_bytes)
        self.freed.clear()
        return self.ledger.publish(
            session_id=opened.terms.session_id,
            request_id=keys.new_id("r", "test"),
            payload=payload,
            extent=extent,
        )

    def refused(self, surface: str, reason: str) -> float:
        """How often so was refused."""
        labels = {"surface": surface, "reason": reason}
        name = "teacher_logits_refusals_total"
        return self.registry.get_sample_value(name, labels) or 0

    def room(self) -> tuple[int, int]:
        """Bytes in use, and in quarantine."""
        pool = self.ledger.view().pool
        return pool.used_bytes, pool.quarantined_bytes


class Student:
    """A student's end of a line, with the mistakes that one can make."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(path)
        self.descriptors: list[int] = []
        self._calls = 0

    def __enter__(self) -> Student:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def send(self, packet: bytes) -> line_pb2.LineReply:
        """Send a packet as it is, and return the reply."""
        self.socket.send(packet)
        return self.receive()

    def receive(self) -> line_pb2.LineReply:
        """Return the next reply; its descriptors go onto ``descriptors``."""
        packet, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 4)
        if not packet:
            raise EOFError("the broker hung up")
        self.descriptors += descriptors
        return line_pb2.LineReply.FromString(packet)

    def call(self, **body: object) -> line_pb2.LineReply:
        """Make a call; raises the error that it is answered with."""
        self._calls += 1
        request = line_pb2.LineRequest(call_id=self._calls, **body)  # type: ignore[arg-type]
        reply = self.send(request.SerializeToString())
        assert reply.call_id == self._calls
        raise_status(reply)
        return reply

    def hello(self, opened: OpenedSession, *, nonce: bytes | None = None) -> bytes:
        """Say hello; return the challenge."""
        hello = line_pb2.HelloRequest(
            session_id=opened.terms.session_id, nonce=opened.nonce if nonce is None else nonce
        )
        reply = self.call(hello=hello)
        return os.pread(self.descriptors[-1], reply.hello.challenge_size_bytes, 0)

    def flood(self, packet: bytes) -> None:
        """Send without ever reading a reply, as long as the line takes it."""
        for _ in range(100_000):
            self.socket.send(packet)

    def is_hung_up_on(self) -> bool:
        """Wait for the end of the line."""
        while True:
            try:
                if not self.socket.recv(65536):
                    return True
            except ConnectionResetError:
                return True


def raise_status(reply: line_pb2.LineReply) -> None:
    if reply.status:
        from google.rpc import status_pb2

        error = from_status(status_pb2.Status.FromString(reply.status))
        assert error is not None
        raise error


@contextmanager
def running(
    path: str,
    *,
    hello_within: timedelta = timedelta(seconds=PATIENCE),
    clock: Clock | None = None,
    max_lines: int = 32,
) -> Iterator[Rim]:
    clock = clock or MonotonicClock()
    registry = CollectorRegistry()
    refusals = Refusals(registry)
    slabs = ServerSlabs(epoch="0123456789ab")
    ledger = Ledger(
        epoch="0123456789ab",
        limits=ServerConfig(pool_size_bytes=MIB, slab_size_bytes=MIB),
        engines=(EngineTeacher(profile=TEACHER),),
        clock=clock,
        slots=slabs,
        offered=frozenset({Transport.SHARED_MEMORY, Transport.STREAM}),
    )
    foreign = ForeignSlabs(8)
    desk = LineDesk(
        ledger=ledger,
        exporter=SharedMemoryExporter(ledger=ledger, slabs=(slabs, foreign)),
        publishing=PublisherCalls(ledger=ledger, slabs=slabs, foreign=foreign),
        allowed_uids=(),
        refusals=refusals,
        max_user_lines=32,
    )
    broker = Broker(
        path=path,
        desk=desk,
        clock=clock,
        hello_within=hello_within,
        max_lines=max_lines,
        refusals=refusals,
    )
    rim = Rim(path=path, ledger=ledger, slabs=slabs, desk=desk, broker=broker, registry=registry)
    ledger.on_room_freed(rim.freed.set)
    broker.start()
    try:
        yield rim
        assert broker.is_alive
    finally:
        broker.stop()
        slabs.close()


@pytest.fixture
def rim(tmp_path: Path) -> Iterator[Rim]:
    with running(str(tmp_path / "broker")) as rim:
        yield rim


@pytest.fixture(scope="module")
def lasting_rim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rim]:
    """One broker for all examples of a hypothesis test."""
    with running(str(tmp_path_factory.mktemp("rim") / "broker")) as rim:
        yield rim


@contextmanager
def student_process(
    rim: Rim, opened: OpenedSession, *, manner: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], int, bytes]]:
    """A student in a process of its own: the process, who holds the line last, the challenge."""
    arguments = [rim.path, opened.terms.session_id, opened.nonce.hex(), manner]
    process = subprocess.Popen(
        [sys.executable, "-c", STUDENT_PROCESS, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        holder, challenge = process.stdout.readline().decode().split()
        try:
            yield process, int(holder), bytes.fromhex(challenge)
        finally:
            process.kill()


class TestHello:
    def test_brings_a_challenge_whose_proof_settles_shared_memory(self, rim: Rim) -> None:
        opened = rim.open_session()
        with Student(rim.path) as student:
            challenge = student.hello(opened)

            assert rim.prove(opened, challenge) is Transport.SHARED_MEMORY

    def test_brings_each_line_another_challenge(self, rim: Rim) -> None:
        with Student(rim.path) as one, Student(rim.path) as other:
            assert one.hello(rim.open_session()) != other.hello(rim.open_session())

    def test_tells_the_ledger_which_process_is_there(self, rim: Rim) -> None:
        opened = rim.open_session()
        with student_process(rim, opened) as (process, _, challenge):
            rim.prove(opened, challenge)

            assert [session.pid for session in rim.ledger.view().sessions] == [process.pid]

    def test_brings_a_page_that_nobody_can_write_into(self, rim: Rim) -> None:
        with Student(rim.path) as student:
            student.hello(rim.open_session())

            with pytest.raises(PermissionError):
                os.pwrite(student.descriptors[0], b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(student.descriptors[0], 4096)

    def test_with_a_wrong_nonce_is_refused_and_hung_up_on(self, rim: Rim) -> None:
        with Student(rim.path) as student:
            with pytest.raises(NotAllowedError, match="nonce"):
                student.hello(rim.open_session(), nonce=b"guess" * 8)

            assert student.is_hung_up_on()

    def test_of_a_session_that_has_a_line_is_refused(self, rim: Rim) -> None:
        opened = rim.open_session()
        with Student(rim.path) as first, Student(rim.path) as second:
            first.hello(opened)

            with pytest.raises(NotAllowedError, match="has had its broker line"):
                second.hello(opened)

    def test_of_a_session_that_never_was_is_refused(self, rim: Rim) -> None:
        hello = line_pb2.HelloRequest(session_id=keys.new_id("s", rim.ledger.epoch), nonce=b"x")
        with Student(rim.path) as student, pytest.raises(SessionExpiredError):
            student.call(hello=hello)

    def test_comes_first_or_the_line_is_hung_up(self, rim: Rim) -> None:
        opened = rim.open_session()
        with Student(rim.path) as student:
            renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
            with pytest.raises(RequestInvalidError, match="hello"):
                student.call(renew=renew)

            assert student.is_hung_up_on()

    def test_comes_once(self, rim: Rim) -> None:
        opened = rim.open_session()
        with Student(rim.path) as student:
            student.hello(opened)

            with pytest.raises(RequestInvalidError, match="hello once"):
                student.hello(opened)
            assert rim.refused("line", "REQUEST_INVALID") == 1

    def test_finds_no_line_beyond_the_most_and_is_counted(self, tmp_path: Path) -> None:
        with running(str(tmp_path / "b"), max_lines=1) as rim, Student(rim.path) as first:
            first.hello(rim.open_session())
            with Student(rim.path) as second:
                assert second.is_hung_up_on()
            assert rim.refused("broker", "TOO_MANY_LINES") == 1
            assert not rim.refused("line", "REQUEST_INVALID")

    def test_has_a_time_limit(self, tmp_path: Path) -> None:
        limit = timedelta(milliseconds=20)
        with running(str(tmp_path / "b"), hello_within=limit) as rim, Student(rim.path) as silent:
            assert silent.is_hung_up_on()
            assert rim.refused("broker", "NO_HELLO") == 1

    def test_in_time_lifts_the_time_limit(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with running(str(tmp_path / "b"), clock=clock) as rim:
            opened = rim.open_session()
            with Student(rim.path) as student, Student(rim.path) as silent:
                rim.prove(opened, student.hello(opened))
                clock.advance(PATIENCE)
                renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
                assert not student.call(renew=renew).renew.draining  # and so the broker looks

                assert silent.is_hung_up_on()  # its limit came later
                assert not student.call(renew=renew).renew.draining


class TestWhoIsThere:
    def _line(self, *, uid: int, pidfd: int) -> Line:
        return Line(peer=Peer(pid=os.getpid(), uid=uid, pidfd=pidfd))

    def _hello(self, rim: Rim, opened: OpenedSession, line: Line) -> TeacherLogitsError:
        hello = line_pb2.HelloRequest(session_id=opened.terms.session_id, nonce=opened.nonce)
        answer = rim.desk.answer(line, line_pb2.LineRequest(hello=hello).SerializeToString())
        assert answer.hang_up
        assert answer.descriptor is None
        with pytest.raises(TeacherLogitsError) as refusal:
            raise_status(line_pb2.LineReply.FromString(answer.packet))
        return refusal.value

    def _settled_refusal(self, rim: Rim, opened: OpenedSession) -> RefusalReason:
        [settlement] = rim.ledger.prove_locality(
            opened.terms.session_id, proofs={}, failures=[]
        ).settlements
        assert settlement.transport is Transport.STREAM
        return settlement.refusals[0].reason

    def test_another_users_process_is_refused_with_the_flag_that_lets_it_in(self, rim: Rim) -> None:
        opened = rim.open_session(Transport.SHARED_MEMORY, Transport.STREAM)
        stranger = os.geteuid() + 4711

        error = self._hello(rim, opened, self._line(uid=stranger, pidfd=-1))

        assert isinstance(error, NotAllowedError)
        assert f"--allow-uid {stranger}" in error.message
        assert self._settled_refusal(rim, opened) is RefusalReason.BROKER_REFUSED

    def test_a_process_that_the_kernel_does_not_prove_is_streamed_to(self, rim: Rim) -> None:
        opened = rim.open_session(Transport.SHARED_MEMORY, Transport.STREAM)

        self._hello(rim, opened, self._line(uid=os.geteuid(), pidfd=-1))

        assert self._settled_refusal(rim, opened) is RefusalReason.PEER_UNPROVEN

    def test_a_process_that_has_ended_proves_nothing(self, rim: Rim) -> None:
        opened = rim.open_session(Transport.SHARED_MEMORY, Transport.STREAM)
        with subprocess.Popen(["true"]) as process:
            pidfd = os.pidfd_open(process.pid)
        line = self._line(uid=os.geteuid(), pidfd=pidfd)

        self._hello(rim, opened, line)

        line.peer.close()
        assert self._settled_refusal(rim, opened) is RefusalReason.PEER_UNPROVEN


class TestSlabs:
    def _settle(self, rim: Rim, student: Student) -> tuple[OpenedSession, Extent]:
        opened = rim.open_session()
        rim.prove(opened, student.hello(opened))
        extent = rim.lend(opened).extent
        assert extent is not None
        return opened, extent

    def test_a_local_session_gets_the_slab_that_its_lease_names(self, rim: Rim) -> None:
        with Student(rim.path) as student:
            _, extent = self._settle(rim, student)
            reply = student.call(get_slab=line_pb2.GetSlabRequest(slab_id=extent.slab_id))
            size = reply.get_slab.size_bytes

            rim.slabs.room(extent)[:5] = b"hello"
            with mmap.mmap(student.descriptors[-1], size, prot=mmap.PROT_READ) as mapped:
                header = memoryview(mapped)[:4096]
                room = read_header(header, slab_id=extent.slab_id, total_bytes=size)
                header.release()
                assert mapped[size - room :][extent.offset_bytes :][:5] == b"hello"

    def test_a_slab_cannot_be_mapped_for_writing(self, rim: Rim) -> None:
        with Student(rim.path) as student:
            _, extent = self._settle(rim, student)
            student.call(get_slab=line_pb2.GetSlabRequest(slab_id=extent.slab_id))

            with pytest.raises(PermissionError):
                mmap.mmap(student.descriptors[-1], 4096)

    def test_a_slab_is_passed_as_often_as_it_is_asked_for(self, rim: Rim) -> None:
        with Student(rim.path) as student:
            _, extent = self._settle(rim, student)
            request = line_pb2.GetSlabRequest(slab_id=extent.slab_id)
            before = open_descriptors()

            student.call(get_slab=request)
            student.call(get_slab=request)

            first, second = (os.fstat(fd) for fd in student.descriptors[-2:])
            assert (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
            # Two at the student's end, and none at the broker's, in the same process.
            assert len(left_behind(before, open_descriptors, at_most=2)) <= 2

    def test_a_slab_that_is_not_there_is_refused(self, rim: Rim) -> None:
        with Student(rim.path) as student:
            self._settle(rim, student)

            with pytest.raises(NotAllowedError, match="no slab"):
                student.call(get_slab=line_pb2.GetSlabRequest(slab_id="slab-of-mine"))

    def test_a_session_that_has_not_proven_anything_gets_none(self, rim: Rim) -> None:
        with Student(rim.path) as local, Student(rim.path) as opening:
            _, extent = self._settle(rim, local)
            opening.hello(rim.open_session())

            with pytest.raises(NotAllowedError, match="ProveLocality"):
                opening.call(get_slab=line_pb2.GetSlabRequest(slab_id=extent.slab_id))

    def test_a_session_that_streams_gets_none(self, rim: Rim) -> None:
        opened = rim.open_session(Transport.SHARED_MEMORY, Transport.STREAM)
        with Student(rim.path) as local, Student(rim.path) as remote:
            _, extent = self._settle(rim, local)
            remote.hello(opened)
            assert rim.prove(opened, b"never read") is Transport.STREAM

            with pytest.raises(NotAllowedError, match="streaming"):
                remote.call(get_slab=line_pb2.GetSlabRequest(slab_id=extent.slab_id))


class TestCalls:
    @pytest.fixture
    def student(self, rim: Rim) -> Iterator[Student]:
        with Student(rim.path) as student:
            yield student

    @pytest.fixture
    def opened(self, rim: Rim, student: Student) -> OpenedSession:
        opened = rim.open_session()
        rim.prove(opened, student.hello(opened))
        return opened

    def test_a_payload_is_acquired_and_released(
        self, rim: Rim, student: Student, opened: OpenedSession
    ) -> None:
        lease = rim.lend(opened)
        session_id = opened.terms.session_id
        request = messages.AcquirePayloadRequest(
            session_id=session_id, request_id="mine", payload_id=lease.payload.payload_id
        )
        another = lease_from_wire(student.call(acquire=request).acquire.lease)

        assert another.lease_id != lease.lease_id
        assert another.extent == lease.extent
        for each in (lease, another, another):  # returning one twice is fine
            release = messages.ReleasePayloadRequest(session_id=session_id, lease_id=each.lease_id)
            student.call(release=release)
        assert rim.room() == (0, 0)

    def test_a_renewal_tells_of_a_drain(
        self, rim: Rim, student: Student, opened: OpenedSession
    ) -> None:
        renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
        before = student.call(renew=renew).renew.draining
        rim.ledger.drain()

        assert (before, student.call(renew=renew).renew.draining) == (False, True)

    @pytest.mark.parametrize("kind", ["acquire", "release", "renew"])
    def test_a_line_serves_its_own_session_alone(
        self, rim: Rim, student: Student, opened: OpenedSession, kind: str
    ) -> None:
        other = rim.open_session().terms.session_id
        request = {
            "acquire": messages.AcquirePayloadRequest(session_id=other),
            "release": messages.ReleasePayloadRequest(session_id=other),
            "renew": messages.RenewSessionRequest(session_id=other),
        }[kind]

        with pytest.raises(NotAllowedError, match="serves no other"):
            student.call(**{kind: request})

    def test_calls_may_be_sent_before_their_replies_are_read(
        self, student: Student, opened: OpenedSession
    ) -> None:
        renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
        for call_id in range(100, 120):
            request = line_pb2.LineRequest(call_id=call_id, renew=renew)
            student.socket.send(request.SerializeToString())

        assert [student.receive().call_id for _ in range(20)] == list(range(100, 120))


class TestHostilePackets:
    def _is_well(self, rim: Rim, *, may_fail: bool = False) -> bool:
        """Whether a line is served; one that is hung up on at once is an error or a no."""
        opened = rim.open_session()
        try:
            with Student(rim.path) as student:
                return rim.prove(opened, student.hello(opened)) is Transport.SHARED_MEMORY
        except (EOFError, OSError):
            if not may_fail:
                raise
            return False

    @given(packet=st.binary(max_size=MAX_PACKET_BYTES))
    def test_random_bytes_from_a_stranger_are_answered_with_an_error(
        self, lasting_rim: Rim, packet: bytes
    ) -> None:
        with Student(lasting_rim.path) as stranger:
            with pytest.raises(TeacherLogitsError):
                raise_status(stranger.send(packet))

            assert stranger.is_hung_up_on()

    @given(packet=st.binary(max_size=300))
    def test_random_bytes_on_a_session_s_line_are_answered_and_the_line_goes_on(
        self, lasting_rim: Rim, packet: bytes
    ) -> None:
        opened = lasting_rim.open_session()
        with Student(lasting_rim.path) as student:
            lasting_rim.prove(opened, student.hello(opened))
            with pytest.raises(TeacherLogitsError):
                raise_status(student.send(packet))

            renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
            assert student.call(renew=renew).HasField("renew")

    def test_a_pickle_is_not_opened(self, rim: Rim, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[object, ...]:
                return Path.touch, (tmp_path / "boom",)

        with Student(rim.path) as stranger, pytest.raises(RequestInvalidError):
            raise_status(stranger.send(pickle.dumps(Bomb())))

        assert not (tmp_path / "boom").exists()
        assert self._is_well(rim)

    def test_an_empty_packet_is_no_end_of_the_line(self, rim: Rim) -> None:
        opened = rim.open_session()
        with Student(rim.path) as student:
            rim.prove(opened, student.hello(opened))
            with pytest.raises(RequestInvalidError):
                raise_status(student.send(b""))

            assert len(rim.ledger.view().sessions) == 1

    def test_a_descriptor_beside_an_empty_packet_is_closed(self) -> None:
        """It looks like the line's end, where its sender hangs up behind it."""
        read_end, write_end = os.pipe()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there, open(read_end, "rb") as pipe:
            socket.send_fds(there, [b""], [write_end])
            os.close(write_end)

            assert lines.receive(here, takes_descriptors=True).descriptor is None
            assert pipe.read() == b""  # nobody holds the other end any more

    def test_an_oversized_packet_is_refused_with_the_limit(self, rim: Rim) -> None:
        opened = rim.open_session()
        with Student(rim.path) as student:
            rim.prove(opened, student.hello(opened))
            with pytest.raises(RequestInvalidError, match=str(MAX_PACKET_BYTES)):
                raise_status(student.send(b"x" * (MAX_PACKET_BYTES + 1)))

            renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
            assert student.call(renew=renew).HasField("renew")

    def test_a_descriptor_on_a_student_s_line_is_refused_and_not_kept(self, rim: Rim) -> None:
        opened = rim.open_session()
        renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
        packet = line_pb2.LineRequest(call_id=7, renew=renew).SerializeToString()
        read_end, write_end = os.pipe()
        with Student(rim.path) as student, open(read_end, "rb") as pipe:
            rim.prove(opened, student.hello(opened))
            socket.send_fds(student.socket, [packet], [write_end])
            reply = student.receive()
            os.close(write_end)

            assert reply.call_id == 7
            with pytest.raises(RequestInvalidError, match="put_slab"):
                raise_status(reply)
            assert pipe.read() == b""  # nobody holds the other end any more
            assert student.call(renew=renew).HasField("renew")

    def test_a_peer_that_reads_nothing_is_dropped_and_others_are_served(self, rim: Rim) -> None:
        opened = rim.open_session()
        with Student(rim.path) as deaf:
            rim.prove(opened, deaf.hello(opened))
            renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
            packet = line_pb2.LineRequest(renew=renew).SerializeToString()
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                deaf.flood(packet)

            assert self._is_well(rim)

    def test_more_lines_than_the_limit_are_turned_away(self, rim: Rim) -> None:
        crowd = [Student(rim.path) for _ in range(40)]
        try:
            assert [student for student in crowd[32:] if not student.is_hung_up_on()] == []
        finally:
            for student in crowd:
                student.socket.close()

        limit = MonotonicClock().now() + PATIENCE
        while not self._is_well(rim, may_fail=True):  # until their ends were seen
            assert MonotonicClock().now() < limit


class TestTheEndOfALine:
    @pytest.mark.parametrize("manner", ["read", "unread"])
    def test_with_its_process_frees_the_room(self, rim: Rim, manner: str) -> None:
        opened = rim.open_session()
        with student_process(rim, opened, manner=manner) as (process, _, challenge):
            rim.prove(opened, challenge)
            rim.lend(opened)
            process.kill()

            assert rim.freed.wait(PATIENCE)
            assert rim.room() == (0, 0)

    def test_is_not_there_while_a_forked_child_holds_it(self, rim: Rim) -> None:
        opened = rim.open_session()
        bystander = rim.open_session()
        with (
            Student(rim.path) as student,
            student_process(rim, opened, manner="fork") as (parent, child, challenge),
        ):
            student.hello(bystander)
            rim.prove(opened, challenge)
            used = rim.room()
            rim.lend(opened)
            parent.kill()
            parent.wait(PATIENCE)
            with pytest.raises(NotAllowedError):  # a round trip: the broker has had its look
                student.call(get_slab=line_pb2.GetSlabRequest(slab_id="none"))
            kept = rim.room()
            os.kill(child, signal.SIGKILL)

            assert used == (0, 0)
            assert kept[0] > 0
            assert rim.freed.wait(PATIENCE)
            assert rim.room() == (0, 0)

    def test_is_told_apart_from_the_end_of_its_process(self, rim: Rim) -> None:
        opened, bystander = rim.open_session(), rim.open_session()
        with (
            Student(rim.path) as student,
            student_process(rim, opened, manner="fork") as (parent, child, challenge),
        ):
            student.hello(bystander)
            rim.prove(opened, challenge)
            rim.lend(opened)
            parent.kill()
            parent.wait(PATIENCE)
            with pytest.raises(NotAllowedError):  # a round trip: the broker has had its look
                student.call(get_slab=line_pb2.GetSlabRequest(slab_id="none"))
            states = {each.session_id: each.state for each in rim.ledger.view().sessions}
            os.kill(child, signal.SIGKILL)

            assert rim.freed.wait(PATIENCE)
            assert states[opened.terms.session_id] == "died"
            assert states[bystander.terms.session_id] == "opening"

    def test_of_a_closed_session_is_no_doubt_unless_the_server_hung_up(self, rim: Rim) -> None:
        for way, quarantined in (("close", False), ("shutdown", True)):
            opened = rim.open_session()
            with Student(rim.path) as student:
                rim.prove(opened, student.hello(opened))
                size = rim.lend(opened).payload.size_bytes
                rim.ledger.close_session(opened.terms.session_id)
                if way == "close":
                    student.socket.close()
                    assert rim.freed.wait(PATIENCE)
                else:
                    student.socket.shutdown(socket.SHUT_WR)
                    assert student.is_hung_up_on()
                    self._wait_for_the_end(rim)

            assert (rim.room()[1] >= size) is quarantined

    @pytest.mark.parametrize("way", ["close", "shutdown"])
    def test_while_its_process_lives_quarantines_the_room(self, rim: Rim, way: str) -> None:
        opened = rim.open_session()
        with Student(rim.path) as student:
            rim.prove(opened, student.hello(opened))
            rim.lend(opened)
            size = rim.room()[0]
            if way == "close":
                student.socket.close()
            else:
                student.socket.shutdown(socket.SHUT_WR)
            self._wait_for_the_end(rim)

            assert rim.room() == (0, size)

    def test_that_is_only_shut_down_is_answered_with_the_end_of_it(self, rim: Rim) -> None:
        with Student(rim.path) as student:
            student.hello(rim.open_session())
            student.socket.shutdown(socket.SHUT_WR)

            assert student.socket.recv(65536) == b""

    def test_and_then_of_its_process_frees_the_room(self, rim: Rim) -> None:
        opened = rim.open_session()
        with student_process(rim, opened, manner="exec") as (process, _, challenge):
            assert process.stdin is not None
            rim.prove(opened, challenge)
            rim.lend(opened)
            size = rim.room()[0]
            process.stdin.write(b"x")
            process.stdin.flush()
            self._wait_for_the_end(rim)
            assert rim.room() == (0, size)
            assert process.poll() is None

            process.stdin.close()

            assert rim.freed.wait(PATIENCE)
            assert rim.room() == (0, 0)
            assert rim.ledger.view().sessions == ()

    def test_that_the_broker_made_is_no_proof_with_its_process(self, rim: Rim) -> None:
        opened = rim.open_session()
        with student_process(rim, opened, manner="shut") as (process, _, challenge):
            assert process.stdin is not None
            rim.prove(opened, challenge)
            rim.lend(opened)
            process.stdin.write(b"x")
            process.stdin.flush()
            self._wait_for_the_end(rim)
            quarantined = rim.room()
            process.kill()
            process.wait(PATIENCE)
            with Student(rim.path) as other:  # a round trip: the broker has had its look
                other.hello(rim.open_session())

            # A child that nobody knows of may hold the other end, and read.
            assert rim.room() == quarantined

    def test_by_the_broker_quarantines_the_room(self, rim: Rim) -> None:
        opened = rim.open_session()
        with Student(rim.path) as deaf:
            rim.prove(opened, deaf.hello(opened))
            rim.lend(opened)
            renew = messages.RenewSessionRequest(session_id=opened.terms.session_id)
            packet = line_pb2.LineRequest(renew=renew).SerializeToString()
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                deaf.flood(packet)
            self._wait_for_the_end(rim)

            assert rim.room()[1] > 0

    def test_waits_for_a_process_that_is_on_its_way_out(
        self, rim: Rim, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # What the broker sees between a dying process's two signs: the line's end alone.
        monkeypatch.setattr(Peer, "is_exiting", lambda peer: True)
        opened = rim.open_session()
        with student_process(rim, opened) as (process, holder, challenge):
            rim.prove(opened, challenge)
            rim.lend(opened)
            os.kill(holder, signal.SIGKILL)
            assert rim.freed.wait(PATIENCE)

        assert rim.room() == (0, 0)
        assert process.returncode == -signal.SIGKILL

    def test_of_a_living_process_that_nobody_can_look_at_is_given_up_in_time(
        self, rim: Rim, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Peer, "is_exiting", lambda peer: None)
        monkeypatch.setattr(leaving, "UNKNOWN_GRACE_SECONDS", 0.01)
        opened = rim.open_session()
        with Student(rim.path) as student:
            rim.prove(opened, student.hello(opened))
            rim.lend(opened)
            student.socket.close()
            self._wait_for_the_end(rim)

            assert rim.room()[1] > 0

    def _wait_for_the_end(self, rim: Rim) -> None:
        """Wait until the end was seen: room is in quarantine."""
        limit = MonotonicClock().now() + PATIENCE
        while not rim.room()[1]:
            assert MonotonicClock().now() < limit
            with Student(rim.path) as other, pytest.raises(TeacherLogitsError):
                raise_status(other.send(b"anything"))


class TestStopping:
    def test_leaves_no_thread_and_no_descriptor(self, tmp_path: Path) -> None:
        threads, descriptors = running_threads(), open_descriptors()
        with running(str(tmp_path / "broker")) as rim:
            students = [Student(rim.path) for _ in range(3)]
            for student in students:
                opened = rim.open_session()
                rim.prove(opened, student.hello(opened))
            students.append(Student(rim.path))
        for student in students:
            student.__exit__()

        assert not left_behind(threads, running_threads)
        assert not left_behind(descriptors, open_descriptors)

    def test_lines_that_come_and_go_leave_no_descriptor(self, rim: Rim) -> None:
        with Student(rim.path) as bystander:
            bystander.hello(rim.open_session())
            before = open_descriptors()
            for _ in range(50):
                with Student(rim.path) as student:
                    student.hello(rim.open_session())
            with Student(rim.path) as last:
                assert last.hello(rim.open_session())  # all earlier ends were seen

            assert len(left_behind(before, open_descriptors, at_most=4)) <= 4

    def test_twice_is_fine(self, rim: Rim) -> None:
        other = Broker(
            path=f"{rim.path}2",
            desk=rim.desk,
            clock=MonotonicClock(),
            hello_within=timedelta(seconds=1),
            max_lines=1,
        )
        other.stop()  # never started
        other.start()
        other.stop()
        other.stop()

        assert not other.is_alive
