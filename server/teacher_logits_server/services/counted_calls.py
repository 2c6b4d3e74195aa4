"""Counted calls: how many calls a server has under way, of all kinds and of all clients.

    watches of health     --max-watchers, counted apart: they end when their clients do
    looks at health       none: a probe is answered, however busy the server is
    any other             --max-calls

One call too many is refused before it is read (``LimitReachedError``). One connection has a quarter
of ``--max-calls`` at a time: gRPC's client holds back what it asks beyond that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from teacher_logits.errors import LimitReachedError
from teacher_logits_server.caps import Cap
from teacher_logits_server.interceptors import abort
from teacher_logits_server.metrics.instruments import HEALTH
from teacher_logits_server.metrics.refusals import Refusals, Surface

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeVar

    Q = TypeVar("Q")
    R = TypeVar("R")

WATCH = f"{HEALTH}Watch"
CONNECTION_SHARE = 4
"""So many connections take what all may have together."""


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
    """

    def __init__(
        self, *, max_calls: int, max_watchers: int, refusals: Refusals | None = None
    ) -> None:
        refusals = refusals or Refusals()
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
        if handler is None or (method.startswith(HEALTH) and method != WATCH):
            return handler
        return _counted(handler, self._watchers if method == WATCH else self._calls)


def _counted(handler: grpc.RpcMethodHandler[Q, R], calls: _Count) -> grpc.RpcMethodHandler[Q, R]:
    """Return a handler that is refused, or counts while it runs."""
    kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
    behaviour: Callable[[object, grpc.aio.ServicerContext[Q, R]], Awaitable[R]]
    behaviour = getattr(handler, kind)

    async def call(request: object, context: grpc.aio.ServicerContext[Q, R]) -> R:
        try:
            calls.enter()
        except LimitReachedError as error:
            await abort(context, error)
            raise  # never reached: aborting raises
        try:
            return await behaviour(request, context)
        finally:
            calls.leave()

    make: Callable[..., grpc.RpcMethodHandler[Q, R]]
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(call, handler.request_deserializer, handler.response_serializer)


def _word(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
