"""Positions: which row of the student's logits meets which position of the targets, and its weight.

Every loss over targets is summed here, so that all of them place, mask, weigh, count and refuse
alike. ``forward_kl`` says how for the caller.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.losses import slopes
from teacher_logits_client.losses.coarse import coarse_loss
from teacher_logits_client.losses.fitting import (
    check_mass,
    check_named_once,
    check_same_temperature,
    check_targets,
    is_dense,
)
from teacher_logits_client.losses.head_logits import HeadLogits
from teacher_logits_client.losses.hidden import hidden_loss
from teacher_logits_client.losses.samples import less_entropy, linear_form
from teacher_logits_client.losses.sharding import check_columns, refused_together
from teacher_logits_client.losses.tails import Tail, check_tail
from teacher_logits_client.losses.weighing import Inputs
from teacher_logits_client.targets import Targets

if TYPE_CHECKING:
    from teacher_logits_client.losses.sharding import VocabShard

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def sum_over_positions(
    student_logits: torch.Tensor | HeadLogits,
    targets: Targets,
    mask: torch.Tensor | None,
    *,
    temperature: float | None,
    tail: Tail,
    divergence: slopes.Divergence,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return T² times the weighted sum of a divergence, and the sum of the weights.

    Raises:
        PayloadInvalidError, ConfigError, LeaseLostError, RequestInvalidError: see ``forward_kl``.
    """
    with refused_together(shard, student_logits):
        _check_kinds(student_logits, targets, mask)
        check_targets(targets, student_logits.device)
        width = targets.topk_ids.shape[-1]
        check_tail(tail, width=width, at_reverse_kl=divergence is slopes.reverse_kl)
        check_same_temperature(targets, temperature)
        named = _named(divergence, student_logits)
        divergence, entropy = linear_form(targets, divergence, tail)
        ids = targets.topk_ids.reshape(-1, width).long()
        places = _places(student_logits, targets)
        _check_logits(tuple(student_logits.shape), ids, places, shard)
        weights, count = _weights(targets, mask, places, tuple(student_logits.shape[:-1]))
        check_named_once(ids, weights)
        linear = tail is Tail.TRUNCATED and divergence is slopes.soft_cross_entropy
        inputs = Inputs(
            ids=ids,
            log_teacher=_log_teacher(targets, weights, of_any_weights=linear),
            weights=weights,
            places=places,
            temperature=targets.temperature,
            tail=tail,
            divergence=divergence,
            shard=shard,
            named=named,
            entropy=entropy,
        )
    loss = _loss(student_logits, inputs)
    return less_entropy(loss, entropy, weights, temperature=targets.temperature), count


def _loss(student_logits: torch.Tensor | HeadLogits, inputs: Inputs) -> torch.Tensor:
    if not isinstance(student_logits, HeadLogits):
        return coarse_loss(student_logits.flatten(0, -2), inputs)
    return hidden_loss(student_logits.cut(inputs.own_columns(student_logits.shape[-1])), inputs)


def _named(divergence: slopes.Divergence, logits: torch.Tensor | HeadLogits) -> str:
    """Return the loss and its settings in words, with those of a head that has some."""
    plain = not isinstance(logits, HeadLogits) or (logits.scale, logits.soft_cap) == (1.0, None)
    of_head = "" if plain else f" of a head at {logits.scale}, capped at {logits.soft_cap},"  # type: ignore[union-attr]
    return slopes.name_of(divergence) + of_head


def _log_teacher(targets: Targets, weights: torch.Tensor, *, of_any_weights: bool) -> torch.Tensor:
    """Return the teacher's log-probabilities [P,K+1], the mass outside last.

    They are those of a distribution where ``weights`` [P] is not 0, but for samples, which are
    right on average, and where a loss takes the logs ``of_any_weights``.
    """
    entries = targets.topk_logprobs.flatten(0, -2)
    found = torch.cat([entries, targets.log_tail.reshape(-1, 1)], 1)
    if not (of_any_weights or targets.sampled):
        check_mass(found, weights)
    return found


def _places(student_logits: torch.Tensor | HeadLogits, targets: Targets) -> torch.Tensor | None:
    """Return each position's row in the flat logits, int64 [P]; None where those are in order.

    Rows behind the others that have no position, as those of padding, may be left out of logits.
    """
    shape, counts = tuple(student_logits.shape), targets.row_offsets.diff()
    if len(shape) == 3 and shape[0] < len(counts) and not bool(counts[shape[0] :].any()):
        counts = counts[: shape[0]]
    if len(shape) != 3 or shape[0] != len(counts) or bool((counts == shape[1]).all()):
        return None
    firsts = torch.zeros_like(counts)
    if targets.row_firsts is not None:
        firsts = targets.row_firsts[: len(counts)]
    beyond = (((firsts < 0) | (firsts + counts > shape[1])) & (counts > 0)).nonzero()
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
    starts = rows * shape[1] + firsts - targets.row_offsets[: len(counts)]
    places = starts.repeat_interleave(counts)
    places += torch.arange(len(places), device=places.device)
    return places.to(student_logits.device)


