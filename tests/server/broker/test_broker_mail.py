"""Mail over broker lines: who reads none, who is told by which thread, and in which order."""

from __future__ import annotations

import os
import socket
import threading
from collections import defaultdict, deque
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.some_payload import some_payload

from teacher_logits.clock import MonotonicClock
from teacher_logits.terms import LeaseTerms, RoomFreed, StepFailure, StepGrant
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.steps import mail_from_wire
from teacher_logits_server.broker import Broker
from teacher_logits_server.broker.lines import MAX_PACKET_BYTES, Answer, Flaw, Line
from teacher_logits_server.broker.outbox import MAX_WAITING
from teacher_logits_server.services.lease_messages import LeaseMessages
from teacher_logits_server.services.mail_packets import MAX_FREED, failure_of, mail_packets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PATIENCE = 30.0
LETTER = bytes(16 * 1024)


class PostOffice:
    """A desk whose packets are text: the first names the line's session, a publisher's where it
    says so, ``for:WHOM WHOM`` has letters sent to others, and all are echoed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.broker: Broker | None = None
        self.readers: list[Reader] = []
        self.letters: defaultdict[str, deque[bytes]] = defaultdict(deque)
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.died: list[str] = []
        self.all_ended = threading.Event()

    def reader(self, name: str) -> Reader:
        """One that has said its name."""
        self.readers.append(reader := Reader(self.path))
        assert reader.ask(name.encode()) == b"re " + name.encode()
        return reader

    def answer(self, line: Line, packet: bytes, descriptor: int | None = None) -> Answer:
        if not line.session_id:
            line.session_id = packet.decode()
            line.takes_descriptors = packet.startswith(b"publisher")
        elif packet.startswith(b"for:"):
            whom = packet.removeprefix(b"for:").decode().split()
            for session_id in whom:
                self.letters[session_id].append(b"from " + line.session_id.encode())
            assert self.broker is not None
            self.broker.tell(whom)
        return Answer(b"re " + packet)

    def write(self, session_id: str, *letters: bytes) -> None:
        """Write letters, and have them fetched."""
        assert self.broker is not None
        self.letters[session_id].extend(letters)
        self.broker.tell([session_id])

    def refuse(self, line: Line, packet: bytes, flaw: Flaw) -> Answer:
        return Answer(flaw.value.encode())

    def mail(self, line: Line) -> Sequence[bytes]:
        """Give out one letter at a time, as a ledger gives what is due."""
        self.asked.append(line.session_id)
        letters = self.letters[line.session_id]
        if letters and letters[0] == b"torn":
            raise ValueError("torn")
        taken = [*letters]
        letters.clear()
        return taken

    def line_ended(self, line: Line, *, process_alive: bool) -> bool:
        self.ended.append(line.session_id)
        self.all_ended.set()
        return False

    def process_died(self, line: Line) -> None:
        self.died.append(line.session_id)

    def process_ended(self, line: Line) -> None:
        self.ended.append(f"process of {line.session_id}")


class Reader:
    """A client's end of a line."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(path)

    def ask(self, packet: bytes) -> bytes:
        self.socket.send(packet)
        return self.next()

    def next(self) -> bytes:
        return self.socket.recv(1 << 17)


@contextmanager
def office(path: str) -> Iterator[PostOffice]:
    desk = PostOffice(path)
    desk.broker = Broker(
        path=path,
        desk=desk,
        clock=MonotonicClock(),
        hello_within=timedelta(seconds=PATIENCE),
        max_lines=8,
    )
    desk.broker.start()
    try:
        yield desk
        assert desk.broker is None or desk.broker.is_alive
    finally:
        if desk.broker is not None:
            desk.broker.stop()
        for reader in desk.readers:
            reader.socket.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "broker")


@pytest.fixture
def desk(path: str) -> Iterator[PostOffice]:
    with office(path) as desk:
        yield desk


def test_mail_that_another_thread_brings_is_sent_at_once(desk: PostOffice) -> None:
    reader = desk.reader("reader")
    desk.write("reader", b"one", b"two")

    assert [reader.next(), reader.next()] == [b"one", b"two"]


def test_mail_that_a_packet_brings_about_goes_out_before_the_packet_s_reply(
    desk: PostOffice,
) -> None:
    writer = desk.reader("writer")

    assert writer.ask(b"for:writer") == b"from writer"
    assert writer.next() == b"re for:writer"


def test_mail_for_another_line_reaches_it(desk: PostOffice) -> None:
    writer, reader = desk.reader("writer"), desk.reader("reader")
    writer.ask(b"for:reader")

    assert reader.next() == b"from writer"


def test_readers_have_their_mail_before_publishers(desk: PostOffice) -> None:
    publisher, student = desk.reader("publisher"), desk.reader("student")

    assert publisher.ask(b"for:publisher student") == b"from publisher"
    assert student.next() == b"from publisher"
    assert publisher.next() == b"re for:publisher student"
    assert desk.asked == ["student", "publisher"]


def test_mail_for_nobody_is_left_where_it_is(desk: PostOffice) -> None:
    desk.reader("reader")
    desk.write("stranger", b"one")
    desk.write("reader", b"two")

    assert desk.letters["stranger"] == deque([b"one"])


