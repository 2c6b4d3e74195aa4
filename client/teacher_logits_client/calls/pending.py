"""Pending calls: those under way, as futures of what they are answered with."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

import grpc

from teacher_logits.v1 import scoring_service_pb2
from teacher_logits.wire.payloads import lease_from_wire
from teacher_logits_client.calls.failures import Waiting, cancelled, deadline_passed, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.terms import LeaseTerms
    from teacher_logits_client.calls.channels import Channels

Reply = TypeVar("Reply")

ScoreReply: TypeAlias = scoring_service_pb2.ScoreResponse | scoring_service_pb2.ScoredIdsResponse
if TYPE_CHECKING:
    Scored = (
        grpc._CallFuture[scoring_service_pb2.ScoreResponse]
        | grpc._CallFuture[scoring_service_pb2.ScoredIdsResponse]
    )

_ENDS_WITHIN_SECONDS = 2.0
"""How long after its deadline a call has ended by itself. Where an interrupt hit gRPC inside a
lock of its own, it never does."""


class PendingCall(Generic[Reply]):
    """A call under way on some channels."""

    def __init__(
        self, call: grpc._CallFuture[Reply], waiting: Waiting, *, channels: Channels
    ) -> None:
        self._call = call
        self._waiting = waiting
        self._channels = channels

    def cancel(self) -> None:
        """Cancel the call; one that is done stays done."""
        self._call.cancel()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once the call is done, on gRPC's thread; at once where it is."""
        self._call.add_done_callback(lambda _: callback())

    def _answer(self, seconds: float, *, waited: float) -> Reply:
        """Wait for the reply for ``seconds``; ``waited`` are those that the error names."""
        try:
            return self._call.result(seconds)
        except grpc.FutureTimeoutError:
            raise deadline_passed(replace(self._waiting, seconds=waited)) from None
        except grpc.FutureCancelledError:
            raise cancelled(self._waiting) from None
        except grpc.RpcError as error:
            is_closed = self._channels.is_closed
            raise error_of(error, self._waiting, is_closed=is_closed) from None


class PendingLease(PendingCall[ScoreReply]):
    """A scoring call under way: a future of the lease it is answered with."""

    def __init__(
        self, call: Scored, waiting: Waiting, *, channels: Channels, request_id: str
    ) -> None:
        either = cast("grpc._CallFuture[ScoreReply]", call)  # which is only read
        super().__init__(either, waiting, channels=channels)
        self.request_id = request_id
        self.is_taken = False
        """Whether ``result`` has handed the lease out."""
        self.is_given_up = False
        self._over_at = time.monotonic() + waiting.seconds + _ENDS_WITHIN_SECONDS

    def result(self, timeout: float | None) -> LeaseTerms:
        """Wait for the lease, for at most ``timeout`` seconds where there is one.

        Raises:
            DeadlinePassedError: it has not come by then; the call goes on till its own deadline.
            CancelledError: the call was cancelled, or its client closed.
            ServerUnreachableError: the server is gone, or stopped meanwhile.
            TeacherLogitsError: what the server refused it for.
        """
        left = max(0.0, self._over_at - time.monotonic())
        seconds = left if timeout is None else min(timeout, left)
        waited = self._waiting.seconds if timeout is None else timeout
        lease = lease_from_wire(self._answer(seconds, waited=waited).lease)
        self.is_taken = True
        return lease

    def wait(self, timeout: float | None) -> bool:
        """Wait until ``done``, for ``timeout`` seconds at most; return whether it is."""
        ended = threading.Event()
        self.when_done(ended.set)
        left = max(0.0, self._over_at - time.monotonic())
        ended.wait(left if timeout is None else min(timeout, left))
        return self.done()

    def done(self) -> bool:
        """Whether the lease or an error is there, or the call was cancelled."""
        return bool(self._call.done())

    def has_failed(self) -> bool:
        """Whether the call has ended without a lease, as far as this side knows."""
        return self._call.done() and self._call.code() is not grpc.StatusCode.OK
