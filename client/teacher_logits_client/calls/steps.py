"""Pending steps: calls that wait on the server for a registered step, as futures of its grant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.terms import StepFailure
from teacher_logits.v1 import teacher_logits_service_pb2
from teacher_logits.wire.steps import grant_from_wire
from teacher_logits_client.calls.pending import PendingCall

if TYPE_CHECKING:
    from teacher_logits.terms import StepGrant


class PendingStep(PendingCall[teacher_logits_service_pb2.AcquireStepResponse]):
    """A call for a step under way: a future of what it is granted."""

    def result(self, timeout: float) -> StepGrant:
        """Wait for the grant, for at most ``timeout`` seconds.

        Raises:
            DeadlinePassedError: it has not come by then; the call goes on till its own deadline.
            CancelledError: the call was cancelled, or its client closed.
            ServerUnreachableError: the server is gone, or stopped meanwhile.
            TeacherLogitsError: why the step cannot be had.
        """
        grant = grant_from_wire(self._answer(timeout, waited=timeout).grant)
        if isinstance(grant, StepFailure):
            raise grant.error
        return grant
