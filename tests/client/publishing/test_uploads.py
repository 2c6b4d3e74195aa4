"""Uploads: a draft's bytes reach the server whole, however often the stream breaks."""

from collections.abc import Iterable
from time import monotonic
from typing import cast

import pytest
from tests.client.slabs.test_own_slabs import GOOD, LONG, a_claim

from teacher_logits.errors import (
    ChecksumError,
    DeadlinePassedError,
    PayloadConflictError,
    PoolFullError,
    ReservationLapsedError,
    ServerUnreachableError,
    StreamBrokenError,
)
from teacher_logits.payload_room import HostRoom
from teacher_logits.terms import Reservation
from teacher_logits.v1 import registry_service_pb2
from teacher_logits_client.calls.registry import RegistryCalls, _named, chunk
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.publishing.uploads import CHUNK_BYTES, Uploads

SIZE = 3 * CHUNK_BYTES + 17


class Server:
    """Takes chunks, and breaks off after as many of them as it is told."""

    def __init__(self, *breaks: int | None) -> None:
        self.flaw: type[Exception] = StreamBrokenError
        self.data = bytearray()
        self.breaks = list(breaks)
        self.asked = 0
        self.sealed: list[str] = []
        self.reserved: list[str] = []
        self.abandoned: list[str] = []
        self.full = 0

    def reserve(self, session_id: str, *, request_id: str, **claim: object) -> Reservation:
        self.reserved.append(request_id)
        if self.full:
            self.full -= 1
            raise DeadlinePassedError("no room", facts={"need_bytes": SIZE, "free_bytes": 0})
        return Reservation(payload_id="p-0", is_repeat=False, lowest_open_step=0)

    def write(
        self, session_id: str, payload_id: str, chunks: Iterable[bytes], *, timeout: float
    ) -> int:
        left = None
        for message in _named(session_id, payload_id, chunks):
            part = registry_service_pb2.WritePayloadRequest.FromString(message)
            if not part.data:
                self.asked += 1
                continue
            if left is None and self.breaks:
                left = self.breaks.pop(0)
            if left == 0:
                raise self.flaw("gone")
            left = None if left is None else left - 1
            assert part.offset_bytes == len(self.data)
            self.data += part.data
        return len(self.data)

    def seal(self, session_id: str, payload_id: str, **sealing: object) -> None:
        self.sealed.append(payload_id)

    def abandon(self, session_id: str, payload_id: str, *, timeout: float) -> bool:
        self.abandoned.append(payload_id)
        return False


def uploads(server: Server) -> Uploads:
    return Uploads(
        "session",
        registry=cast("RegistryCalls", server),
        buffers=BufferPool(),
        pause=lambda seconds: None,
    )


@pytest.mark.parametrize("breaks", [(), (2,), (0, 0, 1), (1, 0, 0, 0, 1)])
def test_a_broken_upload_goes_on_where_the_server_is(breaks: tuple[int, ...]) -> None:
    server = Server(*breaks)
    way = uploads(server)
    granted = way.reserve(a_claim(0, SIZE), until=monotonic() + LONG).room
    assert isinstance(granted, HostRoom)
    room = granted.view
    room[:] = bytes(n % 251 for n in range(SIZE))
    way.seal("p-0", GOOD, until=monotonic() + LONG)
    assert server.data == room
    assert server.asked == len(breaks)
    assert server.sealed == ["p-0"]


def test_an_upload_that_gets_nowhere_is_given_up() -> None:
    server = Server(*[0] * 9)
    way = uploads(server)
    way.reserve(a_claim(0, SIZE), until=monotonic() + LONG)
    with pytest.raises(ServerUnreachableError, match="gone"):
        way.seal("p-0", GOOD, until=monotonic() + LONG)
    server.breaks.clear()
    way.seal("p-0", GOOD, until=monotonic() + LONG)
    assert server.sealed == ["p-0"]


