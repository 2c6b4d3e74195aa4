"""Merging across ranks: the shards of a tensor-parallel head become one selection, on every rank.

    rank r   logits of its ids -> select_partial -> K ids, K logits, the rest's sum
             all-gather of 8K + 8T + 1 bytes a position and rank (4 more with next ids), then the
             merge, on every rank

Of a vocabulary of 151,936 in bf16 that is 521 bytes a position and rank at K = 64, where the
logits are 303,872 (docs/math.md, "Merging").

Promises: two all-gathers, the first of a few numbers by which ranks that disagree all refuse,
and none goes on into a collective that the others left. Shards may be uneven, of padding alone
or narrower than K; every rank has the same answer, whatever the ranks' order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.payload import MAX_TEMPERATURES
from teacher_logits.selection.partial_selection import PartialSelection, merge_partials

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES = ("positions", "k", "vocab_size", "next_ids", "sum_of_next_ids", "temperatures")
"""What a header says after its span, temperatures last; alike on all ranks."""
_MIXER, _MOST_WEIGHT, _MOST_SUM = 0x9E3779B1, (1 << 31) - 1, 1 << 52
"""Each position's weight in the sum of next ids: a multiple of the first, below the second."""


def merge_over_ranks(
    part: PartialSelection, *, group: dist.ProcessGroup | None = None
) -> PartialSelection:
    """Return the merged selection of all ranks of ``group``; a collective, for all to call.

    ``part`` is this rank's: what ``select_partial`` made of its shard. Tensors stay on its
    device, which is one that the group's backend moves.

    Raises:
        PayloadInvalidError: on every rank alike: ranks disagree about positions, K, temperatures,
            next ids or the vocabulary, a rank's ids are no single run, or two ranks hold an id.
    """
    count = dist.get_world_size(group)
    headers = _gather(_header(part), count, group)
    spans = _agreed([header.tolist() for header in headers])
    bodies = _gather(_pack(part), count, group)
    return merge_partials(
        _unpack(body, part, span) for body, span in zip(bodies, spans, strict=True)
    )


def _gather(
    own: torch.Tensor, count: int, group: dist.ProcessGroup | None
) -> Sequence[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(count)]
    dist.all_gather(found, own, group=group)
    return found


def _header(part: PartialSelection) -> torch.Tensor:
    # A span that is none: refused by all ranks, where an error of one would leave the others.
    start, stop = part.spans[0] if len(part.spans) == 1 else (0, -len(part.spans))
    temperatures = [*part.temperatures, *[0.0] * MAX_TEMPERATURES][:MAX_TEMPERATURES]
    following = (part.next_ids is not None, _sum(part.next_ids))
    numbers = [*part.ids.shape, part.vocab_size, *following, *temperatures]
    values = [float(each) for each in (start, stop, *numbers)]
    return torch.tensor(values, dtype=torch.float64, device=part.ids.device)


def _sum(next_ids: torch.Tensor | None) -> int:
    """Return what other next ids, or these at other positions, hardly sum to; exact in fp64."""
    if next_ids is None:
        return 0
    places = torch.arange(1, len(next_ids) + 1, device=next_ids.device)
    return int(((next_ids + 1) * (places * _MIXER % _MOST_WEIGHT)).sum()) % _MOST_SUM


def _agreed(headers: Sequence[Sequence[float]]) -> list[tuple[tuple[int, int], ...]]:
    """Return each rank's span, if the ranks can be merged."""
    for rank, header in enumerate(headers):
        for place, (own, first) in enumerate(zip(header[2:], headers[0][2:], strict=True)):
            if own != first:
                name = _NAMES[min(place, len(_NAMES) - 1)]
                raise PayloadInvalidError(
                    f"rank {rank} of the group has {name} {own:.16g} and rank 0 {first:.16g}: all "
                    "ranks select from the same positions, by the same settings",
                    facts={"rank": rank, "what": name, "own": own, "first": first},
                )
        if header[1] < -1:
            raise PayloadInvalidError(
                f"rank {rank} of the group holds {int(-header[1])} runs of ids: merge over ranks "
                "what is one run of ids on each",
                facts={"rank": rank, "runs": int(-header[1])},
            )
    return [((int(start), int(stop)),) if stop > start else () for start, stop, *_ in headers]


def _pack(part: PartialSelection) -> torch.Tensor:
    """Return all that travels as bytes, the widest numbers first, so that each lies aligned."""
    numbers = [part.log_rest, part.ids.int(), part.logits]
    if part.next_logits is not None:
        numbers.append(part.next_logits)
    numbers.append(part.status)
    return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in numbers])


def _unpack(
    body: torch.Tensor, like: PartialSelection, span: tuple[tuple[int, int], ...]
) -> PartialSelection:
    start = 0

    def take(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        nonlocal start
        size = shape.numel() * torch.empty(0, dtype=dtype).element_size()
        part = body[start : start + size].view(dtype).view(shape)
        start += size
        return part

    log_rest = take(like.log_rest.shape, torch.float64)
    ids = take(like.ids.shape, torch.int32).long()
    logits = take(like.logits.shape, torch.float32)
    following = like.next_logits
    if following is not None:
        following = take(following.shape, torch.float32)
    status = take(like.status.shape, torch.uint8)
    return replace(
        like,
        ids=ids,
        logits=logits,
        log_rest=log_rest,
        next_logits=following,
        status=status,
        spans=span,
    )
