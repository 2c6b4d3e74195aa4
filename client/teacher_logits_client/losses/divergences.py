"""Divergences between teacher and student over K ids and what lies outside them.

With the tail as a bucket, which is what they do unless told otherwise, each is a true
divergence: at least 0, and 0 only where the student agrees on the K ids and on the mass outside
them; and a lower bound of its dense counterpart, which it equals where nothing is outside (math
note 3.2). ``tail`` names the other ways, for parity with others.

Promises: sums over positions and the count they are to be divided by, never means. Positions
that ``mask`` or ``targets.valid`` leaves out add exactly 0 to both and to the gradient, even
where their logits are NaN; so do places of [N,S,V] that hold no position. A row's last position
has no next token and never counts, whatever ``mask`` says: ``targets.valid`` leaves it out.

Sampled targets go into ``forward_kl`` and ``soft_cross_entropy`` alone, which are linear in the
teacher's probabilities; the others refuse them, but where their share makes them ``forward_kl``.

``forward_kl`` says what all of them take, return and refuse; the others say what differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.losses import slopes
from teacher_logits_client.losses.positions import sum_over_positions
from teacher_logits_client.losses.tails import Tail

if TYPE_CHECKING:
    import torch

    from teacher_logits_client.losses.head_logits import HeadLogits
    from teacher_logits_client.losses.sharding import VocabShard
    from teacher_logits_client.targets import Targets


def forward_kl(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    temperature: float | None = None,
    tail: Tail = Tail.BUCKET,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of KL(teacher ‖ student) over positions, and how many they are.

    ``student_logits`` [P,V] or [N,S,V], bf16, fp16, fp32 or fp64, raw and at the positions of
    ``targets``: logits at position s meet the teacher's distribution of token s+1, so neither
    is shifted. ``mask`` [P] or [N,S] says which positions count; numbers weigh them. A row's
    last position never counts, whatever it says. ``labels_mask`` makes one of labels.

    Rows of [N,S,V] may be of different lengths, padded on the right to S: position p of row i
    is at ``[i, p]``, or ``[i, first + p]`` where ``targets.row_firsts`` says that the row was
    scored from ``first`` on. What is left of a row is padding: neither its logits nor ``mask``
    there are read. Where every row has exactly S positions they are the S places, whatever
    the firsts: those are logits of the window alone. Rows of padding behind the others may be left
    out. Logits [P,V] hold positions and no padding. ``from_hidden`` stands for logits of either
    form, and no array of their size is made then.

    Both sides are taken at ``targets.temperature`` T, the logits divided by it in here, and
    the sum is multiplied by T², which keeps the gradient's size independent of T; at T = 1 it
    is the plain divergence.
    ``temperature``, where given, must be the same T.

    With ``shard``, ``student_logits`` are this rank's columns of a vocabulary that is spread over
    a group, and every rank of it calls this: see ``VocabShard``.

    The sum is fp32 (fp64 for fp64 logits). It is infinite where the teacher gives mass to what
    the student's logits rule out by -inf; the gradient is finite even then. The count is int64,
    or fp64 where ``mask`` has weights. Divide once, by the whole step's count.

    Raises:
        PayloadInvalidError: shapes or temperatures that disagree, a row that reaches beyond S,
            an id that the student has no column for, something else than targets, such whose
            mass is far above 1 where they count, K = 1 with ``Tail.RENORMALISED``, which teaches
            nothing, or a sample with that tail.
        ConfigError: ``tail`` is none, or makes no sense here.
        LeaseLostError: the targets' lease is closed.
        RequestInvalidError: the ranks of ``shard`` disagree, or one of them refused its part.
    """
    return sum_over_positions(
        student_logits,
        targets,
        mask,
        temperature=temperature,
        tail=tail,
        divergence=slopes.forward_kl,
        shard=shard,
    )


def reverse_kl(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    temperature: float | None = None,
    tail: Tail = Tail.BUCKET,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of KL(student ‖ teacher) over positions, and how many they are.

    It is infinite where the student gives mass to what the teacher rules out by -inf; the
    gradient there is that of a teacher at ``ABSENT_LOGPROB``, -1e4, finite and large. Takes
    ``Tail.NEMO_FLOOR``, and not ``Tail.TEACHER_RENORMALISED``, with which it is infinite.
    Everything else as ``forward_kl``.

    Raises:
        PayloadInvalidError, ConfigError, LeaseLostError: see ``forward_kl``.
    """
    return sum_over_positions(
        student_logits,
        targets,
        mask,
        temperature=temperature,
        tail=tail,
        divergence=slopes.reverse_kl,
        shard=shard,
    )


def total_variation(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    temperature: float | None = None,
    tail: Tail = Tail.BUCKET,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of half the sum of |p - q|: from 0 to 1 a position, finite always.

    A category where both agree exactly has no slope. Everything else as ``forward_kl``.

    Raises:
        PayloadInvalidError, ConfigError, LeaseLostError: see ``forward_kl``.
    """
    return sum_over_positions(
        student_logits,
        targets,
        mask,
        temperature=temperature,
        tail=tail,
        divergence=slopes.total_variation,
        shard=shard,
    )


def soft_cross_entropy(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    temperature: float | None = None,
    tail: Tail = Tail.BUCKET,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of -p log q: forward KL and the teacher's entropy, of the same gradient.

    With ``Tail.TRUNCATED`` the entries may be the logs of any weights, such as unbiased ones
    of sampled ids: it is linear in them. Everything else as ``forward_kl``.

    Raises:
        PayloadInvalidError, ConfigError, LeaseLostError: see ``forward_kl``.
    """
    return sum_over_positions(
        student_logits,
        targets,
        mask,
        temperature=temperature,
        tail=tail,
        divergence=slopes.soft_cross_entropy,
        shard=shard,
    )


def logprob_mse(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    temperature: float | None = None,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over positions of the mean of (log q - log p)² over a position's entries.

    Log-probabilities of the whole vocabulary on both sides, on the ids of the targets alone:
    they fix the mass outside as well, so there is no tail to choose. No divergence: an entry
    of tiny probability weighs as much as any. Everything else as ``forward_kl``.

    Raises:
        PayloadInvalidError, LeaseLostError: see ``forward_kl``.
    """
    divergence = slopes.mean_squared_error
    return sum_over_positions(
        student_logits,
        targets,
        mask,
        temperature=temperature,
        tail=Tail.TRUNCATED,
        divergence=divergence,
        shard=shard,
    )