class TestAReaderThatReadsNothing:
    @pytest.fixture
    def deaf(self, desk: PostOffice) -> Reader:
        """One whose socket has no more room, and whose outbox is not empty."""
        deaf = desk.reader("deaf")
        desk.write("deaf", *(LETTER for _ in range(30)))
        desk.reader("bystander")  # a round trip: the broker has sent what it could
        return deaf

    def test_keeps_nobody_else_from_theirs(self, desk: PostOffice, deaf: Reader) -> None:
        other = desk.reader("other")
        desk.write("other", b"hello")

        assert other.next() == b"hello"
        assert other.ask(b"well?") == b"re well?"

    def test_is_not_asked_for_until_it_has_read(self, desk: PostOffice, deaf: Reader) -> None:
        for number in range(3):
            desk.write("deaf", b"late %d" % number)
        desk.reader("other")  # a round trip: the broker has looked

        assert desk.asked == ["deaf"]
        assert len(desk.letters["deaf"]) == 3

    def test_gets_all_of_it_in_order_once_it_reads(self, desk: PostOffice, deaf: Reader) -> None:
        desk.write("deaf", b"late")

        assert [deaf.next() for _ in range(31)] == [*[LETTER] * 30, b"late"]
        assert desk.ended == []

    def test_is_answered_behind_its_mail_and_not_dropped(
        self, desk: PostOffice, deaf: Reader
    ) -> None:
        deaf.socket.send(b"still here")

        assert [deaf.next() for _ in range(30)] == [LETTER] * 30
        assert deaf.next() == b"re still here"

    def test_is_dropped_once_too_many_replies_wait(self, desk: PostOffice, deaf: Reader) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(MAX_WAITING + 1):
                deaf.socket.send(b"again")

        assert desk.all_ended.wait(PATIENCE)
        assert desk.ended == ["deaf"]

    def test_that_leaves_is_let_go(self, desk: PostOffice, deaf: Reader) -> None:
        deaf.socket.close()

        assert desk.all_ended.wait(PATIENCE)
        assert desk.reader("other").ask(b"well?") == b"re well?"


def test_mail_that_fails_ends_that_line_alone(
    desk: PostOffice, caplog: pytest.LogCaptureFixture
) -> None:
    victim, other = desk.reader("victim"), desk.reader("other")
    desk.write("victim", b"torn")

    assert victim.next() == b""
    assert other.ask(b"well?") == b"re well?"
    assert "mail failed" in caplog.messages


def test_a_packet_of_64_kib_is_read_whole_and_a_larger_one_refused(desk: PostOffice) -> None:
    reader = desk.reader("reader")

    assert reader.ask(bytes(MAX_PACKET_BYTES)) == b"re " + bytes(MAX_PACKET_BYTES)
    assert reader.ask(bytes(MAX_PACKET_BYTES + 1)) == b"oversized"


def test_a_broker_that_is_told_of_mail_as_it_stops_stops(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.eventfd_read
    stopping = threading.Event()
    with office(path) as desk:
        assert desk.broker is not None

        def read_late(fd: int) -> int:
            # The broker woke for mail: it is stopped before it gets to its own wake-up call.
            if not stopping.is_set():
                stopping.set()
                while desk.broker is not None and desk.broker._postbox._is_open:
                    pass
            return read(fd)

        monkeypatch.setattr(os, "eventfd_read", read_late)
        desk.write("reader", b"one")
        assert stopping.wait(PATIENCE)
        desk.broker.stop()

        assert not desk.broker.is_alive
        desk.broker = None


def test_telling_a_broker_that_has_stopped_is_fine(path: str) -> None:
    with office(path) as desk:
        pass
    desk.write("reader", b"late")


class TestPackets:
    def test_of_many_freed_payloads_are_several(self) -> None:
        ids = tuple(f"p-{number:040}" for number in range(2 * MAX_FREED + 1))
        packets = mail_packets(RoomFreed(payload_ids=ids, lowest_open_step=3), LeaseMessages())

        read = [mail_from_wire(line_pb2.LineReply.FromString(packet)) for packet in packets]
        assert max(map(len, packets)) <= MAX_PACKET_BYTES
        assert all(isinstance(each, RoomFreed) and each.lowest_open_step == 3 for each in read)
        assert [i for each in read if isinstance(each, RoomFreed) for i in each.payload_ids] == [
            *ids
        ]

    def test_that_no_line_carries_say_so_instead(self) -> None:
        payload = some_payload(
            payload_id="p" * 100,
            teacher_id="t" * 100,
            vocabulary_size=2,
        )
        lease = LeaseTerms(lease_id="l", payload=payload, writer_id="server", extent=None)
        grant = StepGrant(step=7, leases=(lease,) * 1000, real_rows=4)

        (large,) = mail_packets(grant, LeaseMessages())
        (packet,) = mail_packets(failure_of(grant, len(large)), LeaseMessages())
        assert len(large) > MAX_PACKET_BYTES
        read = mail_from_wire(line_pb2.LineReply.FromString(packet))
        assert isinstance(read, StepFailure)
        assert read.step == 7
        assert "1000 shards" in read.error.message
