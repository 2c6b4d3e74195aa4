"""Batches in verl's own keys: targets into them for its losses, and out of them for ours.

    teacher_ids int32, teacher_logprobs fp32    nested [N,j,K]: one row a token, without padding,
                                                or [N,S,K] with it
    response_mask                               nested [N,j'] or [N,R]: the response's tokens

A row holds what is said of the token behind it, so it stands at the logits' own index; the last
of a sequence is zeros and never counts. The values are true log-probabilities. What lies outside
the K ids is not in verl's keys: ``to_targets`` takes what the K leave of one, which is as exact as
that difference, unless ``teacher_log_tail`` is beside them, which ``to_batch`` gives on request.
The older ``teacher_topk_logps`` and ``teacher_topk_indices`` are read as well.

Imports no verl; a ``TensorDict``, as in ``DataProto.batch``, is read like a mapping.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets
from teacher_logits_client.trainers.key_checks import (
    FLOATS,
    NUMBERS,
    WHOLE,
    check_array,
    lengths_of,
    rows_of_key,
)
from teacher_logits_client.trainers.rectangles import rectangle_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["position_mask", "to_batch", "to_targets"]

IDS = "teacher_ids"
LOGPROBS = "teacher_logprobs"
TAIL = "teacher_log_tail"


def to_batch(
    targets: Targets, lengths: torch.Tensor, *, with_tail: bool = False
) -> dict[str, torch.Tensor]:
    """Return ``teacher_ids`` and ``teacher_logprobs``, nested [N,j,K], j the row's ``lengths``.

    Raises:
        PayloadInvalidError: ``lengths`` are none, or a row has more positions than tokens; or see
            ``rectangles.rectangle_of``.
        LeaseLostError: see there.
    """
    sizes = lengths_of(lengths, rows=len(targets.row_offsets) - 1)
    if not sizes:
        raise PayloadInvalidError("the targets have no rows, of which nested tensors are made")
    rectangle = rectangle_of(targets, width=max(sizes))
    _check_room(targets, sizes)
    last = (torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64) - 1)  # a dummy
    made = {
        IDS: rectangle.ids.int(),
        LOGPROBS: rectangle.logprobs.float(),
        TAIL: rectangle.log_tail.float(),
    }
    for each in made.values():
        each[last] = 0
    if not with_tail:
        del made[TAIL]
    return {name: _nested(each, sizes) for name, each in made.items()}


def to_targets(
    batch: Mapping[str, object], *, attention_mask: torch.Tensor | None = None
) -> Targets:
    """Return the targets of a batch, flat: for our losses over logits [P,V] without padding.

    P counts the tokens of all rows. Of padded keys [N,S,K], ``attention_mask`` [N,S] says where
    the tokens are. Each row's last position is not valid; mask the rest by ``position_mask``.

    Raises:
        PayloadInvalidError: a key is missing, shapes disagree, or padding has no mask.
    """
    ids, lengths = _flat(tensor_of(batch, IDS, "teacher_topk_indices"), attention_mask)
    values, same = _flat(tensor_of(batch, LOGPROBS, "teacher_topk_logps"), attention_mask)
    if ids.shape != values.shape or lengths.tolist() != same.tolist():
        raise PayloadInvalidError(
            f"the batch has {tuple(ids.shape)} ids and {tuple(values.shape)} log-probabilities, of "
            f"{len(lengths)} and {len(same)} rows: every value has its id",
            facts={"ids": str(tuple(ids.shape)), "values": str(tuple(values.shape))},
        )
    check_array(IDS, ids, kind=WHOLE, shape=(len(ids), None))
    check_array(LOGPROBS, values, kind=FLOATS, shape=tuple(ids.shape))
    ids = ids.to(values.device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    valid = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    valid[offsets[1:] - 1] = False
    values = values.float()
    if TAIL in batch:
        tail, _ = _flat(tensor_of(batch, TAIL), attention_mask)
        check_array(TAIL, tail, kind=FLOATS, shape=(len(ids),))
        tail = tail.to(values)
    else:
        tail = torch.log1p(-values.double().exp().sum(1).clamp_max(1.0)).float()
    targets = Targets(
        topk_ids=ids.int(),
        topk_logprobs=values,
        log_tail=tail.clamp_min(ABSENT_LOGPROB),
        actual_logprob=None,
        valid=valid,
        temperature=1.0,
        row_offsets=offsets.to(ids.device),
    )
    return _without_dummies(targets)


def position_mask(batch: Mapping[str, object], lengths: torch.Tensor) -> torch.Tensor:
    """Return which positions count, [P], flat over rows of ``lengths`` tokens.

    A row's response is its end: its j-th token from the back is predicted at the position in
    front of it, and counts as ``response_mask`` says.

    Raises:
        PayloadInvalidError: there is no ``response_mask``, or it is longer than its row.
    """
    mask = tensor_of(batch, "response_mask")
    rows = rows_of_key("response_mask", mask, axes=1)
    made = []
    for row, (own, length) in enumerate(
        zip(rows, lengths_of(lengths, rows=len(rows)), strict=True)
    ):
        kept = own if mask.is_nested else own[: int(_response_length(batch, row, own))]
        if len(kept) >= length:
            raise PayloadInvalidError(
                f"row {row} has a response of {len(kept)} tokens and {length} in all: a response "
                "follows a prompt, which predicts its first token",
                facts={"row": row, "response": len(kept), "length": length},
            )
        flat = kept.new_zeros(length)
        flat[length - len(kept) - 1 : length - 1] = kept
        made.append(flat)
    return torch.cat(made)


def _check_room(targets: Targets, sizes: list[int]) -> None:
    """Let rows pass that have a token for each of their positions: nothing is cut."""
    firsts = targets.row_firsts
    ends = targets.row_offsets.diff() if firsts is None else targets.row_offsets.diff() + firsts
    for row, (end, size) in enumerate(zip(ends.tolist(), sizes, strict=True)):
        if end > size:
            raise PayloadInvalidError(
                f"row {row} has positions up to {end} and a length of {size}: give the lengths of "
                "the rows that were scored",
                facts={"row": row, "positions": end, "length": size},
            )


def _response_length(batch: Mapping[str, object], row: int, own: torch.Tensor) -> int:
    """Return the tokens of a padded response, by its part of the attention mask."""
    attention = tensor_of(batch, "attention_mask")
    check_array("attention_mask", attention, kind=NUMBERS, shape=(None, None))
    if row >= len(attention):
        raise PayloadInvalidError(
            f"attention_mask has {len(attention)} rows, and response_mask more",
            facts={"rows": len(attention)},
        )
    return int(attention[row, -len(own) :].sum())


def _flat(
    values: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a key's rows one behind the other, and how long each is."""
    if values.is_nested:
        rows = values.unbind()
        return torch.cat(list(rows)), torch.tensor([len(row) for row in rows])
    if attention_mask is not None:
        check_array("attention_mask", attention_mask, kind=NUMBERS, shape=(None, None))
    if attention_mask is None or tuple(attention_mask.shape) != tuple(values.shape[:2]):
        given = None if attention_mask is None else tuple(attention_mask.shape)
        raise PayloadInvalidError(
            f"a key of shape {tuple(values.shape)} has padding, and the attention mask {given}: "
            "give attention_mask, [rows, tokens], which says where the tokens are",
            facts={"shape": str(tuple(values.shape)), "mask": str(given)},
        )
    check_array("what has padding", values, kind=NUMBERS, shape=(None,) * values.dim())
    tokens = attention_mask.to(values.device) != 0
    return values[tokens], tokens.sum(1).cpu()


def _without_dummies(targets: Targets) -> Targets:
    """Take the zeros of last rows for what they are: no entry, and nothing known."""
    gone = ~targets.valid
    return replace(
        targets,
        topk_ids=targets.topk_ids.masked_fill(gone.unsqueeze(1), -1),
        topk_logprobs=targets.topk_logprobs.masked_fill(gone.unsqueeze(1), ABSENT_LOGPROB),
        log_tail=targets.log_tail.masked_fill(gone, 0.0),
    )


def _nested(padded: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    rows = [row[:size] for row, size in zip(padded, sizes, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
