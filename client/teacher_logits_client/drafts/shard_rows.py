"""Rows of a shard: which positions of its rows a context-parallel rank writes.

    row, padded to 8      0 1 2 3 4 5 6 7        6 tokens, so that 6 and 7 are padding
    rank 0 of 2, zigzag   0 1         6 7        spans 0..1 and 6..7; runs 0..1 and none
    its own array         0 1 6 7                [N, 4, ...], spans one behind the other

A rectangle of ids is cut at its width, rows that come as a list each at its own length, padded to
the next one that can be cut. What a rank hands in has its spans, of which the runs are written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.shard_parts import ShardedBy, part_of, runs_of_part
from teacher_logits_client.drafts.held_rows import HeldRows
from teacher_logits_client.drafts.rows import own_rows
from teacher_logits_client.rows.valid_counts import valid_count

if TYPE_CHECKING:
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.shard_parts import ShardPart
    from teacher_logits_client.drafts.rows import DraftRows, Given
    from teacher_logits_client.rows.valid_counts import LossMask


def hold_part(profile: TeacherProfile, rows: DraftRows, given: Given) -> DraftRows:
    """Return what a publisher writes of rows that the ranks of its teacher divide.

    ``rows`` are whole, and made of what was ``given``.

    Raises:
        PayloadInvalidError: rows that cannot be cut, or of which only lengths are known; or a
            mask of counts, which cannot be divided.
    """
    part = part_of(profile)
    if part is None or part.sequence_parts == 1:
        return rows
    if rows.next_ids is None:
        raise PayloadInvalidError(
            "the ranks of this teacher divide its rows' positions, and only lengths are given: "
            "give input_ids, by whose digests students see that all shards are of the same rows"
        )
    is_rectangle = len(getattr(given.input_ids, "shape", ())) == 2
    held = _held(profile.sharded_by, part, rows, is_rectangle=is_rectangle)
    mask = own_rows(given.loss_mask, rows.rows, rows.padded_count, what="loss_mask")
    counts = held.runs[:, :, 1].sum(1)
    first = torch.where(
        held.runs[:, :, 1] > 0, held.runs[:, :, 0], torch.iinfo(torch.int64).max
    ).amin(1)
    windows = torch.stack([first.masked_fill(counts == 0, 0), counts], 1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    starts = rows.offsets[:-1] - rows.windows[:, 0]
    following = rows.next_ids[held.places + starts.repeat_interleave(counts)]
    return replace(
        rows,
        windows=windows,
        offsets=offsets,
        next_ids=following,
        valid_count=None if mask is None else _count(mask, rows, held),
        held=held,
        has_whole_rows=rows.are_whole,
    )


def _held(
    sharded_by: tuple[ShardedBy, ...], part: ShardPart, rows: DraftRows, *, is_rectangle: bool
) -> HeldRows:
    lengths: list[int] = rows.lengths.tolist()
    parts = part.sequence_parts * (2 if ShardedBy.ZIGZAG in sharded_by else 1)
    widths = [rows.width if is_rectangle else -(-length // parts) * parts for length in lengths]
    cuts = {
        width: [
            [span.start, len(span)]
            for span in runs_of_part(
                width, part=part.sequence_part, parts=part.sequence_parts, sharded_by=sharded_by
            )
        ]
        for width in set(widths)
    }
    spans = torch.tensor([cuts[width] for width in widths], dtype=torch.int64)
    first = rows.windows[:, :1]
    starts = torch.maximum(spans[:, :, 0], first)
    stops = torch.minimum(spans.sum(2), first + rows.windows[:, 1:])
    counts = (stops - starts).clamp_min(0)
    runs = torch.stack([torch.where(counts > 0, starts, spans[:, :, 0]), counts], 2)
    flat = runs.view(-1, 2)
    before = flat[:, 1].cumsum(0) - flat[:, 1]
    places = (flat[:, 0] - before).repeat_interleave(flat[:, 1]) + torch.arange(int(counts.sum()))
    return HeldRows(spans=spans, runs=runs, places=places)


def _count(mask: LossMask, rows: DraftRows, held: HeldRows) -> int:
    """Return how many of the positions that are held count."""
    axes = getattr(mask, "ndim", None)
    if axes == 1 or (axes is None and all(isinstance(each, int) for each in mask)):
        raise PayloadInvalidError(
            "loss_mask has a number for each row, and the ranks of this teacher divide a row's "
            "positions: give the marks [rows, positions], or marks of each row"
        )
    return sum(valid_count(mask, rows.lengths, runs, rows.width) for runs in held.runs.unbind(1))