def test_bytes_that_changed_on_the_way_are_sent_again_and_not_for_ever() -> None:
    server = Server(1, 0)
    server.flaw = ChecksumError
    way = uploads(server)
    way.reserve(a_claim(0, SIZE), until=monotonic() + LONG)
    way.seal("p-0", GOOD, until=monotonic() + LONG)
    assert len(server.data) == SIZE

    server = Server(*[0] * 9)
    server.flaw = ChecksumError
    way = uploads(server)
    way.reserve(a_claim(0, SIZE), until=monotonic() + LONG)
    with pytest.raises(ChecksumError):
        way.seal("p-0", GOOD, until=monotonic() + LONG)


def test_an_upload_stops_at_its_deadline() -> None:
    way = uploads(Server(1))
    way.reserve(a_claim(0, SIZE), until=monotonic() + LONG)
    with pytest.raises(DeadlinePassedError, match="had been sent to byte"):
        way.seal("p-0", GOOD, until=monotonic() - 1)


def test_a_seal_that_is_tried_again_sends_nothing_twice() -> None:
    class Deaf(Server):
        def seal(self, session_id: str, payload_id: str, **sealing: object) -> None:
            super().seal(session_id, payload_id)
            if len(self.sealed) == 1:
                raise DeadlinePassedError("no answer")

    server = Deaf()
    way = uploads(server)
    way.reserve(a_claim(0, SIZE), until=monotonic() + LONG)
    with pytest.raises(DeadlinePassedError):
        way.seal("p-0", GOOD, until=monotonic() + LONG)
    way.seal("p-0", GOOD, until=monotonic() + LONG)
    assert len(server.data) == SIZE
    with pytest.raises(ReservationLapsedError):
        way.seal("p-0", GOOD, until=monotonic() + LONG)


def test_room_is_asked_for_until_the_caller_s_own_deadline() -> None:
    server = Server()
    server.full = 2
    uploads(server).reserve(a_claim(0, SIZE), until=monotonic() + LONG)
    assert len(set(server.reserved)) == 3
    server.full = 1
    with pytest.raises(PoolFullError, match="no room") as raised:
        uploads(server).reserve(a_claim(0, SIZE), until=monotonic() - 1)
    assert raised.value.facts["need_bytes"] == SIZE


def test_a_claim_that_was_asked_for_anew_is_given_up_by_its_last_request() -> None:
    server = Server()
    server.full = 2
    claim, way = a_claim(0, SIZE), uploads(server)
    way.reserve(claim, until=monotonic() + LONG)
    way.give_up(claim)
    first, second, third, last = server.reserved
    assert len({first, second, third}) == 3
    assert last == third
    assert server.abandoned == ["p-0"]


def test_a_buffer_is_used_again() -> None:
    way = uploads(Server())
    for _ in range(2):
        way.reserve(a_claim(0, SIZE), until=monotonic() + LONG)
        way.abandon("p-0", until=monotonic() + LONG)
    assert way._buffers.idle_bytes < 2 * SIZE


def test_a_conflict_is_raised_as_it_is() -> None:
    class Refusing(Server):
        def seal(self, session_id: str, payload_id: str, **sealing: object) -> None:
            raise PayloadConflictError("other bytes")

    way = uploads(Refusing())
    way.reserve(a_claim(0, SIZE), until=monotonic() + LONG)
    with pytest.raises(PayloadConflictError):
        way.seal("p-0", GOOD, until=monotonic() + LONG)


def test_a_chunk_is_what_protobuf_would_write() -> None:
    wanted = registry_service_pb2.WritePayloadRequest(
        offset_bytes=300, crc32c=0xE3069283, data=b"123456789"
    )
    assert chunk(memoryview(b"123456789"), 300) == wanted.SerializeToString()
    wanted.session_id, wanted.payload_id = "s", "p"
    (first,) = _named("s", "p", [chunk(memoryview(b"123456789"), 300)])
    assert registry_service_pb2.WritePayloadRequest.FromString(first) == wanted
