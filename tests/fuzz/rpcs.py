"""Every RPC: raw bytes, mutated messages, wrong kinds of streams, odd metadata, no deadline.

    input   MODE RPC raw request, or several of them behind their lengths

    p  as the method wants it                        s  a stream of requests whatever it wants
    m  with the first 64 bytes as metadata too       d  without a deadline
    u  of a method that nobody has                  o  made larger than most RPCs take

RPC is a byte, `code_of` its path or the next one up: an RPC that comes later moves few of them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import crc32c
import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from tests.compat.golden_bytes import instances_of, schema
from tests.fuzz.house import LEASE, PAYLOAD, PUBLISHER, RESERVED, SESSION, House, word_of_status
from tests.fuzz.surface import PATIENCE_SECONDS, joined, split
from tests.server.services import registry_rig as rig

from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.transport import Transport
from teacher_logits.v1 import registry_service_pb2 as registry
from teacher_logits.v1 import scoring_service_pb2 as scoring
from teacher_logits.v1 import teacher_logits_service_pb2 as student
from teacher_logits.wire import student_to_wire, teacher_to_wire, transport_to_wire
from teacher_logits.wire.errors import DETAILS_KEY
from teacher_logits.wire.payloads import payload_to_wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.descriptor import MethodDescriptor
    from google.protobuf.message import Message

SHARED = transport_to_wire(Transport.SHARED_MEMORY)
_PACKAGE = "teacher_logits.v1."
_WATCH = "/grpc.health.v1.Health/Watch"
_SHORT_SECONDS = 0.05
"""Of a watch, which has no end, and of a call without a request, which gRPC keeps from us."""
_METADATA_BYTES = 64
#: Codes that gRPC itself answers with, before anything of ours is asked.
_GRPCS_OWN = {
    grpc.StatusCode.UNIMPLEMENTED,  # no such method
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # larger than what is read at all
}


def methods() -> dict[str, Any]:
    """Every RPC of the newest schema, and those of the health protocol, by path."""
    files = {message.file for message in schema().values()} | {health_pb2.DESCRIPTOR}
    return {
        f"/{service.full_name}/{method.name}": method
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


#: A field that no message has, of more bytes than all but four RPCs take.
_FILLING = b"\xfa\xff\x07" + b"\x80\x80\x08" + bytes(128 * 1024)


def _is_unasked(sent: list[bytes], failure: Any) -> bool:
    """Whether a call ended at its own deadline that brought no request: gRPC waits for one."""
    return not sent and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def code_of(path: str) -> int:
    """The byte that stands for an RPC."""
    return crc32c.crc32c(path.encode()) & 0xFF


class Rpcs:
    """The surface."""

    name = "rpc"

    def __init__(self, house: House) -> None:
        self._house = house
        self._methods = methods()
        self._by_code = sorted((code_of(path), path) for path in self._methods)

    def seeds(self) -> Sequence[bytes]:
        """A request for each RPC, and the golden ones; ids are placeholders."""
        return [
            b"p" + bytes([code_of(path)]) + request.SerializeToString()
            for path, request in (*self._good(), *self._golden())
        ]

    def run(self, data: bytes) -> str:
        house = self._house
        mode, raw = data[:1].decode("latin-1"), data[2:]
        path = f"/{_PACKAGE}{raw[:20].hex()}" if mode == "u" else self._path_of(data[1:2])
        method = self._methods.get(path)
        if mode == "o":
            raw += _FILLING
        sent = [house.with_ids(each) for each in (split(raw) if mode == "s" else [raw])]
        metadata = [("fuzz-bin", raw[:_METADATA_BYTES])] if mode == "m" else None
        timeout: float | None = PATIENCE_SECONDS
        if path == _WATCH or not sent:
            timeout = _SHORT_SECONDS
        elif mode == "d":
            timeout = None
        try:
            replies = self._call(path, method, sent, mode, timeout=timeout, metadata=metadata)
        except grpc.RpcError as failure:
            word = "NOT ASKED" if _is_unasked(sent, failure) else self._word_of(path, failure)
        else:
            word = "OK"
            self._clean(path, method, replies)
        own = [house.ids[name.encode()] for name in (SESSION, PUBLISHER)]
        is_over = word == "SESSION_EXPIRED" or path.endswith(("CloseSession", "Reclaim"))
        if is_over and any(each in message for each in own for message in sent):
            house.forget()
        return word

    def _path_of(self, code: bytes) -> str:
        at = bisect_left(self._by_code, (code[0] if code else 0, ""))
        return self._by_code[at % len(self._by_code)][1]

    def check(self) -> None:
        self._house.assert_serves()

    def close(self) -> None:
        pass

    def _call(
        self,
        path: str,
        method: MethodDescriptor | None,
        sent: list[bytes],
        mode: str,
        **given: Any,
    ) -> list[bytes]:
        channel = self._house.wire.channel
        streams_back = method is not None and method.server_streaming
        streams_there = mode == "s" or (method is not None and method.client_streaming)
        if streams_there and streams_back:
            return list(channel.stream_stream(path, bytes, bytes)(iter(sent), **given))
        if streams_there:
            return [channel.stream_unary(path, bytes, bytes)(iter(sent), **given)]
        if streams_back:
            return list(channel.unary_stream(path, bytes, bytes)(sent[0], **given))
        return [channel.unary_unary(path, bytes, bytes)(sent[0], **given)]

    def _word_of(self, path: str, failure: Any) -> str:
        """The reason of a failure, which has details of ours unless gRPC gave it by itself."""
        for key, value in failure.trailing_metadata() or ():
            if key == DETAILS_KEY:
                return word_of_status(value)
        code: grpc.StatusCode = failure.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and path == _WATCH:
            return "WATCHED"
        assert code in _GRPCS_OWN or path.startswith("/grpc."), (path, code, failure.details())
        return f"grpc {code.name}"

    def _clean(self, path: str, method: MethodDescriptor | None, replies: list[bytes]) -> None:
        """Give back what an input was granted: a session, or a lease."""
        if method is None or not replies:
            return
        reply = schema().get(method.output_type.name)
        if reply is None:
            return
        if path.endswith(("OpenSession", "OpenPublisher")):
            opened = student.OpenSessionResponse.FromString(replies[0])
            self._house.close_session(opened.session.session_id)
        elif path.endswith(("Score", "ScoredIds", "AcquirePayload")):
            lease = scoring.ScoreResponse.FromString(replies[0]).lease
            for session in (SESSION, PUBLISHER):
                request = student.ReleasePayloadRequest(
                    session_id=self._house.ids[session.encode()].decode(), lease_id=lease.lease_id
                )
                try:
                    self._house.wire.students.ReleasePayload(request, timeout=PATIENCE_SECONDS)
                except grpc.RpcError:
                    continue

    def _good(self) -> Iterator[tuple[str, Message]]:
        house = self._house
        own: dict[str, Any] = {"session_id": SESSION}
        asked: dict[str, Any] = {"request_id": "fuzz"}
        rows: dict[str, Any] = {"input_ids": b"\1\0\0\0\2\0\0\0", "row_lengths": [2], "bad_rows": 1}
        version: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION}
        publisher: dict[str, Any] = {"session_id": PUBLISHER, "payload_id": RESERVED}
        payload = payload_to_wire(house.payload("rpc", step=1))
        positions = rig.positions_of(house.payload("rpc"))
        profile = student_to_wire(house.student_profile())
        proof = student.LocalityProof(transport=SHARED, writer_id="server", mac=b"m")
        teacher = teacher_to_wire(house.teacher_profile("other"))
        for name, request in {
            "OpenSession": student.OpenSessionRequest(**asked, **version, profile=profile),
            "ProveLocality": student.ProveLocalityRequest(**own, proofs=[proof]),
            "RenewSession": student.RenewSessionRequest(**own),
            "CloseSession": student.CloseSessionRequest(**own),
            "AcquirePayload": student.AcquirePayloadRequest(**own, **asked, payload_id=PAYLOAD),
            "AcquireStep": student.AcquireStepRequest(**own, **asked, step=1),
            "ReleasePayload": student.ReleasePayloadRequest(**own, lease_id=LEASE),
        }.items():
            yield f"/{_PACKAGE}TeacherLogitsService/{name}", request
        for name, more in {
            "OpenPublisher": registry.OpenPublisherRequest(**asked, **version, profile=teacher),
            "ReservePayload": registry.ReservePayloadRequest(
                session_id=PUBLISHER, **asked, payload=payload, row_positions=positions
            ),
            "WritePayload": registry.WritePayloadRequest(**publisher, data=b"x", crc32c=1),
            "SealPayload": registry.SealPayloadRequest(**publisher),
            "AbandonPayload": registry.AbandonPayloadRequest(**publisher),
        }.items():
            yield f"/{_PACKAGE}RegistryService/{name}", more
        yield f"/{_PACKAGE}ScoringService/Score", scoring.ScoreRequest(**own, **asked, **rows)
        yield (
            f"/{_PACKAGE}ScoringService/ScoredIds",
            scoring.ScoredIdsRequest(
                **own, request_id="ids", **rows, ids=b"\3\0\0\0\4\0\0\0", ids_per_position=1
            ),
        )

    def _golden(self) -> Iterator[tuple[str, Message]]:
        for path, method in self._methods.items():
            make: Any = GetMessageClass(method.input_type)
            yield path, make()
            for each in instances_of(method.input_type.name):
                message = make.FromString(each.data)
                if "session_id" in method.input_type.fields_by_name:
                    message.session_id = PUBLISHER if "Registry" in path else SESSION
                yield path, message


class Uploads(Rpcs):
    """The stream that brings a payload's bytes: chunks of any size, place and checksum.

        input   WITH requests, each behind its length

    WITH is `c` where each request that can be read is given the checksum of its data.
    """

    name = "upload"

    def seeds(self) -> Sequence[bytes]:
        data = rig.bytes_of(self._house.payload("rpc"))
        sizes = (64, 1000, len(data))
        whole = [
            [c.SerializeToString() for c in rig.chunks_of(PUBLISHER, RESERVED, data, size=size)]
            for size in sizes
        ]
        inputs = [joined(chunks) for chunks in (*whole, *(chunks[:2] for chunks in whole))]
        return [mode + each for mode in (b"c", b"-") for each in inputs]

    def run(self, data: bytes) -> str:
        sent = [self._house.with_ids(each) for each in split(data[1:])]
        if data[:1] == b"c":
            sent = list(map(_with_checksum, sent))
        path = f"/{_PACKAGE}RegistryService/WritePayload"
        try:
            self._call(path, self._methods[path], sent, "s", timeout=PATIENCE_SECONDS)
        except grpc.RpcError as failure:
            word = self._word_of(path, failure)
            if word == "SESSION_EXPIRED":
                self._house.forget()
            return word
        return "OK"


def _with_checksum(data: bytes) -> bytes:
    """Give a chunk the checksum of its data, so that it is not refused for that."""
    chunk = registry.WritePayloadRequest()
    try:
        chunk.ParseFromString(data)
    except DecodeError:
        return data
    chunk.crc32c = crc32c.crc32c(chunk.data)
    return chunk.SerializeToString()
