"""What only a step can be refused for, as two more leaves of the tree in ``teacher_logits.errors``.

Neither crosses a wire: a step is this process's own.
"""

from __future__ import annotations

from teacher_logits.errors import ContractViolation, StaleReference


class StaleAttemptError(StaleReference):
    """The attempt at a step is over: it was finished or aborted. Begin the step again."""

    reason = "STALE_ATTEMPT"


class RepeatedMicroBatchError(ContractViolation):
    """A micro batch came a second time in one attempt at a step; each counts once."""

    reason = "REPEATED_MICRO_BATCH"
