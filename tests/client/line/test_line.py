"""The client's end of the broker line, against a broker that does as the test tells it."""

import array
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.held import left_behind, open_descriptors
from tests.some_payload import some_payload

from teacher_logits.errors import (
    DeadlinePassedError,
    NotAllowedError,
    ServerUnreachableError,
    SlabOpenError,
)
from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.pool import PAGE_BYTES
from teacher_logits.slab import WriterSlab
from teacher_logits.terms import LeaseTerms, Mail
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.errors import to_status
from teacher_logits.wire.payloads import lease_to_wire
from teacher_logits_client.line import Line, packets
from teacher_logits_client.line.replies import Reply

SOON, LONG = 0.05, 30.0


class Broker:
    """One connection's other end."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def take(self) -> line_pb2.LineRequest:
        self.socket.settimeout(LONG)
        return line_pb2.LineRequest.FromString(self.socket.recv(65536))

    def answer(self, reply: line_pb2.LineReply, *descriptors: int) -> None:
        rights = array.array("i", descriptors)
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        self.socket.sendmsg([reply.SerializeToString()], beside)

    def fill(self, line: Line) -> None:
        """Be so busy that the line's socket is full."""
        with suppress(BlockingIOError):
            while True:
                line._socket.send(b"x" * 1000)


@contextmanager
def a_line(
    folder: Path,
    late: list[str] | None = None,
    *,
    on_mail: Callable[[Mail], None] = lambda mail: None,
) -> Iterator[tuple[Line, Broker]]:
    path = str(folder / "broker")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        late_lease = None if late is None else late.append
        line = Line(path, timeout=LONG, late_lease=late_lease, on_mail=on_mail)
        connection, _ = listener.accept()
    with connection:
        try:
            yield line, Broker(connection)
        finally:
            line.close()


def released(call_id: int) -> line_pb2.LineReply:
    reply = line_pb2.LineReply(call_id=call_id)
    reply.release.SetInParent()
    return reply


def leased(call_id: int, lease_id: str) -> line_pb2.LineReply:
    columns, size = top_k_columns(
        row_count=1,
        position_count=1,
        top_k=1,
        temperature_count=1,
        value_type=ElementType.FLOAT16,
    )
    payload = some_payload(
        vocabulary_size=8,
        columns=columns,
        size_bytes=size,
    )
    lease = LeaseTerms(lease_id=lease_id, payload=payload, writer_id="server", extent=None)
    reply = line_pb2.LineReply(call_id=call_id)
    reply.acquire.lease.CopyFrom(lease_to_wire(lease))
    return reply


def a_page(text: bytes) -> int:
    fd = os.memfd_create("page")
    os.truncate(fd, 4096)
    os.pwrite(fd, text, 0)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_the_challenge_is_read_from_the_page_that_came_beside_the_reply(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.hello, "s-1", b"nonce", timeout=LONG)
        request = broker.take()
        reply = line_pb2.LineReply(call_id=request.call_id)
        reply.hello.challenge_size_bytes = 9
        page = a_page(b"challenge and more")
        broker.answer(reply, page)
        os.close(page)

        assert call.result(LONG) == b"challenge"
        assert (request.hello.session_id, request.hello.nonce) == ("s-1", b"nonce")


@pytest.mark.parametrize("size", [0, -1, 1 << 30])
def test_a_challenge_of_an_absurd_size_is_refused(tmp_path: Path, size: int) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.hello, "s-1", b"nonce", timeout=LONG)
        reply = line_pb2.LineReply(call_id=broker.take().call_id)
        reply.hello.challenge_size_bytes = size
        page = a_page(b"x")
        broker.answer(reply, page)
        os.close(page)

        with pytest.raises(SlabOpenError, match=f"{size}; this side reads"):
            call.result(LONG)


def test_a_slab_comes_as_a_descriptor_of_our_own(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.get_slab, "slab-1", LONG)
        reply = line_pb2.LineReply(call_id=broker.take().call_id)
        reply.get_slab.slab_id = "slab-1"
        page = a_page(b"slab")
        broker.answer(reply, page)
        os.close(page)

        fd = call.result(LONG).descriptor
        assert os.pread(fd, 4, 0) == b"slab"
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.mark.parametrize("count", [0, 2])
def test_any_other_number_of_descriptors_is_refused_and_none_is_kept(
    tmp_path: Path, count: int
) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.get_slab, "slab-1", LONG)
        request = broker.take()
        page = a_page(b"slab")
        before = open_descriptors()
        reply = line_pb2.LineReply(call_id=request.call_id)
        reply.get_slab.slab_id = "slab-1"
        broker.answer(reply, *[page] * count)

        with pytest.raises(SlabOpenError, match=f"passed {count} descriptors"):
            call.result(LONG)
        assert not left_behind(before, open_descriptors)
        os.close(page)


