"""What a client hears from a server that means harm: chunks, packets of its line, replies.

Whatever comes, the client's caller gets an error of the tree, or what holds as a payload.
"""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import crc32c
import torch
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from tests.compat.golden_bytes import instances_of, schema
from tests.contract.wire.test_wire_foreign import readers
from tests.encoded import Written, written
from tests.fuzz.lines import Descriptors
from tests.fuzz.surface import PATIENCE_SECONDS, joined, split

from teacher_logits.errors import TeacherLogitsError
from teacher_logits.terms import LeaseTerms
from teacher_logits.v1 import bulk_service_pb2, line_pb2
from teacher_logits.wire.errors import from_status
from teacher_logits_client.line import Line
from teacher_logits_client.openers.buffers import BufferPool
from teacher_logits_client.openers.stream import StreamOpener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_NEVER = float("inf")
_CODECS = ("", "float16", "bfloat16", "uint8")
_ID_CODECS = ("int32", "planes24", "packed18")


class Chunks:
    """The stream of a payload's bytes, as it was written or in each codec.

    input   CODEC chunks, each behind its length

    CODEC is a byte: which values, which ids, and in its highest bit whether each chunk that can be
    read is given the checksum of its data.
    """

    name = "chunks"

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(3)
        logits = torch.randn(6, 40, generator=dice)
        self._source = written(logits, top_k=4, row_lengths=(4, 2))
        self._pool = BufferPool()

    def seeds(self) -> Sequence[bytes]:
        return [
            bytes([mode | high]) + joined(self._chunks(mode, size))
            for mode in range(len(_CODECS) * len(_ID_CODECS))
            for size in (100, 1 << 15)
            for high in (0, 0x80)
        ]

    def run(self, data: bytes) -> str:
        mode = data[0] if data else 0
        messages = split(data[1:])
        if mode & 0x80:
            messages = list(map(_with_checksum, messages))
        opener = StreamOpener(
            partial(_read_once, messages),
            pool=self._pool,
            count=lambda size: None,
            pause=lambda seconds: None,
        )
        try:
            opened = opener.open(self._lease(mode), until=_NEVER)
        except TeacherLogitsError as error:
            return error.reason
        assert len(opened.buffer) == self._source.payload.size_bytes
        opened.finish(outlived=False)
        return "OK"

    def check(self) -> None:
        for mode in range(len(_CODECS) * len(_ID_CODECS)):
            assert self.run(bytes([mode]) + joined(self._chunks(mode, 100))) == "OK"
        assert self._pool.idle_bytes < 1 << 20

    def close(self) -> None:
        pass

    def _lease(self, mode: int) -> LeaseTerms:
        values = _CODECS[(mode & 0x7F) // len(_ID_CODECS) % len(_CODECS)]
        ids = _ID_CODECS[(mode & 0x7F) % len(_ID_CODECS)]
        payload = self._source.payload
        encoding = self._source.encoding(values, ids) if values else None
        return LeaseTerms(
            lease_id="l", payload=payload, writer_id="w", extent=None, encoding=encoding
        )

    def _chunks(self, mode: int, size: int) -> list[bytes]:
        lease = self._lease(mode)
        source: Written = self._source
        data = bytes(source.room) if lease.encoding is None else source.encoded(lease.encoding)
        return [_chunk(data[at : at + size], at) for at in range(0, len(data), size)]


def _chunk(data: bytes, offset: int) -> bytes:
    return bulk_service_pb2.ReadPayloadResponse(
        offset_bytes=offset, crc32c=crc32c.crc32c(data), data=data
    ).SerializeToString()


def _with_checksum(message: bytes) -> bytes:
    try:
        found = bulk_service_pb2.ReadPayloadResponse.FromString(message)
    except DecodeError:
        return message
    return _chunk(found.data, found.offset_bytes)


def _read_once(
    messages: list[bytes], lease_id: str, offset: int, seconds: float
) -> Iterator[bytes]:
    while messages:
        yield messages.pop(0)


class Packets:
    """The line: what its broker sends, with descriptors of any kind, while the client calls.

    input   packets, each behind its length:   KIND reply

    The client's calls have the ids 1, 2 and so on; 0 is mail. KIND as for `lines`.
    """

    name = "packets"

    def __init__(self) -> None:
        self._descriptors = Descriptors()
        self._folder = tempfile.TemporaryDirectory(prefix="tl-")
        self._path = str(Path(self._folder.name) / "b")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._path)
        self._listener.listen()

    def seeds(self) -> Sequence[bytes]:
        replies = []
        for each in instances_of("LineReply"):
            for call_id in (0, 1, 2):
                message = line_pb2.LineReply.FromString(each.data)
                message.call_id = call_id
                if call_id:
                    message.ClearField("status")
                replies.append(message)
        bodies: list[dict[str, object]] = [
            {"hello": {"challenge_size_bytes": 32}},
            {"get_slab": {"slab_id": "s", "size_bytes": self._descriptors.slab.total_bytes}},
            {"release": {}},
        ]
        good = [
            ParseDict({"call_id": number + 1, **body}, line_pb2.LineReply())
            for number, body in enumerate(bodies)
        ]
        return [
            joined([b"\1" + each.SerializeToString() for each in good]),
            *(joined([b"\0" + each.SerializeToString()]) for each in replies),
            *(joined([b"\1" + each.SerializeToString()]) for each in replies[:6]),
        ]

    def run(self, data: bytes) -> str:
        mail: list[object] = []
        line = Line(
            self._path,
            timeout=PATIENCE_SECONDS,
            on_mail=mail.append,
            late_lease=lambda lease_id: None,
        )
        try:
            server, _ = self._listener.accept()
            with server:
                for packet in split(data):
                    with suppress(BlockingIOError, OSError):
                        self._send(server, packet)
                server.shutdown(socket.SHUT_WR)  # what came counts, and nothing else will
                return self._call(line)
        finally:
            line.close()

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._listener.close()
        self._folder.cleanup()
        self._descriptors.close()

    def _send(self, server: socket.socket, packet: bytes) -> None:
        server.setblocking(False)
        descriptors = self._descriptors.of(packet[0] if packet else 0)
        if descriptors:
            socket.send_fds(server, [packet[1:]], descriptors)
        else:
            server.send(packet[1:])

    def _call(self, line: Line) -> str:
        """Make a call of each kind, which ends at once; what became of the first one counts."""
        words = []
        calls: list[Callable[[], object]] = [
            lambda: line.hello("s", b"n", timeout=PATIENCE_SECONDS),
            lambda: os.close(line.get_slab("s", PATIENCE_SECONDS).descriptor),
            lambda: line.acquire("s", request_id="r", payload_id="p", timeout=PATIENCE_SECONDS),
            lambda: line.release("s", "l", timeout=PATIENCE_SECONDS),
            lambda: line.is_revoked("l"),
        ]
        for call in calls:
            try:
                call()
                words.append("OK")
            except TeacherLogitsError as error:
                words.append(error.reason)
        return words[0]


