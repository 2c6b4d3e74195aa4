"""A server's RPCs as somebody calls them who is no client of ours: plain stubs, or plain bytes.

Which RPCs there are comes from the schema, so that a new one is tried without being listed here.
"""

import itertools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2

from teacher_logits.errors import TeacherLogitsError
from teacher_logits.v1 import (
    bulk_service_pb2,
    bulk_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
    registry_service_pb2,
    scoring_service_pb2,
    scoring_service_pb2_grpc,
    teacher_logits_service_pb2,
    teacher_logits_service_pb2_grpc,
)
from teacher_logits.wire.errors import DETAILS_KEY, from_status

TIMEOUT_SECONDS = 20
REJECT = scoring_service_pb2.BAD_ROW_POLICY_REJECT
_request_numbers = itertools.count()
_SCHEMAS = (
    bulk_service_pb2,
    operator_service_pb2,
    registry_service_pb2,
    scoring_service_pb2,
    teacher_logits_service_pb2,
)


@dataclass(frozen=True)
class Method:
    """One RPC of the schema."""

    descriptor: MethodDescriptor

    @property
    def path(self) -> str:
        """What a call names it."""
        service = self.descriptor.containing_service.full_name
        return f"/{service}/{self.descriptor.name}"

    def request(self, **given: object) -> Message:
        """Make a request; what its message has no field for is left out."""
        kind = GetMessageClass(self.descriptor.input_type)
        fields = self.descriptor.input_type.fields_by_name
        return kind(**{name: value for name, value in given.items() if name in fields})

    def __str__(self) -> str:
        return self.descriptor.name


def methods_of(*schemas: object) -> list[Method]:
    """Return every RPC of some generated modules."""
    return [
        Method(method)
        for schema in schemas
        for service in schema.DESCRIPTOR.services_by_name.values()  # type: ignore[attr-defined]
        for method in service.methods
        if not method.client_streaming  # WritePayload has tests of its own
    ]


OUR_METHODS = methods_of(*_SCHEMAS)
# Calls on behalf of a session; an operator's reclaim only names one.
SESSION_METHODS = [
    method
    for method in OUR_METHODS
    if "session_id" in method.descriptor.input_type.fields_by_name
    and method.descriptor.name != "Reclaim"
]
EVERY_METHOD = OUR_METHODS + [
    method for method in methods_of(health_pb2) if not method.descriptor.client_streaming
]


def ids(*tokens: int) -> bytes:
    """Return token ids as they travel."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def a_request(session_id: str, /, **given: object) -> scoring_service_pb2.ScoreRequest:
    """A request of two rows that is fine, but for what is given."""
    usual: dict[str, object] = {
        "session_id": session_id,
        "request_id": f"bad-{next(_request_numbers)}",
        "input_ids": ids(1, 2, 3),
        "row_lengths": [2, 1],
        "bad_rows": REJECT,
    }
    return scoring_service_pb2.ScoreRequest(**{**usual, **given})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Refused:
    """How a call failed: the status that gRPC saw, and the error that its details are."""

    code: grpc.StatusCode
    error: TeacherLogitsError


class Raw:
    """The plain stubs of one server."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.student = teacher_logits_service_pb2_grpc.TeacherLogitsServiceStub(channel)
        self.scoring = scoring_service_pb2_grpc.ScoringServiceStub(channel)
        self.bulk = bulk_service_pb2_grpc.BulkServiceStub(channel)
        self.operator = operator_service_pb2_grpc.OperatorServiceStub(channel)

    def send(
        self, method: Method, request: bytes, *, timeout: float | None = TIMEOUT_SECONDS
    ) -> list[bytes]:
        """Call a method with bytes that need be no message of it; return what came."""
        if method.descriptor.server_streaming:
            return list(self._channel.unary_stream(method.path, bytes, bytes)(request, timeout))
        return [self._channel.unary_unary(method.path, bytes, bytes)(request, timeout)]

    def inspect(self) -> operator_service_pb2.InspectResponse:
        """Return what the server holds."""
        return self.operator.Inspect(operator_service_pb2.InspectRequest(), timeout=TIMEOUT_SECONDS)


@contextmanager
def connect_raw(address: str) -> Iterator[Raw]:
    """Connect without an option set."""
    with grpc.insecure_channel(address) as channel:
        yield Raw(channel)


def refused(call: Callable[[], object]) -> Refused:
    """Make a call that must fail with an error of ours."""
    try:
        answer = call()
    except grpc.RpcError as failure:
        return _refused(failure)
    raise AssertionError(f"the call was answered with {answer!r}")


def _refused(failure: grpc.RpcError) -> Refused:
    assert isinstance(failure, grpc.Call)
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            error = from_status(status_pb2.Status.FromString(value))
            assert error is not None, "details that are no error of ours"
            return Refused(failure.code(), error)
    raise AssertionError(f"{failure.code()} without details: {failure.details()}")