def test_a_descriptor_that_this_process_may_not_have_costs_the_slab_and_not_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops it and says so, as it does where there is no room for it."""
    monkeypatch.setattr(packets, "_ROOM_BESIDE", 0)
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.get_slab, "slab-1", LONG)
        reply = line_pb2.LineReply(call_id=broker.take().call_id)
        reply.get_slab.slab_id = "slab-1"
        page = a_page(b"slab")
        broker.answer(reply, page)
        os.close(page)

        with pytest.raises(SlabOpenError, match="ulimit -n"):
            call.result(LONG)
        assert not line.has_ended


def test_what_the_broker_refuses_is_raised_as_it_was_there(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.release, "s-1", "l-1", timeout=LONG)
        refusal = NotAllowedError("not yours", facts={"lease_id": "l-1"})
        broker.answer(
            line_pb2.LineReply(
                call_id=broker.take().call_id, status=to_status(refusal).SerializeToString()
            )
        )

        with pytest.raises(NotAllowedError, match="not yours") as caught:
            call.result(LONG)
        assert caught.value.facts == {"lease_id": "l-1"}


def test_many_threads_share_a_line_and_replies_may_come_in_any_order(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor(8) as threads:
        calls = [
            threads.submit(line.acquire, "s-1", request_id="r", payload_id=str(n), timeout=LONG)
            for n in range(8)
        ]
        requests = [broker.take() for _ in calls]
        for request in reversed(requests):
            broker.answer(leased(request.call_id, f"l-{request.acquire.payload_id}"))

        assert [call.result(LONG).lease_id for call in calls] == [f"l-{n}" for n in range(8)]


def test_a_broker_that_does_not_answer_ends_the_call_by_its_deadline(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, _), pytest.raises(DeadlinePassedError, match="return of a"):
        line.release("s-1", "l-1", timeout=SOON)


def test_the_line_goes_on_after_an_interrupt_as_its_reader_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(line: Line) -> None:
        raise KeyboardInterrupt

    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        with monkeypatch.context() as patch:
            patch.setattr(Line, "_stop_reading", interrupt)
            with pytest.raises(KeyboardInterrupt):
                line.wait(lambda: False, time.monotonic() + SOON)
        answered = threads.submit(lambda: broker.answer(released(broker.take().call_id)))
        line.release("s-1", "l-1", timeout=LONG)
        answered.result(LONG)


def test_a_line_is_closed_by_who_was_interrupted_as_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_off(line: Line) -> None:
        line._reader = threading.get_ident()

    with a_line(tmp_path) as (line, _):
        monkeypatch.setattr(Line, "_stop_reading", leave_off)
        assert not line.wait(lambda: False, time.monotonic() + SOON)
        line.close()
        assert line._socket.fileno() == -1


def test_the_line_goes_on_after_a_call_that_was_given_up(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        with pytest.raises(DeadlinePassedError):
            line.release("s-1", "l-1", timeout=SOON)
        broker.answer(released(broker.take().call_id))  # too late
        call = threads.submit(line.release, "s-1", "l-2", timeout=LONG)
        broker.answer(released(broker.take().call_id))

        call.result(LONG)


def test_a_lease_that_comes_too_late_is_given_back(tmp_path: Path) -> None:
    late: list[str] = []
    with a_line(tmp_path, late) as (line, broker), ThreadPoolExecutor() as threads:
        with pytest.raises(DeadlinePassedError):
            line.acquire("s-1", request_id="r", payload_id="p-1", timeout=SOON)
        broker.answer(leased(broker.take().call_id, "l-late"))
        call = threads.submit(line.release, "s-1", "l-2", timeout=LONG)
        broker.answer(released(broker.take().call_id))
        call.result(LONG)

        assert late == ["l-late"]


def test_a_descriptor_beside_an_empty_packet_is_closed(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker):
        page, before = a_page(b"slab"), open_descriptors()
        socket.send_fds(broker.socket, [b""], [page])

        with pytest.raises(ServerUnreachableError):
            line.get_slab("slab-1", LONG)
        assert not left_behind(before, open_descriptors)


def test_the_descriptor_of_an_answer_that_is_given_twice_is_closed(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.get_slab, "slab-1", LONG)
        reply = line_pb2.LineReply(call_id=broker.take().call_id)
        reply.get_slab.slab_id = "slab-1"
        page, before = a_page(b"slab"), open_descriptors()
        with line._lock:  # who waits takes neither before both are there
            line._replies[reply.call_id] = Reply(reply, [os.dup(page)])
        line._deliver(Reply(reply, [os.dup(page)]))
        line.wake()
        broker.answer(line_pb2.LineReply(call_id=99))

        os.close(call.result(LONG).descriptor)
        assert not left_behind(before, open_descriptors)


def test_a_descriptor_that_comes_too_late_is_closed(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        with pytest.raises(DeadlinePassedError):
            line.get_slab("slab-1", SOON)
        page = a_page(b"slab")
        before = open_descriptors()
        reply = line_pb2.LineReply(call_id=broker.take().call_id)
        reply.get_slab.slab_id = "slab-1"
        broker.answer(reply, page)
        call = threads.submit(line.release, "s-1", "l-2", timeout=LONG)
        broker.answer(released(broker.take().call_id))
        call.result(LONG)

        assert not left_behind(before, open_descriptors)
        os.close(page)


def test_the_end_of_the_line_ends_the_calls_that_wait(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(line.release, "s-1", "l-1", timeout=LONG) for _ in range(3)]
        for _ in calls:
            broker.take()
        broker.socket.close()

        for call in calls:
            with pytest.raises(ServerUnreachableError, match="has ended"):
                call.result(LONG)
        assert line.has_ended


def test_an_idle_line_notices_that_the_broker_hung_up(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker):
        assert not line.has_ended
        broker.socket.close()

        assert line.has_ended
        with pytest.raises(ServerUnreachableError):
            line.release("s-1", "l-1", timeout=LONG)


@pytest.mark.parametrize("packet", [b"\xff" * 40, b"\x0a" * 70_000], ids=["random", "oversized"])
def test_a_packet_that_cannot_be_read_ends_the_line(tmp_path: Path, packet: bytes) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.release, "s-1", "l-1", timeout=LONG)
        broker.take()
        broker.socket.send(packet)

        with pytest.raises(ServerUnreachableError, match="cannot be read"):
            call.result(LONG)


def test_a_closed_line_is_closed_for_the_broker_too(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker):
        line.close()
        line.close()
        broker.socket.settimeout(LONG)

        assert broker.socket.recv(16) == b""
        with pytest.raises(ServerUnreachableError, match="this client closed it"):
            line.release("s-1", "l-1", timeout=LONG)


def test_closing_does_not_end_the_line_of_a_process_that_inherited_it(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker):
        inherited = line._socket.dup()
        line.close()

        broker.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            broker.socket.recv(16)
        inherited.close()
        assert broker.socket.recv(16) == b""


def test_a_line_that_is_closed_during_a_call_ends_the_call_and_then_the_line(
    tmp_path: Path,
) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor() as threads:
        call = threads.submit(line.release, "s-1", "l-1", timeout=LONG)
        broker.take()
        line.close()

        with pytest.raises(ServerUnreachableError, match="this client closed it"):
            call.result(LONG)
        broker.socket.settimeout(LONG)
        assert broker.socket.recv(16) == b""


def test_a_full_socket_is_waited_for_no_longer_than_the_deadline(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker):
        broker.fill(line)

        with pytest.raises(DeadlinePassedError):
            line.release("s-1", "l-1", timeout=SOON)


def test_who_is_woken_by_a_file_leaves_that_to_the_next_wait(tmp_path: Path) -> None:
    slab = WriterSlab("slab", PAGE_BYTES)
    with a_line(tmp_path) as (line, _):
        connection = line._socket
        line.watch(slab.fd)
        files = connection.files
        assert files is not None
        told = []
        for wanted in (False, True, False, True, False):  # its bell first, since it watches anew
            assert not packets.wait(connection, select.POLLIN, time.monotonic() + LONG)
            told.append(files.is_told)
            slab.let_in(0, 2 + 2 * len(told))
            assert told[-1] == wanted
        packets.wait(connection, select.POLLIN, time.monotonic() + LONG)
        packets.wait(connection, select.POLLIN, time.monotonic() + LONG)
        assert not packets.wait(connection, select.POLLIN, time.monotonic())
        assert not files.is_told
    slab.close()


def test_nobody_at_the_path_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Line(str(tmp_path / "nobody"), timeout=LONG)


def test_a_waiting_thread_takes_over_when_the_reader_has_its_own_reply(tmp_path: Path) -> None:
    with a_line(tmp_path) as (line, broker), ThreadPoolExecutor(2) as threads:
        first = threads.submit(line.release, "s-1", "l-1", timeout=LONG)
        one = broker.take()
        second = threads.submit(line.release, "s-1", "l-2", timeout=LONG)
        two = broker.take()
        broker.answer(released(one.call_id))
        first.result(LONG)
        broker.answer(released(two.call_id))

        second.result(LONG)
