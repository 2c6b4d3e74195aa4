"""Batches of a trainer as rows to be scored, and back: where each position is in its logits.

A trainer's batch is a rectangle with padding on either side or on both (prompts padded on the
left, completions on the right), or rows packed one behind the other. The teacher is sent a row's
tokens alone, and asked for the positions that count: no prompt and no padding is scored for
nothing. No logits are copied: targets are told at which column of the rectangle their rows start.

Refuses a row with a gap in its attention mask: positions count from a row's first token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch

from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits_client.rows.labels import labels_mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits_client.targets import Targets


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchRows:
    """The rows of a batch, and which of their positions count.

    ``rows`` are token ids without padding, on the CPU; ``windows`` int64 [N,2] the first
    position and the count wanted of each; ``columns`` int64 [N] the column of the rectangle in
    which each row's window starts, None where rows are packed and whole; ``mask`` bool, of the
    logits' leading shape, the positions that count, on the batch's own device. A row's last
    position has no next token and is never among them, so the mask's sum is the loss's count.
    """

    rows: list[torch.Tensor]
    windows: torch.Tensor
    columns: torch.Tensor | None
    mask: torch.Tensor

    def place(self, targets: Targets, *, skipped: int = 0) -> Targets:
        """Return targets that know their columns; ``skipped`` are missing on the logits' left."""
        if self.columns is None:
            return targets
        return replace(targets, row_firsts=(self.columns - skipped).to(targets.row_offsets))

    def first_rows(self, count: int) -> BatchRows:
        """Return the same rows, of which only the first ``count`` have positions that count."""
        mask = self.mask.clone()
        mask[count:] = False
        return replace(self, mask=mask)


SEEN_AND_HEARD = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
"""Under these the models of ``transformers`` take images and sounds."""


def check_text_alone(batch: Mapping[str, object]) -> None:
    """Let a batch pass of which the teacher is told everything, by its token ids.

    Raises:
        ConfigError: it has images or sounds.
    """
    found = [name for name in SEEN_AND_HEARD if name in batch]
    if found:
        raise ConfigError(
            f"a batch has {', '.join(found)}, and the teacher is served token ids alone: it would "
            "score rows without what the student sees there",
            facts={"names": ", ".join(found)},
        )


def rows_of(batch: Mapping[str, object]) -> BatchRows:
    """Return the rows of a batch as trainers of ``transformers`` have it.

    ``input_ids`` and ``labels`` [N,S], with ``attention_mask``, or one line of packed rows with
    ``position_ids`` and no mask.

    Raises:
        ConfigError: it has no ``input_ids`` or no ``labels``, or more than the teacher is told.
        PayloadInvalidError: a row has a gap, or shapes disagree.
    """
    check_text_alone(batch)
    ids, labels, tokens, positions = (
        found if isinstance(found := batch.get(name), torch.Tensor) else None
        for name in ("input_ids", "labels", "attention_mask", "position_ids")
    )
    if ids is None or labels is None:
        raise ConfigError(
            f"a batch has {', '.join(batch)}: give it input_ids and labels, [rows, tokens] each, "
            "as DataCollatorForLanguageModeling(tokenizer, mlm=False) does"
        )
    if tokens is None and batch.get("attention_mask") is not None:
        given = type(batch["attention_mask"]).__name__
        raise ConfigError(
            f"attention_mask is a {given}: give a tensor [rows, tokens], 1 at tokens and 0 at "
            "padding, by which the teacher is sent the tokens alone",
            facts={"given": given},
        )
    if tokens is None and positions is not None:
        return packed_rows(ids, positions, labels_mask(labels))
    return padded_rows(ids, tokens, labels_mask(labels))


