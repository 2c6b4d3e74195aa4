"""Calls that may wait for long, and say meanwhile what for.

    session = client.open_session(StudentProfile(teacher_id="math"))
    WARNING teacher_logits_client: the opening of a session: there is no teacher 'math' here; ...

A student may come before its teacher, so that a name which is mistyped waits like one that is
early. The server sends a header as soon as it waits (``wire.waits``); it is logged once that has
taken a moment, and the call goes on. Servers that send none are waited for in silence.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import grpc

from teacher_logits.wire.waits import waits_from_metadata

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from teacher_logits_client.calls.shown import Metadata

Request = TypeVar("Request", bound="Message")
Reply = TypeVar("Reply", bound="Message")
Asked = TypeVar("Asked", bound="Message", contravariant=True)
Answered = TypeVar("Answered", bound="Message", covariant=True)

_log = logging.getLogger("teacher_logits_client")

MOMENT_SECONDS = 1.0


class Unary(Protocol[Asked, Answered]):
    """A method of a service, as it is called."""

    def __call__(self, request: Asked, /, *, timeout: float, metadata: Metadata) -> Answered:
        """Return the reply; raises ``grpc.RpcError``."""


class Telling(Generic[Request, Reply]):
    """A ``Unary`` that tells what it waits for; one that is left is cancelled.

    It is called as a stream of one answer: of other calls gRPC hands out the headers no sooner
    than the answer.

    Args:
        what: what its messages call it.
    """

    def __init__(self, channel: grpc.Channel, path: str, *, reply: type[Reply], what: str) -> None:
        self._what = what
        self._method: grpc.UnaryStreamMultiCallable[Request, Reply] = channel.unary_stream(
            path,
            request_serializer=lambda request: cast("Message", request).SerializeToString(),
            response_deserializer=reply.FromString,
        )

    def __call__(self, request: Request, /, *, timeout: float, metadata: Metadata) -> Reply:
        """Return the reply.

        Raises:
            grpc.RpcError: as any other call.
        """
        call = self._method(request, timeout=timeout, metadata=metadata)
        try:
            waits_for = waits_from_metadata(call.initial_metadata())
            if waits_for:
                self._tell_soon(call, waits_for)
            reply = next(call)
            for _ in call:  # to its status
                pass
        except grpc.RpcError:
            raise
        except BaseException:
            call.cancel()
            raise
        return reply

    def _tell_soon(self, call: grpc.RpcContext, waits_for: str) -> None:
        ended = threading.Event()
        if call.add_callback(ended.set) and not ended.wait(MOMENT_SECONDS):
            _log.warning("%s: %s", self._what, waits_for)
