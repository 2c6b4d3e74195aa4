"""Merging: vocabulary parts of the same positions as what one teacher rank would have said.

    part t [P,K]   ids, raw logits; log_tail and logsumexp within the ids of the part
    merged [P,K]   the K best of all candidates; tails over the complement: what the parts left
                   out, and the candidates that are not among the best

It is the merge of any slices of a vocabulary (docs/math.md, "Merging").

Promises: ids, their order and their logits are exactly those of the whole vocabulary, ties by id
ascending; log-probabilities and tails are its up to the rounding of fp32 normalisers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.selection import write_values
from teacher_logits.selection.partial_selection import PartialSelection, merge_partials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits.payload import Payload

    Columns = Mapping[Kind, torch.Tensor]


def merge_vocabulary(
    parts: Sequence[tuple[Payload, Columns]], *, device: torch.device
) -> dict[Kind, torch.Tensor]:
    """Return the columns over positions of the whole vocabulary, on a device.

    ``parts`` hold all of its ids, each once, at the same positions. What a bad row's are is
    whatever comes of it.

    Raises:
        PayloadInvalidError: a part lacks its raw logits or normalisers, or ids are missing or
            there twice.
    """
    first = parts[0][1]
    following = None
    if Kind.ACTUAL_LOGPROB in first:
        # Of a token that other parts hold a part says -inf: where all say 0, none comes.
        actuals = [columns[Kind.ACTUAL_LOGPROB].to(device) for _, columns in parts]
        is_none = torch.stack(actuals).eq(0).all(0)
        following = torch.where(is_none, -1, 0)
    merged = merge_partials(
        _partial(part, columns, following, device=device) for part, columns in parts
    )
    whole = merged.finish()
    values = torch.empty_like(whole.topk_logprobs, dtype=first[Kind.TOPK_LOGPROBS].dtype)
    write_values(values, whole.topk_logprobs)
    found = {
        Kind.TOPK_IDS: whole.topk_ids,
        Kind.TOPK_LOGPROBS: values,
        Kind.TOPK_LOGITS: merged.logits,
        Kind.LOG_TAIL: whole.log_tail,
        Kind.LOGSUMEXP: whole.logsumexp,
    }
    if whole.actual_logprob is not None:
        found[Kind.ACTUAL_LOGPROB] = whole.actual_logprob
    return {kind: found[kind] for kind in found if kind in first}


def _partial(
    payload: Payload, columns: Columns, following: torch.Tensor | None, *, device: torch.device
) -> PartialSelection:
    part = payload.part
    if part is None or Kind.TOPK_LOGITS not in columns or Kind.LOGSUMEXP not in columns:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} holds some ids of the vocabulary without topk_logits "
            "and logsumexp, by which it would be merged with the others",
            facts={"payload_id": payload.payload_id},
        )
    logits = columns[Kind.TOPK_LOGITS].to(device, torch.float32)
    normaliser = columns[Kind.LOGSUMEXP].to(device, torch.float64)
    next_logits = None
    if following is not None:
        actual = columns[Kind.ACTUAL_LOGPROB].to(device, torch.float64)
        next_logits = (actual + normaliser[:, 0]).float()
    return PartialSelection(
        ids=columns[Kind.TOPK_IDS].to(device, torch.int64),
        logits=logits,
        log_rest=columns[Kind.LOG_TAIL].to(device, torch.float64) + normaliser,
        status=torch.zeros(len(logits), dtype=torch.uint8, device=device),
        next_ids=following,
        next_logits=next_logits,
        temperatures=payload.temperatures,
        vocab_size=payload.vocabulary_size,
        spans=((part.first_id, part.stop_id),),
    )
