"""The loss of an evaluation: sums over all its batches, divided once, by the count of all ranks.

A mean of its batches' means would weigh a token by the batch that it happened to be in. Promises
the scale of the training's loss: a mean over tokens.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from teacher_logits.errors import RequestInvalidError
from teacher_logits_client.normalisation import GroupReduction, StepNormaliser

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from teacher_logits_client.normalisation import OpenStep, StepReport


class Evaluation:
    """The evaluations of a trainer; ``ranks`` are all that evaluate.

    One may be inside of another, as where metrics of the user's own predict on other rows.
    """

    def __init__(self, *, ranks: int) -> None:
        self._reduction = GroupReduction() if ranks > 1 else None
        self._step: OpenStep | None = None
        self._begun = self._batches = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a batch that comes now is one of an evaluation's."""
        return self._step is not None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Be under way inside, with nothing noted yet."""
        self._begun += 1
        around = self._step, self._batches
        with StepNormaliser(reduction=self._reduction).begin(self._begun) as step:
            self._step, self._batches = step, 0
            try:
                yield
            finally:
                self._step, self._batches = around

    def note(self, loss_sum: torch.Tensor, count: torch.Tensor) -> None:
        """Take in a batch's sum and count, where an evaluation is under way."""
        if self._step is not None:
            self._step.microbatch(self._batches, loss_sum, count)
            self._batches += 1

    def finish(self) -> StepReport:
        """Return what all ranks have found; each of them calls it, behind its last batch.

        Raises:
            RequestInvalidError: none is under way.
        """
        if self._step is None:
            raise RequestInvalidError("no evaluation is under way, of which there could be a loss")
        return self._step.finish()
