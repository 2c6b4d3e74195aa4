"""The guard around every RPC: let in, parsed, with a deadline, answered with an error of the tree.

    a call that is not the caller's to make   UnknownCallerError, NotAllowedError, before it is read
    too large, no message of it, no deadline  RequestInvalidError (``call_checks``)
    a server whose teacher is not loaded      NotAvailable, with when to try again
    an error of the tree                      its status, with google.rpc details
    anything else                             INTERNAL; its text stays in the log

Handlers are coroutines that take parsed messages, or an iterator of them; those that stream
write to their context.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import grpc

from teacher_logits import tracing
from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    NotAllowedError,
    NotAvailable,
    TeacherLogitsError,
)
from teacher_logits.wire.errors import DETAILS_KEY, code_of, to_status
from teacher_logits_server.access import Access
from teacher_logits_server.call_checks import (
    REFLECTION,
    REFLECTION_SECONDS,
    check_deadline,
    read_message,
    read_messages,
)
from teacher_logits_server.metrics.instruments import HEALTH, RpcTimes
from teacher_logits_server.metrics.refusals import Refusals, Surface

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import TypeAlias

    from teacher_logits_server.access import Entry

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

if TYPE_CHECKING:  # gRPC's classes are generic to type checkers alone
    Handler: TypeAlias = grpc.RpcMethodHandler[Q, R]
    Context: TypeAlias = grpc.aio.ServicerContext[Q, R]
    Behaviour: TypeAlias = Callable[[Q, Context[Q, R]], Awaitable[R]]
    StreamBehaviour: TypeAlias = Callable[[AsyncIterator[Q], Context[Q, R]], Awaitable[R]]

GONE_SECONDS = 1.0
LOADING_RETRY = timedelta(seconds=2)

_log = logging.getLogger(__name__)


class Guard(grpc.aio.ServerInterceptor):
    """Guards every RPC of a server.

    Args:
        is_ready: whether the teacher is loaded; until then health alone is answered.
        access: who may make which call; anybody every one where not given.
        refusals: counts every call that ends in an error, here alone.
        rpcs: what calls take, and what they end in.
        reflection_seconds: how long a call of reflection may stay open.
    """

    def __init__(
        self,
        *,
        is_ready: Callable[[], bool],
        access: Access | None = None,
        refusals: Refusals | None = None,
        rpcs: RpcTimes | None = None,
        reflection_seconds: float = REFLECTION_SECONDS,
    ) -> None:
        self._is_ready = is_ready
        self._access = access or Access()
        self._refusals = refusals or Refusals()
        self._rpcs = rpcs or RpcTimes()
        self._reflection_seconds = reflection_seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler[Q, R] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler[Q, R] | None:
        """Return the RPC's handler with the guard around it; None where there is no such RPC."""
        method = handler_call_details.method
        if not method.startswith(HEALTH) and not self._is_ready():
            return grpc.unary_unary_rpc_method_handler(self._answer_loading)
        handler = await continuation(handler_call_details)
        if handler is None:
            self._refusals.unknown_method()
            return None
        try:
            entry = self._access.enter(method, handler_call_details.invocation_metadata or ())
        except NotAllowedError as error:
            return self._refusing(error)
        check = partial(self._enter, entry, method)
        if method.startswith(REFLECTION):
            return self._guarded_reflection(handler, method)
        if handler.request_streaming:
            return self._guarded_stream(handler, method, check)
        return self._guarded(handler, method, check)

    def _enter(self, entry: Entry, method: str, message: object) -> None:
        """Have a call's task act for its caller, if what it names is the caller's."""
        self._access.check(entry, method, message)
        self._access.act(entry)

    def _refusing(self, error: NotAllowedError) -> Handler[Q, R]:
        """Return a handler that reads nothing: what was sent may be large."""

        async def call(raws: AsyncIterator[bytes], context: Context[Q, R]) -> None:
            await self._refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(call, None, None)

    def _guarded(
        self, handler: Handler[Q, R], method: str, check: Callable[[object], None]
    ) -> Handler[Q, R]:
        """Take the parsing into the guard: gRPC itself would answer bad bytes with UNKNOWN."""
        behaviour: Behaviour[Q, R] = handler.unary_unary or handler.unary_stream  # type: ignore[assignment]
        parse = handler.request_deserializer

        async def call(raw: bytes, context: Context[Q, R]) -> R:
            def behave() -> Awaitable[R]:
                request = read_message(raw, parse, method)
                check(request)
                return behaviour(request, context)

            return await self._answered(behave, context, method)

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(call, None, handler.response_serializer)

    def _guarded_stream(
        self, handler: Handler[Q, R], method: str, check: Callable[[object], None]
    ) -> Handler[Q, R]:
        """Do the same for an RPC whose requests are a stream, answered once."""
        behaviour: StreamBehaviour[Q, R] = handler.stream_unary  # type: ignore[assignment]
        parse = handler.request_deserializer

        async def call(raws: AsyncIterator[bytes], context: Context[Q, R]) -> R:
            requests = read_messages(raws, parse, method, check)
            return await self._answered(lambda: behaviour(requests, context), context, method)

        return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)

    def _guarded_reflection(self, handler: Handler[Q, R], method: str) -> Handler[Q, R]:
        """Make a coroutine of gRPC's own generator, which has both ways a stream, and end it."""
        behaviour = cast("Callable[..., AsyncIterator[R]]", handler.stream_stream)
        parse, seconds = handler.request_deserializer, self._reflection_seconds

        async def tell(raws: AsyncIterator[bytes], context: Context[Q, R]) -> None:
            async for answer in behaviour(read_messages(raws, parse, method), context):
                await context.write(answer)

        async def call(raws: AsyncIterator[bytes], context: Context[Q, R]) -> None:
            async def behave() -> None:
                try:
                    await asyncio.wait_for(tell(raws, context), seconds)
                except asyncio.TimeoutError:
                    raise DeadlinePassedError(
                        f"{method} was open for {span_text(seconds)}, the longest: call it again",
                        facts={"method": method, "waited_seconds": seconds},
                    ) from None

            await self._answered(behave, context, method)

        return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)

    async def _answered(
        self, behave: Callable[[], Awaitable[T]], context: Context[Q, R], method: str
    ) -> T:
        """Return what a handler returns, or end the call with the status of what it raises."""
        began, code = self._rpcs.begin(method), grpc.StatusCode.CANCELLED
        try:
            with traced(method, context):
                check_deadline(context.time_remaining(), method)
                answer = await behave()
            code = grpc.StatusCode.OK
            return answer
        except grpc.aio.InternalError:
            # A write fails where its reader is gone, and then gRPC cancels us in a moment.
            await asyncio.sleep(GONE_SECONDS)
            raise
        except grpc.aio.BaseError:  # ended by the handler itself
            raise
        except Exception as error:
            if not isinstance(error, TeacherLogitsError):
                facts = {"method": method}
                _log.exception("call failed", extra={"facts": facts, "throttle": method})
            code = status_of(error)
            await self._refuse(context, error)
            raise  # never reached: aborting raises
        finally:
            self._rpcs.end(method, code.name, began)

    async def _answer_loading(self, raw: bytes, context: Context[bytes, bytes]) -> None:
        error = NotAvailable(
            f"the server is loading its teacher: try again in {LOADING_RETRY.total_seconds():g} "
            "s, or wait for its health to be SERVING",
            retry_after=LOADING_RETRY,
        )
        await self._refuse(context, error)

    async def _refuse(self, context: Context[Q, R], error: Exception) -> None:
        self._refusals.refused(Surface.RPC, error)
        await abort(context, error)


async def abort(context: Context[Q, R], error: Exception) -> None:
    """End an RPC with the status of an error; raises gRPC's ``AbortError``."""
    status, code = to_status(error), status_of(error)
    details = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code, status.message, details)


def traced(method: str, context: Context[Q, R]) -> AbstractContextManager[object]:
    """Return the span of a call, under its caller's; health is left out."""
    if not tracing.is_on() or method.startswith(HEALTH):
        return nullcontext()
    service, _, name = method.removeprefix("/").rpartition("/")
    facts = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
    return tracing.serving(method.removeprefix("/"), context.invocation_metadata() or (), facts)


def status_of(error: Exception) -> grpc.StatusCode:
    """Return the code that an error travels under."""
    return code_of(error) if isinstance(error, TeacherLogitsError) else grpc.StatusCode.INTERNAL
