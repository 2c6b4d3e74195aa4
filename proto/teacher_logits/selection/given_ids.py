"""Given ids: what a teacher says of ids that somebody else chose, and of all the others together.

    logits [P,V], ids [P,M]  ->  log-probabilities [P,M]; log_tail, logsumexp [P,T]

The tail is summed over the complement of exactly these ids, which makes a reverse KL on a
student's own best ids exact (docs/math.md, "Chosen ids"). The order of the ids is kept, and -1
stands for no id: its log-probability is -inf. An id that is named again has its log-probability
again, and its mass is counted once; a loss over such entries would count it twice, and so a request
of them is refused (``check_ids``).

Refuses ids outside the vocabulary. A position with NaN, +inf or nothing finite is told by its
status, its numbers 0.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import RowStatus
from teacher_logits.selection.checks import (
    INTEGERS,
    check_logits,
    check_next_ids,
    check_settings,
    check_tensor,
)
from teacher_logits.selection.complement import complement_sums, rows_at_once
from teacher_logits.selection.ranking import status_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenScores:
    """What is said of the ids of P positions, M each, at T temperatures of which the first is 1.

    ``logprobs`` fp32 [P,M] in the order of the ids, -inf where there is none; ``log_tail`` and
    ``logsumexp`` fp32 [P,T]; ``actual_logprob`` fp32 [P], or None; ``status`` uint8 [P].
    """

    logprobs: torch.Tensor
    log_tail: torch.Tensor
    logsumexp: torch.Tensor
    actual_logprob: torch.Tensor | None
    status: torch.Tensor


def check_ids(
    ids: torch.Tensor,
    vocab_size: int,
    *,
    starts: Sequence[int] = (0,),
    firsts: Sequence[int] = (0,),
) -> None:
    """Let ids [P,M] pass that each position names once, -1 for none.

    ``starts`` says where each row's positions start among the P, and ``firsts`` which position of
    its row that is: a message names both.

    Raises:
        PayloadInvalidError: naming the first position, its id and the rule.
    """
    _check_range(ids, vocab_size, starts, firsts)
    ordered = ids.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
    if len(twice):
        at, place = twice[0].tolist()
        token_id, (row, position) = int(ordered[at, place]), _place(at, starts, firsts)
        raise PayloadInvalidError(
            f"row {row}, position {position}: id {token_id} is given twice ({len(twice)} repeats "
            "in all), and a loss would count its mass twice; give each id once a position, and -1 "
            "in its stead",
            facts={
                "row": row,
                "position": position,
                "token_id": token_id,
                "repeats": len(twice),
            },
        )


def _check_range(
    ids: torch.Tensor, vocab_size: int, starts: Sequence[int], firsts: Sequence[int]
) -> None:
    outside = ((ids < -1) | (ids >= vocab_size)).nonzero()
    if len(outside):
        at, place = outside[0].tolist()
        token_id, (row, position) = int(ids[at, place]), _place(at, starts, firsts)
        raise PayloadInvalidError(
            f"row {row}, position {position}: id {token_id} is outside the vocabulary of "
            f"{vocab_size} ({len(outside)} such ids); give ids from 0 to {vocab_size - 1}, or -1 "
            "where a position wants fewer",
            facts={
                "row": row,
                "position": position,
                "token_id": token_id,
                "vocab_size": vocab_size,
                "wrong_ids": len(outside),
            },
        )


def _place(at: int, starts: Sequence[int], firsts: Sequence[int]) -> tuple[int, int]:
    """Return the row and the position in it; rows without positions are stepped over."""
    row = bisect_right(starts, at, hi=len(firsts)) - 1
    return row, at - starts[row] + firsts[row]


def score_given(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperatures: Sequence[float] = (1.0,),
    vocab_size: int | None = None,
    next_ids: torch.Tensor | None = None,
) -> GivenScores:
    """Score ``ids`` [P,M] of the positions of ``logits`` [P,V]; the rest as ``select_top_k``.

    Raises:
        PayloadInvalidError: shapes, settings or ids that make no sense.
    """
    width = check_logits(logits, vocab_size)
    check_tensor(ids, "ids")
    positions, is_pair = len(logits), logits.dim() == 2 and ids.dim() == 2
    if not is_pair or len(ids) != positions or ids.dtype not in INTEGERS:
        raise PayloadInvalidError(
            f"ids are {str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)} and "
            f"logits have {tuple(logits.shape)}: give integers [positions, entries] and logits "
            "[positions, vocabulary]",
            facts={"ids": str(tuple(ids.shape)), "positions": positions},
        )
    check_settings(max(1, ids.shape[1]), temperatures)
    ids = ids.to(logits.device, torch.int64)
    _check_range(ids, width, (0,), (0,))
    following = None if next_ids is None else check_next_ids(next_ids, logits, width)
    found = _empty(logits, ids, len(temperatures), following is not None)
    step = rows_at_once(width, logits.device)
    with torch.no_grad():
        for start in range(0, positions, step):
            at = slice(start, min(start + step, positions))
            next_here = None if following is None else following[at]
            _score(logits[at, :width], ids[at], temperatures, next_here, _part(found, at))
    return found


def _score(
    rows: torch.Tensor,
    ids: torch.Tensor,
    temperatures: Sequence[float],
    following: torch.Tensor | None,
    out: GivenScores,
) -> None:
    """Score some rows [R,V] and write the result. Small sums are fp64, those over V fp32."""
    status = status_of(rows.amax(1))
    bad = (status != RowStatus.OK).unsqueeze(1)
    top, sums = complement_sums(rows, ids, temperatures=temperatures)
    scale = torch.tensor(list(temperatures), dtype=torch.float64, device=rows.device)
    values = rows.gather(1, ids.clamp_min(0)).double().masked_fill(ids < 0, -torch.inf)
    rest = top.double() / scale + sums.double().log()
    once = values.masked_fill(_is_repeat(ids), -torch.inf)
    head = (once.unsqueeze(2) / scale).logsumexp(1)
    whole = torch.logaddexp(head, rest)
    out.status.copy_(status)
    out.logprobs.copy_((values - whole[:, :1]).masked_fill(bad, 0.0))
    out.log_tail.copy_((rest - whole).masked_fill(bad, 0.0))
    out.logsumexp.copy_(whole.masked_fill(bad, 0.0))
    if following is not None and out.actual_logprob is not None:
        actual = rows.gather(1, following.clamp_min(0).unsqueeze(1)).double() - whole[:, :1]
        unknown = bad.squeeze(1) | (following < 0)
        out.actual_logprob.copy_(actual.squeeze(1).masked_fill(unknown, 0.0))


def _is_repeat(ids: torch.Tensor) -> torch.Tensor:
    """Return bool [R,M]: the ids that stand at their position before."""
    ordered, order = ids.sort(dim=1, stable=True)
    repeats = torch.zeros_like(ids, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(repeats).scatter_(1, order, repeats)


def _empty(
    logits: torch.Tensor, ids: torch.Tensor, temperatures: int, with_actual: bool
) -> GivenScores:
    count, device = len(logits), logits.device
    beside = torch.empty(count, temperatures, dtype=torch.float32, device=device)
    return GivenScores(
        logprobs=torch.empty(ids.shape, dtype=torch.float32, device=device),
        log_tail=beside,
        logsumexp=torch.empty_like(beside),
        actual_logprob=beside.new_empty(count) if with_actual else None,
        status=torch.empty(count, dtype=torch.uint8, device=device),
    )


def _part(scores: GivenScores, at: slice) -> GivenScores:
    actual = scores.actual_logprob
    return GivenScores(
        logprobs=scores.logprobs[at],
        log_tail=scores.log_tail[at],
        logsumexp=scores.logsumexp[at],
        actual_logprob=None if actual is None else actual[at],
        status=scores.status[at],
    )
