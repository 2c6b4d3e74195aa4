"""Each divergence as terms over categories, and their slopes in the student's log-probabilities.

From log p and log q [R,C], teacher and student, -inf where one has nothing: the terms of the
sum [R,C], and h = d(sum)/d(log q) [R,C] with every log q taken as free (docs/math.md, "One
gradient for every divergence"). The softmax comes after, once for all of them, in ``coarse``.

Promises: no clamp and no epsilon. A category without mass on the side that weighs it adds 0.
Where a term is infinite, its slope is finite: a student that rules out what the teacher gives
mass to has slope -p as elsewhere, and a teacher that rules out what the student gives mass to
pulls as if its log-probability were ``ABSENT_LOGPROB``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from teacher_logits_client.targets import ABSENT_LOGPROB

TermsAndSlopes = tuple[torch.Tensor, torch.Tensor]
Divergence = Callable[[torch.Tensor, torch.Tensor], TermsAndSlopes]


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> TermsAndSlopes:
    """Sum of p log(p/q)."""
    p = log_p.exp()
    return torch.where(p == 0, 0.0, p * (log_p - log_q)), -p


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> TermsAndSlopes:
    """Sum of q log(q/p)."""
    q = log_q.exp()
    terms = torch.where(q == 0, 0.0, q * (log_q - log_p))
    ratio = log_q - log_p.clamp_min(ABSENT_LOGPROB)
    return terms, torch.where(q == 0, 0.0, q * (ratio + 1))


def jensen_shannon(beta: float) -> Divergence:
    """β KL(p ‖ m) + (1-β) KL(q ‖ m) with m = βp + (1-β)q, β between 0 and 1."""

    def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> TermsAndSlopes:
        p, q = log_p.exp(), log_q.exp()
        log_m = _log_mixture(beta, log_p, log_q)
        of_p = torch.where(p == 0, 0.0, beta * p * (log_p - log_m))
        of_q = torch.where(q == 0, 0.0, (1 - beta) * q * (log_q - log_m))
        return of_p + of_q, of_q

    return _called(divergence, f"jensen_shannon(beta={float(beta)})")


def skew_kl(alpha: float) -> Divergence:
    """KL(p ‖ m) with m = alpha p + (1 - alpha) q, alpha above 0 and below 1."""

    def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> TermsAndSlopes:
        p, q = log_p.exp(), log_q.exp()
        log_m = _log_mixture(alpha, log_p, log_q)
        terms = torch.where(p == 0, 0.0, p * (log_p - log_m))
        share = (log_q - log_m).exp()
        return terms, torch.where((p == 0) | (q == 0), 0.0, -(1 - alpha) * p * share)

    return _called(divergence, f"skew_kl(alpha={float(alpha)})")


def skew_reverse_kl(alpha: float) -> Divergence:
    """KL(q ‖ m) with m = (1 - alpha) p + alpha q, alpha above 0 and below 1."""

    def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> TermsAndSlopes:
        q = log_q.exp()
        ratio = log_q - _log_mixture(alpha, log_q, log_p)
        terms = torch.where(q == 0, 0.0, q * ratio)
        return terms, torch.where(q == 0, 0.0, q * (ratio + 1 - alpha * ratio.exp()))

    return _called(divergence, f"skew_reverse_kl(alpha={float(alpha)})")


def total_variation(log_p: torch.Tensor, log_q: torch.Tensor) -> TermsAndSlopes:
    """Half the sum of |p - q|; of slope 0 where they are equal."""
    q = log_q.exp()
    difference = q - log_p.exp()
    return difference.abs() / 2, q * difference.sign() / 2


def soft_cross_entropy(log_p: torch.Tensor, log_q: torch.Tensor) -> TermsAndSlopes:
    """Sum of -p log q."""
    p = log_p.exp()
    return torch.where(p == 0, 0.0, -p * log_q), -p


def mean_squared_error(log_p: torch.Tensor, log_q: torch.Tensor) -> TermsAndSlopes:
    """The mean of (log q - log p)² over the categories that the teacher names, not the last."""
    named = log_p > -torch.inf
    named[:, -1] = False
    share = named.to(log_q.dtype) / named.sum(1, keepdim=True).clamp_min(1)
    error = torch.where(named, log_q - log_p, 0.0)
    return error.square() * share, 2 * share * error.masked_fill(error == -torch.inf, 0.0)


def name_of(divergence: Divergence) -> str:
    """Return what a divergence is called, and its share in brackets where it has one."""
    return str(getattr(divergence, "__qualname__", "this loss"))


def _called(divergence: Divergence, name: str) -> Divergence:
    divergence.__qualname__ = name
    return divergence


def _log_mixture(weight: float, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(log_p + math.log(weight), log_q + math.log1p(-weight))
