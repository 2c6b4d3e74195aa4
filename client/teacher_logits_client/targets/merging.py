"""Merging targets: parts of a batch, each from another teacher, as one in the batch's own order.

Promises: rows stand where they stood in the batch, and every position says what its own part said.
Where parts have different K, what one lacks is absent there, as it is where fewer than K entries
exist. Everything is a copy, on the device of the first part.

Refuses parts at different temperatures, and a sample beside entries that are none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Targets of some rows; ``rows`` are their places in the batch, one for each of its rows."""

    targets: Targets
    rows: Sequence[int]


def merge_targets(parts: Sequence[Part]) -> Targets:
    """Return the targets of a whole batch [P,K], K the largest of the parts'.

    Args:
        parts: whose ``rows`` together are 0 to N - 1, each once.

    Raises:
        PayloadInvalidError: they cannot stand in one.
    """
    first = parts[0].targets
    _check_alike(parts)
    places = torch.tensor([row for part in parts for row in part.rows])
    order = torch.empty_like(places)
    order[places] = torch.arange(len(places))
    counts = torch.cat([part.targets.row_offsets.diff().cpu() for part in parts])
    starts = (counts.cumsum(0) - counts)[order]
    counts = counts[order]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    within = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], counts)
    taken = torch.repeat_interleave(starts, counts) + within
    device, k = first.topk_ids.device, max(part.targets.topk_ids.shape[1] for part in parts)

    def every(of: Callable[[Targets], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        return torch.cat([of(part.targets).to(device) for part in parts])[at.to(device)]

    has_firsts = any(part.targets.row_firsts is not None for part in parts)
    has_actual = all(part.targets.actual_logprob is not None for part in parts)
    return Targets(
        topk_ids=every(lambda each: _wide(each.topk_ids, k, -1), taken),
        topk_logprobs=every(lambda each: _wide(each.topk_logprobs, k, ABSENT_LOGPROB), taken),
        log_tail=every(lambda each: each.log_tail, taken),
        actual_logprob=every(_actual, taken) if has_actual else None,
        valid=every(lambda each: each.valid, taken),
        temperature=first.temperature,
        row_offsets=offsets.to(device),
        row_firsts=every(_firsts, order) if has_firsts else None,
        sampled=first.sampled,
        entropy=every(_entropy, taken) if first.sampled else None,
    )


def nothing_known(windows: torch.Tensor, like: Targets) -> Targets:
    """Return targets of rows of which nobody says anything: no entry, none to be learned from.

    They are as those of a row that a teacher could not score.

    Args:
        windows: int64 [N,2], the first position and the count that was wanted of each row.
        like: what they are to stand beside.
    """
    device = like.topk_ids.device
    counts = windows[:, 1]
    size = int(counts.sum())
    numbers = torch.zeros(size, device=device)
    return replace(
        like,
        topk_ids=torch.full((size, 1), -1, dtype=torch.int32, device=device),
        topk_logprobs=torch.full((size, 1), ABSENT_LOGPROB, device=device),
        log_tail=numbers,
        actual_logprob=numbers,
        valid=torch.zeros(size, dtype=torch.bool, device=device),
        row_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(device),
        row_firsts=windows[:, 0].to(device),
        entropy=numbers if like.sampled else None,
    )


def _check_alike(parts: Sequence[Part]) -> None:
    kinds = {(part.targets.temperature, part.targets.sampled) for part in parts}
    if len(kinds) > 1:
        said = "; ".join(f"temperature {t:g}{', sampled' * s}" for t, s in sorted(kinds))
        raise PayloadInvalidError(
            f"targets of several kinds cannot stand in one batch ({said}): open the sessions with "
            "one selection, or take each teacher's own targets",
            facts={"kinds": said},
        )


def _wide(entries: torch.Tensor, k: int, absent: float) -> torch.Tensor:
    return torch.nn.functional.pad(entries, (0, k - entries.shape[1]), value=absent)


def _firsts(targets: Targets) -> torch.Tensor:
    firsts = targets.row_firsts
    return torch.zeros_like(targets.row_offsets[1:]) if firsts is None else firsts


def _actual(targets: Targets) -> torch.Tensor:
    return _there(targets.actual_logprob)


def _entropy(targets: Targets) -> torch.Tensor:
    return _there(targets.entropy)


def _there(values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        raise ValueError("a part lacks what the others have")
    return values
