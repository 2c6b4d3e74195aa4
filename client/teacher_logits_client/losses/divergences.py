"""Divergences between teacher and student over K ids and a bucket for the rest.

Each is a true divergence: at least 0, and 0 only where the student agrees on the K ids and on
the mass outside them. Each is a lower bound of its dense counterpart, which it equals where
nothing is outside (math note 3.2).

Promises: sums over positions and the count they are to be divided by, never means. Positions
that ``mask`` or ``targets.valid`` leaves out add exactly 0 to both and to the gradient, even
where their logits are NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.losses.bucket import Terms, bucket_loss

if TYPE_CHECKING:
    from teacher_logits_client.losses.bucket import Divergence
    from teacher_logits_client.targets import Targets


def forward_kl(
    student_logits: torch.Tensor,
    targets: Targets,
    mask: torch.Tensor | None = None,
    *,
    temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of KL(teacher ‖ student) over positions, and how many they are.

    ``student_logits`` [P,V] or [N,S,V], bf16, fp16, fp32 or fp64, raw and at the positions of
    ``targets``: logits at position s meet the teacher's distribution of token s+1, so neither
    is shifted. ``mask`` [P] or [N,S] says which positions count; numbers weigh them.

    Both sides are taken at ``targets.temperature`` T, and the sum is multiplied by T², which
    keeps the gradient's size independent of T; at T = 1 it is the plain divergence.
    ``temperature``, where given, must be the same T.

    The sum is fp32 (fp64 for fp64 logits). It is infinite where the teacher gives mass to what
    the student's logits rule out by -inf; the gradient is finite even then. The count is int64,
    or fp64 where ``mask`` has weights. Divide once, by the whole step's count.

    Raises:
        PayloadInvalidError: shapes or temperatures that disagree, or an id that the student has
            no column for.
    """
    return _bucket_divergence(student_logits, targets, mask, temperature, _forward_kl)


def _forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = log_p.exp()
    # Where p is 0 the term is 0, even where q is 0 as well.
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(1), -p


def _bucket_divergence(
    student_logits: torch.Tensor,
    targets: Targets,
    mask: torch.Tensor | None,
    temperature: float | None,
    divergence: Divergence,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_temperature(targets, temperature)
    width = targets.topk_ids.shape[-1]
    ids = targets.topk_ids.reshape(-1, width).long()
    logits = _flat_logits(student_logits, targets, ids)
    weights, count = _weights(targets.valid.reshape(-1), mask)
    log_teacher = torch.cat(
        [targets.topk_logprobs.reshape(-1, width), targets.log_tail.reshape(-1, 1)], 1
    )
    terms = Terms(
        ids=ids,
        log_teacher=log_teacher,
        weights=weights,
        temperature=targets.temperature,
        divergence=divergence,
    )
    return bucket_loss(logits, terms), count


def _weights(valid: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each position's weight [P], 0 where it is left out, and their sum."""
    if mask is None:
        return valid, valid.sum()
    if mask.numel() != valid.numel():
        raise PayloadInvalidError(
            f"the mask has shape {tuple(mask.shape)} and the targets have {valid.numel()} "
            "positions; give one number or truth value a position",
            facts={"mask_positions": mask.numel(), "positions": valid.numel()},
        )
    flat = mask.reshape(-1).to(valid.device)
    weights = torch.where(valid, flat, torch.zeros_like(flat))
    # fp32 counts lose whole tokens above 2**24.
    return weights, weights.sum(dtype=torch.float64 if flat.is_floating_point() else torch.int64)


def _flat_logits(student_logits: torch.Tensor, targets: Targets, ids: torch.Tensor) -> torch.Tensor:
    """Return the student's logits as [P,V], if they fit the targets."""
    shape = tuple(student_logits.shape)
    positions, columns = student_logits[..., 0].numel(), shape[-1]
    if student_logits.dim() not in (2, 3) or positions != len(ids):
        raise PayloadInvalidError(
            f"student logits have shape {shape} and the targets have {len(ids)} positions; give "
            "[P,V] or [N,S,V] with one position for each, and for rows of different lengths the "
            "flat form, padding left out",
            facts={"student_positions": positions, "target_positions": len(ids)},
        )
    highest = int(ids.max()) if ids.numel() else -1
    if highest >= columns:
        raise PayloadInvalidError(
            f"the targets name id {highest} and the student has {columns} columns; open the "
            "session with the student's vocabulary size, so that the rest goes into the tail",
            facts={"token_id": highest, "student_columns": columns},
        )
    return student_logits.reshape(-1, columns)


def _check_temperature(targets: Targets, temperature: float | None) -> None:
    if temperature is not None and temperature != targets.temperature:
        raise PayloadInvalidError(
            f"temperature {temperature:g} is asked for and the targets are at "
            f"{targets.temperature:g}; make targets at {temperature:g}: tails do not follow from "
            "one temperature to another",
            facts={"temperature": temperature, "targets_temperature": targets.temperature},
        )
