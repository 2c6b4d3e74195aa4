"""Pending steps: calls that wait on the server for a registered step, as futures of its grant."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from teacher_logits.terms import StepFailure
from teacher_logits.wire_steps import grant_from_wire
from teacher_logits_client.calls.failures import Waiting, deadline_passed, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.terms import StepGrant
    from teacher_logits.v1 import teacher_logits_service_pb2


class PendingStep:
    """A call for a step under way: a future of what it is granted."""

    def __init__(
        self,
        call: grpc._CallFuture[teacher_logits_service_pb2.AcquireStepResponse],
        waiting: Waiting,
    ) -> None:
        self._call = call
        self._waiting = waiting

    def result(self, timeout: float) -> StepGrant:
        """Wait for the grant, for at most ``timeout`` seconds.

        Raises:
            DeadlinePassedError: it has not come by then; the call goes on till its own deadline.
            CancelledError: the call was cancelled.
            TeacherLogitsError: why the step cannot be had.
        """
        try:
            grant = grant_from_wire(self._call.result(timeout).grant)
        except grpc.FutureTimeoutError:
            raise deadline_passed(replace(self._waiting, seconds=timeout)) from None
        except grpc.FutureCancelledError:
            raise CancelledError(f"{self._waiting.what} was cancelled") from None
        except grpc.RpcError as error:
            raise error_of(error, self._waiting) from None
        if isinstance(grant, StepFailure):
            raise grant.error
        return grant

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once there is a result, on a thread of gRPC's; at once where there is one."""
        self._call.add_done_callback(lambda _: callback())

    def cancel(self) -> None:
        """Cancel the call; one that is done stays done."""
        self._call.cancel()