def tokens_and_labels(batch: Mapping[str, object]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each row's tokens and their labels, without padding, on the CPU.

    Raises:
        ConfigError, PayloadInvalidError: see ``rows_of``.
    """
    rows = rows_of(batch)
    lengths = [len(row) for row in rows.rows]
    labels = cast("torch.Tensor", batch["labels"]).detach().cpu()
    if rows.columns is None:
        own = list(labels[0].split(lengths))
    else:
        starts = (rows.columns - rows.windows[:, 0]).tolist()
        own = [
            row[start : start + length]
            for row, start, length in zip(labels, starts, lengths, strict=True)
        ]
    return list(zip(rows.rows, own, strict=True))


def padded_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, mask: torch.Tensor
) -> BatchRows:
    """Return the rows of a rectangle [N,S] with padding on the left, on the right, or on both.

    ``attention_mask`` [N,S] is 1 at tokens, None where all are; ``mask`` bool [N,S] marks the
    positions that count: position s predicts token s+1.

    Raises:
        PayloadInvalidError: a row has a gap, or shapes disagree.
    """
    shape = tuple(input_ids.shape)
    given = mask.shape if attention_mask is None else attention_mask.shape
    if len(shape) != 2 or tuple(given) != shape or tuple(mask.shape) != shape:
        raise PayloadInvalidError(
            f"input_ids has shape {shape}, its attention mask {tuple(given)} and the mask of "
            f"positions {tuple(mask.shape)}: give three of one shape [rows, tokens]",
            facts={"axes": len(shape)},
        )
    if len(input_ids) and not shape[1]:
        raise PayloadInvalidError(
            f"input_ids has shape {shape}: rows without a token, for which no teacher has a score; "
            "leave them out",
            facts={"rows": shape[0], "width": 0},
        )
    ids = input_ids.detach().cpu()
    tokens = torch.ones_like(ids) if attention_mask is None else attention_mask.detach().cpu()
    starts, ends = _spans(tokens != 0)
    places = torch.arange(shape[1])
    has_next = (places >= starts.unsqueeze(1)) & (places < ends.unsqueeze(1) - 1)
    wanted = mask.detach().cpu() & has_next
    first, last = _spans(wanted, gaps=True)
    windows = torch.stack([(first - starts).clamp_min(0), last - first], 1)
    rows = [ids[row, starts[row] : ends[row]] for row in range(len(ids))]
    columns = starts + windows[:, 0]
    return BatchRows(rows=rows, windows=windows, columns=columns, mask=wanted.to(mask.device))


def packed_rows(
    input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor
) -> BatchRows:
    """Return the rows of one line [1,P] in which each starts where ``position_ids`` is 0.

    ``mask`` bool [1,P] marks the positions that count. The logits of such a line are taken as
    [P,V], whole rows one behind the other.

    Raises:
        PayloadInvalidError: there is more than one line, or the first row starts elsewhere than
            at its first token.
    """
    if input_ids.dim() != 2 or len(input_ids) != 1 or input_ids.shape != position_ids.shape:
        raise PayloadInvalidError(
            f"packed input_ids have shape {tuple(input_ids.shape)} and position_ids "
            f"{tuple(position_ids.shape)}: rows that are packed are one line [1, tokens]; rows "
            "that are padded need their attention_mask",
            facts={"lines": len(input_ids)},
        )
    ids = input_ids[0].detach().cpu()
    starts = (position_ids[0].detach().cpu() == 0).nonzero().flatten()
    if len(ids) and (not len(starts) or int(starts[0])):
        first = int(position_ids[0, 0])
        raise PayloadInvalidError(
            f"packed position_ids start at {first}: each row starts at 0, the first of them at the "
            "line's first token, since the teacher is sent whole rows; rows of one line each, "
            "without an attention_mask, need no position_ids",
            facts={"first": first},
        )
    bounds = [*starts.tolist(), len(ids)]
    rows = [ids[start:end] for start, end in pairwise(bounds)]
    lengths = torch.tensor([len(row) for row in rows])
    windows = torch.stack([torch.zeros_like(lengths), lengths], 1)
    has_next = torch.ones_like(mask[0])
    has_next[lengths.cumsum(0).to(mask.device) - 1] = False
    return BatchRows(rows=rows, windows=windows, columns=None, mask=mask[0] & has_next)


def _spans(mask: torch.Tensor, *, gaps: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first column of each row that is True, and that behind the last; 0, 0 for none."""
    places = torch.arange(mask.shape[1]).expand(mask.shape)
    first = places.masked_fill(~mask, mask.shape[1]).amin(1)
    end = places.masked_fill(~mask, -1).amax(1) + 1
    first = torch.where(end > 0, first, 0)
    with_gap = ((end - first) != mask.sum(1)).nonzero().flatten()
    if len(with_gap) and not gaps:
        row = int(with_gap[0])
        raise PayloadInvalidError(
            f"row {row} of attention_mask has a gap: {int(mask[row].sum())} tokens between columns "
            f"{int(first[row])} and {int(end[row])}; positions count from a row's first token, so "
            "let its tokens stand together, padding on the left, the right, or both",
            facts={"row": row, "tokens": int(mask[row].sum())},
        )
    return first, end