class Replies:
    """Every message that a reader of the contract takes, from bytes.

    input   READER (a byte) message
    """

    name = "replies"

    def __init__(self) -> None:
        self._schema = schema()
        self._readers = [
            (name, read.args[0], read.args[1], read.args[2])  # type: ignore[attr-defined]
            for name, read in sorted(readers(), key=lambda each: each[0])
        ]

    def seeds(self) -> Sequence[bytes]:
        seeds = []
        for at, (_, _, make, _) in enumerate(self._readers):
            descriptor = make.DESCRIPTOR
            kept = instances_of(descriptor.name) if descriptor.name in self._schema else []
            seeds += [bytes([at]), *(bytes([at]) + each.data for each in kept)]
        status = status_pb2.Status(code=3, message="m")
        return [*seeds, b"\xff" + status.SerializeToString()]

    def run(self, data: bytes) -> str:
        at, raw = (data[0] if data else 0), data[1:]
        try:
            if at == 0xFF:
                from_status(status_pb2.Status.FromString(raw))
                return "STATUS"
            _, read, make, rest = self._readers[at % len(self._readers)]
            read(make.FromString(raw), **rest)
        except DecodeError:
            return "NO MESSAGE"
        except TeacherLogitsError as error:
            return error.reason
        return "OK"

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass
