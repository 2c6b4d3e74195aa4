"""Divergences between teacher and student over K ids and a bucket for the rest.

Each is a true divergence: at least 0, and 0 only where the student agrees on the K ids and on
the mass outside them. Each is a lower bound of its dense counterpart, which it equals where
nothing is outside (math note 3.2).

Promises: sums over positions and the count they are to be divided by, never means. Positions
that ``mask`` or ``targets.valid`` leaves out add exactly 0 to both and to the gradient, even
where their logits are NaN; so do places of [N,S,V] that hold no position. A row's last position
has no next token and never counts, whatever ``mask`` says: ``targets.valid`` leaves it out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.losses.bucket import Terms, bucket_loss
from teacher_logits_client.targets import Targets

if TYPE_CHECKING:
    from teacher_logits_client.losses.bucket import Divergence


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
    is shifted. ``mask`` [P] or [N,S] says which positions count; numbers weigh them. A row's
    last position never counts, whatever it says. ``labels_mask`` makes one of labels.

    Rows of [N,S,V] may be of different lengths, padded on the right to S: position p of row i
    is at ``[i, p]``, or ``[i, first + p]`` where ``targets.row_firsts`` says that the row was
    scored from ``first`` on. What is left of a row is padding: neither its logits nor ``mask``
    there are read. Where every row has exactly S positions they are the S places, whatever
    the firsts: those are logits of the window alone. Logits [P,V] hold positions and no padding.

    Both sides are taken at ``targets.temperature`` T, the logits divided by it in here, and
    the sum is multiplied by T², which keeps the gradient's size independent of T; at T = 1 it
    is the plain divergence.
    ``temperature``, where given, must be the same T.

    The sum is fp32 (fp64 for fp64 logits). It is infinite where the teacher gives mass to what
    the student's logits rule out by -inf; the gradient is finite even then. The count is int64,
    or fp64 where ``mask`` has weights. Divide once, by the whole step's count.

    Raises:
        PayloadInvalidError: shapes or temperatures that disagree, a row that reaches beyond S,
            an id that the student has no column for, or something else than targets.
        LeaseLostError: the targets' lease is closed.
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
    _check_kinds(student_logits, targets)
    targets.check_open()
    _check_temperature(targets, temperature)
    width = targets.topk_ids.shape[-1]
    ids = targets.topk_ids.reshape(-1, width).long()
    places = _places(student_logits, targets)
    logits = _flat_logits(student_logits, ids, places)
    valid = targets.valid.reshape(-1)
    if mask is not None:
        mask = _flat_mask(mask, valid, places, tuple(student_logits.shape[:-1]))
    weights, count = _weights(valid, mask)
    log_teacher = torch.cat(
        [targets.topk_logprobs.reshape(-1, width), targets.log_tail.reshape(-1, 1)], 1
    )
    terms = Terms(
        ids=ids,
        log_teacher=log_teacher,
        weights=weights,
        places=places,
        temperature=targets.temperature,
        divergence=divergence,
    )
    return bucket_loss(logits, terms), count


def _places(student_logits: torch.Tensor, targets: Targets) -> torch.Tensor | None:
    """Return each position's row in the flat logits, int64 [P]; None where those are in order."""
    shape, counts = tuple(student_logits.shape), targets.row_offsets.diff()
    if len(shape) != 3 or shape[0] != len(counts) or bool((counts == shape[1]).all()):
        return None
    firsts = torch.zeros_like(counts) if targets.row_firsts is None else targets.row_firsts
    beyond = ((firsts + counts > shape[1]) & (counts > 0)).nonzero()
    if len(beyond):
        row = int(beyond[0])
        first, count = int(firsts[row]), int(counts[row])
        raise PayloadInvalidError(
            f"row {row} of {len(counts)} has {count} positions from {first} on and the student's "
            f"logits have room for {shape[1]}, from 0 on (shape {shape}); give whole rows, or the "
            "flat form [P,V], padding left out",
            facts={"row": row, "first": first, "positions": count, "room": shape[1]},
        )
    rows = torch.arange(len(counts), device=counts.device)
    starts = rows * shape[1] + firsts - targets.row_offsets[:-1]
    places = starts.repeat_interleave(counts)
    places += torch.arange(len(places), device=places.device)
    return places.to(student_logits.device)


def _flat_mask(
    mask: torch.Tensor,
    valid: torch.Tensor,
    places: torch.Tensor | None,
    grid: tuple[int, ...],
) -> torch.Tensor:
    """Return the mask [P] on the targets' device, taken at the places of the positions."""
    if places is not None and tuple(mask.shape) == grid:
        return mask.reshape(-1).to(valid.device)[places]
    # Beside padding, only a flat mask says for sure which positions it means.
    if mask.numel() != valid.numel() or (places is not None and mask.dim() != 1):
        padded = "" if places is None else f", in the flat form or as {list(grid)} with padding"
        raise PayloadInvalidError(
            f"the mask has shape {tuple(mask.shape)} and the targets have {valid.numel()} "
            f"positions; give one number or truth value a position{padded}",
            facts={"mask_positions": mask.numel(), "positions": valid.numel()},
        )
    return mask.reshape(-1).to(valid.device)


def _weights(valid: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each position's weight [P], 0 where it is left out, and their sum."""
    if mask is None:
        return valid, valid.sum()
    weights = torch.where(valid, mask, torch.zeros_like(mask))
    # fp32 counts lose whole tokens above 2**24.
    return weights, weights.sum(dtype=torch.float64 if mask.is_floating_point() else torch.int64)


def _flat_logits(
    student_logits: torch.Tensor, ids: torch.Tensor, places: torch.Tensor | None
) -> torch.Tensor:
    """Return the student's logits as [P,V] or, where they have padding, [N*S,V], if they fit."""
    shape = tuple(student_logits.shape)
    columns = shape[-1]
    positions = math.prod(shape[:-1]) if places is None else len(places)
    if len(shape) not in (2, 3) or positions != len(ids):
        raise PayloadInvalidError(
            f"student logits have shape {shape} and the targets have {len(ids)} positions; give "
            "[N,S,V] with a row for each row of the targets, padded on the right, or the flat "
            "form [P,V], padding left out",
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


def _check_kinds(student_logits: object, targets: object) -> None:
    if not isinstance(student_logits, torch.Tensor) or not isinstance(targets, Targets):
        given = [type(each).__name__ for each in (student_logits, targets)]
        raise PayloadInvalidError(
            f"a loss takes the student's logits, a Tensor, and then Targets, and was given "
            f"{given[0]} and {given[1]}; pass payload.targets as the second argument",
            facts={"student_logits": given[0], "targets": given[1]},
        )


def _check_temperature(targets: Targets, temperature: float | None) -> None:
    if temperature is not None and temperature != targets.temperature:
        raise PayloadInvalidError(
            f"temperature {temperature:g} is asked for and the targets are at "
            f"{targets.temperature:g}; make targets at {temperature:g}: tails do not follow from "
            "one temperature to another",
            facts={"temperature": temperature, "targets_temperature": targets.temperature},
        )
