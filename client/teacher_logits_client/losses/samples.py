"""Samples: which losses may be fed sampled targets, and the value of a KL against them.

A sample's weights are right on average, and so is whatever is linear in them: the cross entropy,
its gradient, and the forward KL, which is that minus the teacher's entropy. A logarithm of a
weight, a mixture with the student or a square is not, and would train towards something else,
whatever the size of the sample (docs/math.md, "Sampling"). So would a student renormalised on the
few ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.losses import slopes
from teacher_logits_client.losses.tails import Tail

if TYPE_CHECKING:
    from teacher_logits_client.targets import Targets

LINEAR_LOSSES = ("forward_kl", "soft_cross_entropy")
"""The losses that are linear in the teacher's probabilities."""

_NAMES = {"jensen_shannon": "generalised_jsd", "mean_squared_error": "logprob_mse"}
"""Losses that have another name than their divergence."""


def linear_form(
    targets: Targets, divergence: slopes.Divergence, tail: Tail
) -> tuple[slopes.Divergence, torch.Tensor | None]:
    """Return what to compute in place of a divergence, and what to take off it [P], if anything.

    Of targets that are no sample, the divergence itself. The forward KL of a sample is its cross
    entropy less the exact entropy of the teacher: the sample's own is biased.

    Raises:
        PayloadInvalidError: the targets are a sample, and the loss is not linear in them; it
            names those that are.
    """
    if not targets.sampled:
        return divergence, None
    if divergence not in (slopes.forward_kl, slopes.soft_cross_entropy):
        raise _refused(f"{_name(divergence)} is not", divergence, tail)
    if tail is Tail.RENORMALISED:
        raise _refused("a student renormalised on the sampled ids is not", divergence, tail)
    if divergence is slopes.forward_kl and targets.entropy is not None:
        return slopes.soft_cross_entropy, targets.entropy.reshape(-1)
    return divergence, None


def less_entropy(
    loss: torch.Tensor, entropy: torch.Tensor | None, weights: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    """Return a summed loss less T² times the weighted entropies [P], if there are any to take off.

    A position left out has no say, whatever its entropy holds.
    """
    if entropy is None:
        return loss
    weighed = torch.where(weights == 0, 0.0, entropy.to(loss) * weights.to(loss))
    return loss - weighed.sum() * temperature**2


def _refused(why: str, divergence: slopes.Divergence, tail: Tail) -> PayloadInvalidError:
    return PayloadInvalidError(
        "the targets are a sample, unbiased only for what is linear in the teacher's "
        f"probabilities, and {why}: take {' or '.join(LINEAR_LOSSES)}, with any tail but "
        "Tail.RENORMALISED, or open the session with selection=TopK()",
        facts={
            "selection": "sampled",
            "loss": _name(divergence),
            "losses": ", ".join(LINEAR_LOSSES),
            "tail": tail.value,
        },
    )


def _name(divergence: slopes.Divergence) -> str:
    """Return the name of the loss, without its share."""
    name = slopes.name_of(divergence).partition("(")[0]
    return _NAMES.get(name, name)