def _weights(
    targets: Targets,
    mask: torch.Tensor | None,
    places: torch.Tensor | None,
    grid: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each position's weight [P] and their sum; ``grid`` is what the logits have of them."""
    valid = targets.valid.reshape(-1)
    if mask is not None:
        mask = _flat_mask(mask, valid, places, grid)
    return weights_and_count(valid, mask)


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


def weights_and_count(
    valid: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each position's weight [P], 0 where it is left out, and their sum.

    Raises:
        PayloadInvalidError: the mask [P] holds something else, such as labels.
    """
    if mask is None:
        return valid, valid.sum()
    # Weights are constants: a mean would send a gradient to them by way of its count.
    weights = torch.where(valid, mask.detach(), torch.zeros_like(mask))
    _check_weights(weights)
    # fp32 counts lose whole tokens above 2**24.
    return weights, weights.sum(dtype=torch.float64 if mask.is_floating_point() else torch.int64)


def _check_weights(weights: torch.Tensor) -> None:
    """Refuse a mask that holds something else, such as labels."""
    if weights.dtype == torch.bool:
        return
    most = torch.inf if weights.is_floating_point() else 1
    wrong = (~((weights >= 0) & (weights <= most))).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise PayloadInvalidError(
            f"the mask holds {weights[position].item()} at position {position} ({len(wrong)} such "
            "positions): give truth values, whole numbers 0 and 1, or weights as floats from 0 on; "
            "labels_mask makes a mask of labels",
            facts={"position": position, "wrong_positions": len(wrong)},
        )


def _check_logits(
    shape: tuple[int, ...],
    ids: torch.Tensor,
    places: torch.Tensor | None,
    shard: VocabShard | None,
) -> None:
    """Let the shape of the student's logits pass if it fits the ids [P,K] of the targets."""
    columns = shape[-1] if shape else 0
    positions = math.prod(shape[:-1]) if places is None else len(places)
    if len(shape) not in (2, 3) or positions != len(ids):
        raise PayloadInvalidError(
            f"student logits have shape {shape} and the targets have {len(ids)} positions; give "
            "[N,S,V] with a row for each row of the targets, padded on the right, or the flat "
            "form [P,V], padding left out",
            facts={"student_positions": positions, "target_positions": len(ids)},
        )
    if shard is not None:
        check_columns(shape, shard)
    highest = int(ids.max()) if ids.numel() else -1
    vocabulary_size = columns if shard is None else shard.vocabulary_size
    if highest >= vocabulary_size:
        raise PayloadInvalidError(
            f"the targets name id {highest} and the student has {vocabulary_size} columns; open "
            "the session with the student's vocabulary size, so that the rest goes into the tail",
            facts={"token_id": highest, "student_columns": vocabulary_size},
        )


def _check_kinds(student_logits: object, targets: object, mask: object) -> None:
    logits_given = isinstance(student_logits, torch.Tensor | HeadLogits)
    if not logits_given or not isinstance(targets, Targets):
        given = [type(each).__name__ for each in (student_logits, targets)]
        raise PayloadInvalidError(
            f"a loss takes the student's logits, a Tensor or from_hidden, and then Targets, and "
            f"was given {given[0]} and {given[1]}; pass payload.targets as the second argument",
            facts={"student_logits": given[0], "targets": given[1]},
        )
    if isinstance(student_logits, torch.Tensor) and not (
        student_logits.dtype in _FLOATS and is_dense(student_logits)
    ):
        layout = "nested" if student_logits.is_nested else student_logits.layout
        kind = f"{student_logits.dtype} ({layout})"
        raise PayloadInvalidError(
            f"student logits are {kind}: give dense floats, of bf16, fp16, fp32 or fp64",
            facts={"student_logits": kind},
        )
    check_mask(mask)


def check_mask(mask: object) -> None:
    """Let a mask pass that is a dense tensor of truth values or numbers, or None.

    Raises:
        PayloadInvalidError: it is something else.
    """
    if mask is not None and (
        not isinstance(mask, torch.Tensor) or mask.is_complex() or not is_dense(mask)
    ):
        kind = str(mask.dtype) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise PayloadInvalidError(
            f"the mask is a {kind}: give a dense tensor of truth values or numbers",
            facts={"mask": kind},
        )
