"""Counted calls: how many calls a server has under way, of all kinds and of all clients.

    watches of health     --max-watchers, counted apart: they end when their clients do
    looks at health       none: a probe is answered, however busy the server is
    any other             --max-calls

A call counts from its headers on, whether its message ever comes or not; one too many is refused
before it is read (``LimitReachedError``). One connection has a quarter of ``--max-calls`` at a
time: gRPC's client holds back what it asks beyond that. A look at health whose message does not
come in ``MESSAGE_SECONDS`` is ended, since nobody counts it (``DeadlinePassedError``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, LimitReachedError
from teacher_logits_server.caps import Cap
from teacher_logits_server.interceptors import abort
from teacher_logits_server.metrics.instruments import HEALTH
from teacher_logits_server.metrics.refusals import Refusals, Surface
from teacher_logits_server.services.patience import Patience

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import TypeVar

    Q = TypeVar("Q")
    R = TypeVar("R")

WATCH = f"{HEALTH}Watch"
CONNECTION_SHARE = 4
"""So many connections take what all may have together."""
MESSAGE_SECONDS = 10.0


class _Count:
    """Calls under way of one kind."""

    def __init__(self, cap: Cap, refusals: Refusals) -> None:
        self._cap = cap
        self._refusals = refusals
        self.count = 0

    def enter(self) -> None:
        """Count a call.

        Raises:
            LimitReachedError: there are as many as may be.
        """
        try:
            self._cap.check(self.count)
        except LimitReachedError as error:
            self._refusals.refused(Surface.RPC, error)
            raise
        self.count += 1

    def leave(self) -> None:
        """Count it no more."""
        self.count -= 1


class CountedCalls(grpc.aio.ServerInterceptor):
    """Counts every call, around the guard, whose handlers are coroutines.

    Args:
        refusals: counts what is refused here.
        message_seconds: how long the message of a look at health may take.
    """

    def __init__(
        self,
        *,
        max_calls: int,
        max_watchers: int,
        refusals: Refusals | None = None,
        message_seconds: float = MESSAGE_SECONDS,
    ) -> None:
        refusals = refusals or Refusals()
        self._message_seconds = message_seconds
        self._calls = _Count(
            Cap(
                name="calls",
                most=max_calls,
                flag="--max-calls",
                what="calls under way",
                way_out="wait for some to end",
            ),
            refusals,
        )
        self._watchers = _Count(
            Cap(
                name="watchers",
                most=max_watchers,
                flag="--max-watchers",
                what="calls that watch the server's health",
                way_out="look with Check now and then",
            ),
            refusals,
        )

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, R] | None:
        """Return the RPC's handler, counted."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if method.startswith(HEALTH) and method != WATCH:
            return _looking(handler, method, self._message_seconds)
        calls = self._watchers if method == WATCH else self._calls
        try:
            place = _Place(calls)
        except LimitReachedError as error:
            return _refusing(error)
        return _counted(handler, place)


class _Place:
    """A place among the calls under way, from now until the call's task or its handler ends.

    Raises:
        LimitReachedError: there are as many as may be.
    """

    def __init__(self, calls: _Count) -> None:
        calls.enter()
        self._calls: _Count | None = calls
        task = asyncio.current_task()
        assert task is not None  # gRPC has one for each call, its interceptors included
        task.add_done_callback(self.leave)

    def leave(self, task: object = None) -> None:
        """Give it back; once more is fine."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.leave()


def _counted(handler: grpc.RpcMethodHandler[Q, R], place: _Place) -> grpc.RpcMethodHandler[Q, R]:
    """Return a handler that gives a place back before it answers."""
    kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
    behaviour: Callable[[object, grpc.aio.ServicerContext[Q, R]], Awaitable[R]]
    behaviour = getattr(handler, kind)

    async def call(request: object, context: grpc.aio.ServicerContext[Q, R]) -> R:
        try:
            return await behaviour(request, context)
        finally:
            place.leave()

    make: Callable[..., grpc.RpcMethodHandler[Q, R]]
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(call, handler.request_deserializer, handler.response_serializer)


def _refusing(error: LimitReachedError) -> grpc.RpcMethodHandler[Q, R]:
    """Return a handler that waits for no message."""

    async def call(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Q, R]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(call, None, None)


def _looking(
    handler: grpc.RpcMethodHandler[Q, R], method: str, seconds: float
) -> grpc.RpcMethodHandler[Q, R]:
    """Return a handler that waits for its message no longer than this."""
    behaviour: Callable[[object, grpc.aio.ServicerContext[Q, R]], Awaitable[R]]
    behaviour = handler.unary_unary  # type: ignore[assignment]

    async def call(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Q, R]) -> R:
        patience = Patience(seconds)
        try:
            with patience:
                message = await anext(raws, b"")
        except asyncio.CancelledError:
            if not patience.is_over:
                raise
            await abort(context, _no_message(method, seconds))
        finally:
            patience.end()
        return await behaviour(message, context)

    make: Callable[..., grpc.RpcMethodHandler[Q, R]] = grpc.stream_unary_rpc_method_handler
    return make(call, handler.request_deserializer, handler.response_serializer)


def _no_message(method: str, seconds: float) -> DeadlinePassedError:
    return DeadlinePassedError(
        f"{method} was called, and no message came within {span_text(seconds)}: send it with the "
        "call",
        facts={"method": method, "waited_seconds": seconds},
    )


def _word(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
