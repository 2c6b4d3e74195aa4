"""A client of the first release, written on its schema alone: nothing of the newest client is here.

It sets what that release's client set, opens the memory it is passed as that release laid it out,
and knows nothing that came later.
"""

import fcntl
import hashlib
import hmac
import itertools
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import crc32c
import grpc
from google.rpc import status_pb2
from tests.compat.schemas import FIRST

TIMEOUT_SECONDS = 20
VERSION = 1
SHARED_MEMORY = FIRST.value("Transport", "TRANSPORT_SHARED_MEMORY")
STREAM = FIRST.value("Transport", "TRANSPORT_STREAM")
PREFER = FIRST.value("Locality", "LOCALITY_PREFER")
STRICT = FIRST.value("VocabularyPolicy", "VOCABULARY_POLICY_STRICT")
CONTROL_BYTES, SLOTS_AT, ROOM_AT = 65536, 64, 16
_numbers = itertools.count(1)


def request_id() -> str:
    return f"first-{next(_numbers)}"


def grid(rows: int) -> Any:
    """One rank that reads, or writes, all rows."""
    return FIRST.message("BatchGrid")(
        global_batch_size=rows, data_parallel_size=1, micro_batch_size=1
    )


class Slab:
    """A slab of the first release: 64 KiB of control page, then room."""

    def __init__(self, descriptor: int, size_bytes: int, *, writes: bool = False) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        self._map = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=access)
        if not writes:
            assert self._map[:8] == b"TLSLAB\r\n"
            assert struct.unpack_from("<I", self._map, 8) == (1,)

    def read(self, extent: Any, size_bytes: int) -> bytes:
        """The bytes of an extent, whose slot says that they may be read, before and after."""
        slot = SLOTS_AT + 8 * extent.slot
        start = CONTROL_BYTES + extent.offset_bytes
        assert struct.unpack_from("<Q", self._map, slot) == (extent.generation,)
        data = self._map[start : start + size_bytes]
        assert struct.unpack_from("<Q", self._map, slot) == (extent.generation,)
        return data

    def write(self, data: bytes) -> None:
        """Write into the room's begin."""
        self._map[CONTROL_BYTES : CONTROL_BYTES + len(data)] = data

    def mark(self, slot: int, generation: int) -> None:
        """Write a slot, which lets readers in."""
        struct.pack_into("<Q", self._map, SLOTS_AT + 8 * slot, generation)


