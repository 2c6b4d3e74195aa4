"""Whether targets fit together: those of a payload do, and hand-made ones may not.

Every loss asks this first, so that a column too short is named here, with its numbers, and not
by torch in the middle of a sum.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.selection.entry_invariants import stands_twice

if TYPE_CHECKING:
    from teacher_logits_client.targets import Targets

# Well above 1: log-probabilities of 16 bits add up to a few hundredths more or less.
_MOST_MASS = 1.25


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one array, neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def check_targets(targets: Targets, device: torch.device) -> None:
    """Let targets pass that may be read, with columns of the same positions, on ``device``.

    Raises:
        LeaseLostError: their lease is closed.
        PayloadInvalidError: a column is no tensor of its kind, differs in shape from the ids, or
            lies elsewhere; a temperature that is not above 0; row offsets that are none, or do
            not go from 0 to the number of positions.
    """
    targets.check_open()
    check_temperature_above_zero(targets.temperature)
    ids = targets.topk_ids
    columns = {
        "topk_ids": (ids, "whole numbers"),
        "topk_logprobs": (targets.topk_logprobs, "floats"),
        "log_tail": (targets.log_tail, "floats"),
        "valid": (targets.valid, "truth values"),
        "row_offsets": (targets.row_offsets, "whole numbers"),
        "row_firsts": (targets.row_firsts, "whole numbers"),
        "entropy": (targets.entropy, "floats"),
    }
    for name in ("row_firsts", "entropy"):
        if getattr(targets, name) is None:
            del columns[name]
    for name, (column, kind) in columns.items():
        if not isinstance(column, torch.Tensor) or _kind(column) != kind:
            given = column.dtype if isinstance(column, torch.Tensor) else type(column).__name__
            raise PayloadInvalidError(
                f"{name} of the targets is a {given}; it is a tensor of {kind}",
                facts={"column": name, "given": str(given)},
            )
    _check_shapes(targets)
    _check_one_device(targets)
    if ids.device != device:
        raise PayloadInvalidError(
            f"the targets are on {ids.device} and the student's logits on {device}; give "
            "targets.to(logits.device)",
            facts={"targets": str(ids.device), "student": str(device)},
        )


def check_mass(log_teacher: torch.Tensor, weights: torch.Tensor) -> None:
    """Let log-probabilities [P,K+1] pass that are some, where ``weights`` [P] is not 0.

    Raises:
        PayloadInvalidError: what they are the logs of adds up to far more than 1, or to no number.
    """
    masses = log_teacher.exp().sum(1)
    wrong = (~(masses <= _MOST_MASS) & (weights != 0)).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise PayloadInvalidError(
            f"topk_logprobs and log_tail of the targets have a mass of "
            f"{float(masses[position]):.4g} at position {position} ({len(wrong)} such positions "
            "count), and probabilities add up to 1; give log-probabilities, such as those of "
            "select_top_k, and neither probabilities nor logits",
            facts={
                "position": position,
                "mass": float(masses[position]),
                "wrong_positions": len(wrong),
            },
        )


def check_named_once(ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Let ids [P,K] pass that a position names once, where ``weights`` [P] is not 0.

    Raises:
        PayloadInvalidError: one is named twice; the student's mass there would count twice.
    """
    wrong = (stands_twice(ids) & (weights != 0)).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise PayloadInvalidError(
            f"topk_ids of the targets name an id twice at position {position} ({len(wrong)} such "
            "positions count), and its mass would count twice; name each once, and put -1 and "
            "ABSENT_LOGPROB in the other's stead",
            facts={"position": position, "wrong_positions": len(wrong)},
        )


def check_temperature_above_zero(temperature: object) -> None:
    """Let a temperature pass that logits can be divided by.

    Raises:
        PayloadInvalidError: it is no number, not above 0, or not finite.
    """
    if not isinstance(temperature, Real) or not 0 < float(temperature) < math.inf:
        raise PayloadInvalidError(
            f"the temperature is {temperature!r}; logits are divided by it: give a finite number "
            "above 0",
            facts={"temperature": repr(temperature)},
        )


def check_same_temperature(targets: Targets, temperature: float | None) -> None:
    """Let a temperature pass that is that of the targets, or None.

    Raises:
        PayloadInvalidError: it is another, or one that logits cannot be divided by.
    """
    if temperature is not None:
        check_temperature_above_zero(temperature)
    if temperature is not None and temperature != targets.temperature:
        raise PayloadInvalidError(
            f"temperature {temperature:g} is asked for and the targets are at "
            f"{targets.temperature:g}; make targets at {temperature:g}: tails do not follow from "
            "one temperature to another",
            facts={"temperature": temperature, "targets_temperature": targets.temperature},
        )


def _check_shapes(targets: Targets) -> None:
    shape = tuple(targets.topk_ids.shape)
    wanted = {
        "topk_logprobs": (targets.topk_logprobs, shape),
        "log_tail": (targets.log_tail, shape[:-1]),
        "valid": (targets.valid, shape[:-1]),
    }
    if targets.entropy is not None:
        wanted["entropy"] = (targets.entropy, shape[:-1])
    for name, (column, fitting) in wanted.items():
        if len(shape) < 2 or tuple(column.shape) != fitting:
            raise PayloadInvalidError(
                f"{name} of the targets has shape {tuple(column.shape)} and topk_ids {shape}; with "
                "ids [P,K] the log-probabilities are [P,K], log_tail, valid and entropy [P]",
                facts={"column": name, "shape": str(tuple(column.shape)), "ids": str(shape)},
            )
    offsets = targets.row_offsets
    if offsets.dim() != 1 or len(offsets) == 0:
        raise PayloadInvalidError(
            f"row_offsets of the targets has shape {tuple(offsets.shape)}; N rows have N+1 of "
            "them, in one dimension",
            facts={"column": "row_offsets", "shape": str(tuple(offsets.shape))},
        )
    firsts = targets.row_firsts
    if firsts is not None and tuple(firsts.shape) != (len(offsets) - 1,):
        raise PayloadInvalidError(
            f"row_firsts of the targets has shape {tuple(firsts.shape)} and there are "
            f"{len(offsets) - 1} rows; give one a row, or None where all start at 0",
            facts={"column": "row_firsts", "shape": str(tuple(firsts.shape))},
        )
    positions = targets.valid.numel()
    first, last, falls = torch.stack([offsets[0], offsets[-1], (offsets.diff() < 0).sum()]).tolist()
    if first or last != positions or falls:
        raise PayloadInvalidError(
            f"row_offsets of the targets go from {first} to {last}, down {falls} times, and there "
            f"are {positions} positions; they go from 0 to {positions} and never down",
            facts={"first": first, "last": last, "falls": falls, "positions": positions},
        )


def _check_one_device(targets: Targets) -> None:
    """Let columns pass that lie together; those of rows may lie elsewhere, together too."""
    ids, offsets = targets.topk_ids, targets.row_offsets
    for name, other in {
        "topk_logprobs": ids,
        "log_tail": ids,
        "valid": ids,
        "entropy": ids,
        "row_firsts": offsets,
    }.items():
        column = getattr(targets, name)
        if column is not None and column.device != other.device:
            raise PayloadInvalidError(
                f"{name} of the targets is on {column.device}, and what it goes with on "
                f"{other.device}; give targets.to(logits.device), which takes all of them along",
                facts={"column": name, "device": str(column.device)},
            )


def _kind(column: torch.Tensor) -> str:
    if not is_dense(column):
        return "others"
    if column.dtype == torch.bool:
        return "truth values"
    if column.is_floating_point():
        return "floats"
    return "others" if column.is_complex() else "whole numbers"
