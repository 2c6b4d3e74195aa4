"""Divergences from a mixture of teacher and student: finite whatever either of them rules out.

Between forward and reverse KL lie three families, of a share each: the generalised
Jensen-Shannon divergence, and KL to a mixture from either side. At the ends of their shares they
are the plain ones. Everything else as in ``divergences``, whose ``forward_kl`` says what all of
them take, return and refuse.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError
from teacher_logits_client.losses import slopes
from teacher_logits_client.losses.divergences import forward_kl, reverse_kl
from teacher_logits_client.losses.positions import sum_over_positions
from teacher_logits_client.losses.sharding import refused_together
from teacher_logits_client.losses.tails import Tail

if TYPE_CHECKING:
    import torch

    from teacher_logits_client.losses.head_logits import HeadLogits
    from teacher_logits_client.losses.sharding import VocabShard
    from teacher_logits_client.targets import Targets


def generalised_jsd(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float | None = None,
    tail: Tail = Tail.BUCKET,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of β KL(p ‖ m) + (1-β) KL(q ‖ m), m = βp + (1-β)q, p the teacher.

    ``beta`` from 0 to 1, with the meaning of TRL, Liger and GKD, and with their switch: at 0 it
    is ``forward_kl`` and at 1 ``reverse_kl``. These are no limits of the formula, which near 0
    is β times the forward KL and near 1 is 1-β times the reverse: a gradient at β = 0.01 is a
    hundredth of that at 0. It is at most log 2. Everything else as ``forward_kl``.

    Raises:
        PayloadInvalidError, LeaseLostError: see ``forward_kl``.
        ConfigError: ``beta`` is outside 0 to 1, or see there.
    """
    with refused_together(shard, student_logits):
        _check_share("beta", beta, with_one=True)
    if beta == 0:
        return forward_kl(
            student_logits, targets, mask, temperature=temperature, tail=tail, shard=shard
        )
    if beta == 1:
        return reverse_kl(
            student_logits, targets, mask, temperature=temperature, tail=tail, shard=shard
        )
    divergence = slopes.jensen_shannon(beta)
    return sum_over_positions(
        student_logits,
        targets,
        mask,
        temperature=temperature,
        tail=tail,
        divergence=divergence,
        shard=shard,
    )


def skew_kl(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    alpha: float = 0.1,
    temperature: float | None = None,
    tail: Tail = Tail.BUCKET,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of KL(p ‖ m), m = alpha p + (1 - alpha) q, p the teacher.

    ``alpha`` from 0, where it is ``forward_kl``, to below 1. Above 0 it is at most -log alpha,
    and finite whatever the student rules out. Everything else as ``forward_kl``.

    Raises:
        PayloadInvalidError, LeaseLostError: see ``forward_kl``.
        ConfigError: ``alpha`` is outside, or see there.
    """
    with refused_together(shard, student_logits):
        _check_share("alpha", alpha, with_one=False)
    if alpha == 0:
        return forward_kl(
            student_logits, targets, mask, temperature=temperature, tail=tail, shard=shard
        )
    return sum_over_positions(
        student_logits,
        targets,
        mask,
        temperature=temperature,
        tail=tail,
        divergence=slopes.skew_kl(alpha),
        shard=shard,
    )


def skew_reverse_kl(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    alpha: float = 0.1,
    temperature: float | None = None,
    tail: Tail = Tail.BUCKET,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of KL(q ‖ m), m = (1 - alpha) p + alpha q, p the teacher.

    ``alpha`` from 0, where it is ``reverse_kl``, to below 1. Above 0 it is at most -log alpha,
    and finite whatever the teacher rules out. Everything else as ``forward_kl``.

    Raises:
        PayloadInvalidError, LeaseLostError: see ``forward_kl``.
        ConfigError: ``alpha`` is outside, or see there.
    """
    with refused_together(shard, student_logits):
        _check_share("alpha", alpha, with_one=False)
    if alpha == 0:
        return reverse_kl(
            student_logits, targets, mask, temperature=temperature, tail=tail, shard=shard
        )
    return sum_over_positions(
        student_logits,
        targets,
        mask,
        temperature=temperature,
        tail=tail,
        divergence=slopes.skew_reverse_kl(alpha),
        shard=shard,
    )


def _check_share(name: str, share: float, *, with_one: bool) -> None:
    if not isinstance(share, Real) or not (0 <= share < 1 or (with_one and share == 1)):
        limit = "0 to 1" if with_one else "0 to below 1, where it is 0 whatever the student says"
        raise ConfigError(
            f"{name} is {share!r}; give a number from {limit}", facts={name: repr(share)}
        )
