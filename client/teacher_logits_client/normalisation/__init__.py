"""Normalising over a step: sums and counts of split micro batches, divided once by the whole.

The loss of a step is the sum of S over the sum of C, over every micro batch of every rank, and
does not depend on how its tokens were cut (docs/math.md, "A step in parts"). Plain torch: nothing
in here knows of a server or a transport, and any loss that returns a sum and a count will do.
"""

from teacher_logits_client.normalisation.gradients import RescaleOrder, gradient_norms
from teacher_logits_client.normalisation.normaliser import OpenStep, StepNormaliser
from teacher_logits_client.normalisation.reductions import GroupReduction, Reduction
from teacher_logits_client.normalisation.reports import LossReport, StepReport
from teacher_logits_client.normalisation.step_errors import (
    RepeatedMicroBatchError,
    StaleAttemptError,
)
from teacher_logits_client.normalisation.step_losses import StepLoss

__all__ = [
    "GroupReduction",
    "LossReport",
    "OpenStep",
    "Reduction",
    "RepeatedMicroBatchError",
    "RescaleOrder",
    "StaleAttemptError",
    "StepLoss",
    "StepNormaliser",
    "StepReport",
    "gradient_norms",
]
