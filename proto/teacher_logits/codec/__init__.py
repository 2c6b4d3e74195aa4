"""Codec: log-probabilities after their way through a 16-bit element type, or to a temperature.

Promises: rows that sum to one again. An encoding moves every log-probability by at most
``entry_tolerance``; once the K entries and the tail are renormalised jointly, the error costs
at most half its square in KL, and no divergence can come out negative (docs/math.md, "What an
encoding may cost").

Refuses nothing: ``invariants`` looks at what came over the wire.
"""

from __future__ import annotations

import torch

# Half a unit in the last place, relative to the value: what rounding to the type can move it by.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# How far from 0 the log of a row's sum may lie, for each nat of its mean |log-probability|.
NORMALISATION = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Two fp32 computations of one log-probability agree to this, however large their logits.
_ARITHMETIC = 1e-4
# The exponential of this is 0.
_NO_MASS = -1e4


def renormalise(
    logprobs: torch.Tensor, log_tail: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``logprobs`` [P,K] and ``log_tail`` [P] in fp32, scaled so that they sum to one.

    Entries and a tail of -inf stay -inf. A position of which nothing is finite stays as it is.
    """
    values, tail = logprobs.float(), log_tail.float()
    total = log_total(values, tail)
    total = torch.where(total.isfinite(), total, 0.0)
    return values - total.unsqueeze(1), tail - total


def retemper(
    logprobs: torch.Tensor,
    logsumexp_1: torch.Tensor,
    logsumexp_tau: torch.Tensor,
    tau: float,
) -> torch.Tensor:
    """Return fp32 log-probabilities [P,K] at temperature ``tau`` from those at temperature 1.

    (logprob + logsumexp_1) / tau - logsumexp_tau, both normalisers fp32 [P]; docs/math.md,
    "Temperature". The tail at ``tau`` does not follow from any of this: the payload has a column
    of it.
    """
    logits = logprobs.float() + logsumexp_1.float().unsqueeze(1)
    return logits / tau - logsumexp_tau.float().unsqueeze(1)


def log_total(logprobs: torch.Tensor, log_tail: torch.Tensor) -> torch.Tensor:
    """Return the log of all the mass of each position [P]: 0 where it is normalised."""
    return torch.logaddexp(logprobs.float().logsumexp(1), log_tail.float())


def entry_tolerance(logprobs: torch.Tensor) -> torch.Tensor:
    """Return how far each entry may lie from its true log-probability, fp32, by its type."""
    return logprobs.float().abs() * ROUNDING[logprobs.dtype] + _ARITHMETIC


def normalisation_tolerance(logprobs: torch.Tensor, log_tail: torch.Tensor) -> torch.Tensor:
    """Return how far from 0 ``log_total`` may lie, fp32 [P], by the type of ``logprobs``.

    Proportional to the mean |log-probability|, since rounding is relative to the value.
    """
    spread = mean_size(logprobs) + mean_size(log_tail.unsqueeze(1))
    return spread.clamp_min(1.0) * NORMALISATION[logprobs.dtype]


def mean_size(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the sum of p |log p| over the entries of each position [P,K], fp32 [P].

    Neither what is absent nor what cannot be (above 0) counts.
    """
    values = logprobs.float().clamp(_NO_MASS, 0.0)
    return values.exp().mul_(values).sum(1).neg_()
