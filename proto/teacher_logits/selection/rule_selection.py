"""Selections by rule: the K best, or a nucleus of them, straight into where they will be read.

A publisher's draft and an engine's answer are memory that is laid out before there are logits. What
is selected lies there when ``select_into`` returns, or, on a device, is given to its stream.

Promises: nothing is made beside the memory where the logits are on its device and all K entries are
kept. Elsewhere it is selected beside the logits and copied; a nucleus is cut in fp32 and rounded
then.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from teacher_logits.selection import Selection, select_top_k, write_values
from teacher_logits.selection.nucleus import cap_nucleus
from teacher_logits.selection_rules import Nucleus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.selection_rules import SelectionRule


def select_into(
    out: Selection,
    logits: torch.Tensor,
    *,
    rule: SelectionRule,
    temperatures: Sequence[float],
    vocab_size: int,
    next_ids: torch.Tensor | None,
) -> None:
    """Select by ``rule``, the K best or a nucleus, into ``out``; the rest as ``select_top_k``.

    Raises:
        PayloadInvalidError: as ``select_top_k``.
    """
    cut = rule if isinstance(rule, Nucleus) else None
    is_there = logits.device == out.topk_ids.device and cut is None
    found = out if is_there else _like(out, logits.device, exact=cut is not None)
    select_top_k(
        logits,
        k=out.topk_ids.shape[1],
        temperatures=temperatures,
        vocab_size=vocab_size,
        next_ids=next_ids,
        out=found,
    )
    if cut is not None:
        found = cap_nucleus(found, cut, temperatures=temperatures)
    if is_there:
        return
    for field in fields(Selection):
        target, values = getattr(out, field.name), getattr(found, field.name)
        if target is not None:
            write_values(target, values)


def _like(out: Selection, device: torch.device, *, exact: bool) -> Selection:
    """Return tensors for a selection on a device; ``exact`` where log-probabilities are fp32."""

    def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty_like(tensor, device=device, dtype=dtype)

    return Selection(
        topk_ids=like(out.topk_ids),
        topk_logprobs=like(out.topk_logprobs, torch.float32 if exact else None),
        log_tail=like(out.log_tail),
        logsumexp=like(out.logsumexp),
        actual_logprob=None if out.actual_logprob is None else like(out.actual_logprob),
        status=like(out.status),
        topk_logits=None if out.topk_logits is None else like(out.topk_logits),
    )