def make_slab(size_bytes: int) -> tuple[int, Slab]:
    """A slab of the publisher's own, closed to later writers, and its descriptor."""
    descriptor = os.memfd_create("first", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, CONTROL_BYTES + size_bytes)
    os.posix_fallocate(descriptor, 0, CONTROL_BYTES + size_bytes)
    slab = Slab(descriptor, CONTROL_BYTES + size_bytes, writes=True)
    add_seals, shrink, grow, future_write = 1033, 0x2, 0x4, 0x10
    fcntl.fcntl(descriptor, add_seals, shrink | grow | future_write)
    header = struct.pack("<8sIIQI", b"TLSLAB\r\n", 1, (CONTROL_BYTES - 64) // 8, size_bytes, 0)
    slab._map[: len(header)] = header
    for number in range((CONTROL_BYTES - 64) // 8):
        struct.pack_into("<Q", slab._map, SLOTS_AT + 8 * number, 1)
    return descriptor, slab


class Line:
    """A broker line of the first release."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(TIMEOUT_SECONDS)
        self._socket.connect(path)
        self._mail: deque[Any] = deque()
        self.descriptors: list[int] = []

    def call(self, descriptors: Iterable[int] = (), **body: object) -> Any:
        """Make a call; mail that comes meanwhile is kept."""
        call_id = next(_numbers)
        packet = FIRST.message("LineRequest")(call_id=call_id, **body).SerializeToString()
        socket.send_fds(self._socket, [packet], list(descriptors))
        while True:
            reply = self._receive()
            if reply.call_id:
                assert reply.call_id == call_id
                assert not reply.status, status_pb2.Status.FromString(reply.status).message
                return reply
            self._mail.append(reply)

    def mail(self) -> Any:
        """The next packet that was sent ahead."""
        return self._mail.popleft() if self._mail else self._receive()

    def take_descriptor(self) -> int:
        (descriptor,) = self.descriptors
        self.descriptors.clear()
        return descriptor

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> Any:
        packet, descriptors, _, _ = socket.recv_fds(self._socket, 65536, 4)
        assert packet, "the broker hung up"
        self.descriptors += descriptors
        return FIRST.message("LineReply").FromString(packet)


class Session:
    """A student's or a publisher's session, with its line if it shares memory."""

    def __init__(self, client: "FirstClient", opened: Any, *, shares: bool) -> None:
        self.client = client
        self.session_id: str = opened.session.session_id
        self.line = Line(opened.broker_path) if shares else None
        proofs = []
        if self.line is not None:
            size = self.line.call(
                hello={"session_id": self.session_id, "nonce": opened.nonce}
            ).hello.challenge_size_bytes
            page = self.line.take_descriptor()
            challenge = os.pread(page, size, 0)
            os.close(page)
            mac = hmac.new(opened.nonce, b"shared_memory\0" + challenge, hashlib.sha256).digest()
            proofs = [{"transport": SHARED_MEMORY, "writer_id": "server", "mac": mac}]
        self.settled = self.call("TeacherLogitsService/ProveLocality", proofs=proofs).session
        self._slabs: dict[str, Slab] = {}

    def call(self, method: str, **fields: object) -> Any:
        """Call an RPC of this session."""
        return self.client.call(method, session_id=self.session_id, **fields)

    def read(self, lease: Any) -> bytes:
        """All bytes of a lease."""
        if lease.WhichOneof("source") == "stream":
            chunks = self.client.stream(
                "BulkService/ReadPayload", session_id=self.session_id, lease_id=lease.lease_id
            )
            data = bytearray()
            for chunk in chunks:
                assert chunk.offset_bytes == len(data)
                assert chunk.crc32c == crc32c.crc32c(chunk.data)
                data += chunk.data
            return bytes(data)
        extent = lease.slab.extent
        if extent.slab_id not in self._slabs:
            assert self.line is not None
            passed = self.line.call(get_slab={"slab_id": extent.slab_id}).get_slab
            descriptor = self.line.take_descriptor()
            self._slabs[extent.slab_id] = Slab(descriptor, passed.size_bytes)
            os.close(descriptor)
        return self._slabs[extent.slab_id].read(extent, lease.payload.size_bytes)

    def close(self) -> None:
        self.call("TeacherLogitsService/CloseSession")
        if self.line is not None:
            self.line.close()


class FirstClient:
    """Calls a server as the first release's client did."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(self, path: str, **fields: object) -> Any:
        """Call an RPC that is answered once."""
        method, path = self._method(path)
        call: Any = self._channel.unary_unary(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=FIRST.message(method.output_type.name).FromString,
        )
        return call(FIRST.message(method.input_type.name)(**fields), timeout=TIMEOUT_SECONDS)

    def stream(self, path: str, **fields: object) -> Iterator[Any]:
        """Call an RPC that is answered by a stream."""
        method, path = self._method(path)
        call: Any = self._channel.unary_stream(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=FIRST.message(method.output_type.name).FromString,
        )
        replies: Iterator[Any] = call(
            FIRST.message(method.input_type.name)(**fields), timeout=TIMEOUT_SECONDS
        )
        return replies

    def upload(self, path: str, requests: Iterable[dict[str, object]]) -> Any:
        """Call an RPC whose requests are a stream."""
        method, path = self._method(path)
        make = FIRST.message(method.input_type.name)
        call: Any = self._channel.stream_unary(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=FIRST.message(method.output_type.name).FromString,
        )
        return call(iter([make(**each) for each in requests]), timeout=TIMEOUT_SECONDS)

    @contextmanager
    def student(self, *, shares: bool, **fields: object) -> Iterator[Session]:
        """A settled session of a student."""
        profile = FIRST.message("StudentProfile")(
            **{
                "batch_grid": grid(4),
                "top_k": 8,
                "student_id": "first",
                "readers_per_rank": 1,
                "vocabulary_policy": STRICT,
                "locality": PREFER,
                "transports": [SHARED_MEMORY, STREAM] if shares else [STREAM],
                **fields,
            }
        )
        with self._session("TeacherLogitsService/OpenSession", profile, shares=shares) as session:
            yield session

    @contextmanager
    def publisher(self, profile: Any, *, shares: bool) -> Iterator[Session]:
        """A settled session of a publisher."""
        with self._session("RegistryService/OpenPublisher", profile, shares=shares) as session:
            yield session

    @contextmanager
    def _session(self, path: str, profile: Any, *, shares: bool) -> Iterator[Session]:
        opened = self.call(path, request_id=request_id(), protocol_version=VERSION, profile=profile)
        session = Session(self, opened, shares=shares)
        try:
            yield session
        finally:
            session.close()

    def _method(self, path: str) -> tuple[Any, str]:
        path = f"/teacher_logits.v1.{path}"
        return FIRST.methods[path], path
