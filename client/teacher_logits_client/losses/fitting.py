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

if TYPE_CHECKING:
    from teacher_logits_client.targets import Targets


def check_targets(targets: Targets, device: torch.device) -> None:
    """Let targets pass that may be read, with columns of the same positions, on ``device``.

    Raises:
        LeaseLostError: their lease is closed.
        PayloadInvalidError: a column is no tensor of its kind, differs in shape from the ids, or
            lies elsewhere; a temperature that is not above 0; row offsets that are none.
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
    }
    for name, (column, kind) in columns.items():
        if not isinstance(column, torch.Tensor) or _kind(column) != kind:
            given = column.dtype if isinstance(column, torch.Tensor) else type(column).__name__
            raise PayloadInvalidError(
                f"{name} of the targets is a {given}; it is a tensor of {kind}",
                facts={"column": name, "given": str(given)},
            )
    _check_shapes(targets)
    if ids.device != device:
        raise PayloadInvalidError(
            f"the targets are on {ids.device} and the student's logits on {device}; give "
            "targets.to(logits.device)",
            facts={"targets": str(ids.device), "student": str(device)},
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


def _check_shapes(targets: Targets) -> None:
    shape = tuple(targets.topk_ids.shape)
    wanted = {
        "topk_logprobs": (targets.topk_logprobs, shape),
        "log_tail": (targets.log_tail, shape[:-1]),
        "valid": (targets.valid, shape[:-1]),
    }
    for name, (column, fitting) in wanted.items():
        if len(shape) < 2 or tuple(column.shape) != fitting:
            raise PayloadInvalidError(
                f"{name} of the targets has shape {tuple(column.shape)} and topk_ids {shape}; with "
                "ids [P,K] the log-probabilities are [P,K], log_tail and valid [P]",
                facts={"column": name, "shape": str(tuple(column.shape)), "ids": str(shape)},
            )
    offsets = targets.row_offsets
    if offsets.dim() != 1 or len(offsets) == 0:
        raise PayloadInvalidError(
            f"row_offsets of the targets has shape {tuple(offsets.shape)}; N rows have N+1 of "
            "them, in one dimension",
            facts={"column": "row_offsets", "shape": str(tuple(offsets.shape))},
        )


def _kind(column: torch.Tensor) -> str:
    if column.dtype == torch.bool:
        return "truth values"
    if column.is_floating_point():
        return "floats"
    return "others" if column.is_complex() else "whole numbers"
