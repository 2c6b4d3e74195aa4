"""gRPC's errors as errors of the tree, with what was waited for and how long.

What the server said in ``google.rpc`` details comes out as it was raised there. The rest is
gRPC's own, or of a server that is none of ours:

    UNAVAILABLE                     ServerUnreachableError
    DEADLINE_EXCEEDED               DeadlinePassedError
    UNIMPLEMENTED                   RequestInvalidError, naming the versions
    RESOURCE_EXHAUSTED (a size)     PayloadInvalidError
    CANCELLED                       ServerUnreachableError, of a server that stopped; but
                                    concurrent.futures.CancelledError where this client was closed
    anything else                   TeacherLogitsError, naming the code

gRPC's code is among the facts; its own error is not shown beside ours. On a stream of bytes,
what only says that the connection broke, or the server stopped, is a ``StreamBrokenError``, and one
that ended because its client was closed is a ``SessionExpiredError``.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.rpc import status_pb2

from teacher_logits import __version__
from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    PayloadInvalidError,
    RequestInvalidError,
    ServerUnreachableError,
    SessionExpiredError,
    StreamBrokenError,
    TeacherLogitsError,
)
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.wire.errors import DETAILS_KEY, from_status

if TYPE_CHECKING:
    from teacher_logits.addresses import Address
    from teacher_logits.errors import Fact

Code = grpc.StatusCode

_BROKEN = frozenset(
    {
        Code.UNAVAILABLE,
        Code.INTERNAL,
        Code.UNKNOWN,
        Code.ABORTED,
        Code.RESOURCE_EXHAUSTED,
        Code.CANCELLED,
    }
)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a call waits for: a phrase, the server, and the seconds it was given."""

    what: str
    address: Address
    seconds: float


def error_of(error: grpc.RpcError, waiting: Waiting, *, is_closed: bool = False) -> Exception:
    """Return the error that a failed call is raised as.

    ``is_closed``: this client has let go of its channels, which ends what is under way there.
    """
    sent = _sent_by_server(error)
    if sent is not None:
        return sent
    code, said = _code(error), _details(error)
    what, where = waiting.what, f"the server at {waiting.address}"
    facts: dict[str, Fact] = {
        "address": str(waiting.address),
        "deadline_seconds": waiting.seconds,
        "code": code.name,
    }
    if code is Code.UNAVAILABLE:
        return ServerUnreachableError(
            f"nobody answers at {waiting.address} for {what}: is the server running, and is this "
            "its address?",
            facts={**facts, "said": said},
        )
    if code is Code.DEADLINE_EXCEEDED:
        return deadline_passed(waiting)
    if code is Code.CANCELLED:
        return cancelled(waiting) if is_closed else _server_went(waiting)
    if code is Code.UNIMPLEMENTED:
        return RequestInvalidError(
            f"{where} does not know {what}: it is no teacher-logits server, or one of another "
            f"release; this is release {__version__}, protocol version {PROTOCOL_VERSION}",
            facts={**facts, "protocol_version": PROTOCOL_VERSION},
        )
    if code is Code.RESOURCE_EXHAUSTED and "larger than max" in said:
        return PayloadInvalidError(
            f"{what} is too large for one message ({said}): send fewer rows a request",
            facts=facts,
        )
    return TeacherLogitsError(f"{where} failed at {what} with {code.name}: {said}", facts=facts)


def stream_error_of(
    error: Exception, waiting: Waiting, *, session_id: str, is_closed: bool
) -> Exception:
    """Return the error that a stream of bytes which did not come to its end is raised as.

    Args:
        is_closed: whether this client has let go of its channels, which ends their streams and
            has gRPC refuse new ones with a ``ValueError``.
    """
    if is_closed:
        return SessionExpiredError(
            f"session {session_id} was closed by this client, and {waiting.what} with it",
            facts={"session_id": session_id},
        )
    if not isinstance(error, grpc.RpcError):
        return error
    sent = _sent_by_server(error)
    if sent is None and _code(error) in _BROKEN:
        return StreamBrokenError(
            f"{waiting.what} broke off: {_code(error).name}: {_details(error)}",
            facts={"address": str(waiting.address), "code": _code(error).name},
        )
    return sent or error_of(error, waiting)


def cancelled(waiting: Waiting) -> CancelledError:
    """Return the error for a call that was cancelled on this side."""
    return CancelledError(f"{waiting.what} was cancelled")


def deadline_passed(waiting: Waiting) -> DeadlinePassedError:
    """Return the error for a call whose time was up."""
    return DeadlinePassedError(
        f"waited {span_text(waiting.seconds)} for {waiting.what}, which the server at "
        f"{waiting.address} did not finish: it is busy, stopped or gone; a longer timeout helps "
        "in the first case",
        facts={"address": str(waiting.address), "deadline_seconds": waiting.seconds},
    )


def _server_went(waiting: Waiting) -> ServerUnreachableError:
    """Return the error for a call that the server cut off by stopping."""
    return ServerUnreachableError(
        f"the server at {waiting.address} stopped before it had answered for {waiting.what}: open "
        "a session with another, or with this one once it is back",
        facts={"address": str(waiting.address), "deadline_seconds": waiting.seconds},
    )


def _sent_by_server(error: grpc.RpcError) -> TeacherLogitsError | None:
    if not isinstance(error, grpc.Call):
        return None
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            status = status_pb2.Status()
            status.ParseFromString(value if isinstance(value, bytes) else value.encode())
            return from_status(status)
    return None


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    return error.code() if isinstance(error, grpc.Call) else Code.UNKNOWN


def _details(error: grpc.RpcError) -> str:
    said = error.details() if isinstance(error, grpc.Call) else str(error)
    return (said or "no reason given")[:300]
