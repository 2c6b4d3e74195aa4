"""Valid positions: which of a payload may be learnt from, and what they may not hold.

A position counts as scored where its row's status is OK, and as valid where something comes next
there as well. What is scored must be numbers, and sum to one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind, RowStatus
from teacher_logits.selection.invariants import is_off

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.error_bounds import ErrorBound


def firsts_of(
    columns: Mapping[ColumnKind, torch.Tensor], offsets: torch.Tensor
) -> torch.Tensor | None:
    """Return each row's first position [N], a copy: a view of the payload would keep its room."""
    windows = columns.get(ColumnKind.ROW_WINDOWS)
    return None if windows is None else windows[:, 0].to(offsets, copy=True)


def valid_and_scored(
    columns: Mapping[ColumnKind, torch.Tensor],
    offsets: torch.Tensor,
    firsts: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which positions are to be learnt from, and which the teacher scored, bool [P].

    Raises:
        PayloadInvalidError: rows have more or fewer positions than the entries, or no number.
    """
    counts = offsets.diff()
    positions = len(columns[ColumnKind.TOPK_IDS])
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    if not len(offsets) or first or bool((counts < 0).any()):
        raise PayloadInvalidError(
            f"row_offsets run from {first} to {last} over {len(counts)} rows: they start at 0, "
            f"never fall, and end at the number of positions, {positions}",
            facts={"first": first, "last": last, "positions": positions},
        )
    if last != positions:
        raise PayloadInvalidError(
            f"row_offsets speak of {last} positions and topk_ids has {positions}",
            facts={"row_offsets_positions": last, "positions": positions},
        )
    status = columns.get(ColumnKind.ROW_STATUS)
    rows_ok = (
        torch.ones_like(counts, dtype=torch.bool) if status is None else status == RowStatus.OK
    )
    scored = rows_ok.to(offsets.device).repeat_interleave(counts)
    if lengths is None:
        return scored, scored
    ends = counts if firsts is None else firsts + counts
    ends_here = (ends == lengths.to(counts)) & (counts > 0)
    has_next = torch.ones_like(scored)
    has_next[offsets[1:][ends_here] - 1] = False
    return scored & has_next, scored


def refuse_faults(
    columns: Mapping[ColumnKind, torch.Tensor],
    scored: torch.Tensor,
    *,
    logprobs: torch.Tensor,
    log_tail: torch.Tensor,
    bound: ErrorBound | None,
) -> None:
    """Let scored positions pass that hold numbers and, with ``bound``, sum to one.

    ``logprobs`` [P,K] and ``log_tail`` [P] are those at the temperature that is wanted.

    Raises:
        PayloadInvalidError: naming the first position that does not.
    """
    actual = columns.get(ColumnKind.ACTUAL_LOGPROB)
    largest = torch.maximum(logprobs.amax(1), log_tail)  # NaN where any of them is
    if actual is not None:
        largest = torch.maximum(largest, actual.float())
    _refuse(scored & ~(largest < math.inf), "holds a NaN or +inf although its row's status is OK")
    _check_absent(columns[ColumnKind.TOPK_IDS], scored, logprobs)
    if bound is not None:
        off = is_off(columns, bound=bound)
        _refuse(scored & off, "has entries and a tail that do not sum to one")


def _check_absent(ids: torch.Tensor, scored: torch.Tensor, logprobs: torch.Tensor) -> None:
    """Refuse ids that are neither one of a vocabulary nor absent, and mass without an id."""
    if not ids.numel() or int(ids.amin()) >= 0:
        return
    _refuse(scored & (ids < -1).any(1), "holds an id below -1, and -1 is what is absent")
    lost = ((ids < 0) & (logprobs > -math.inf)).any(1)
    _refuse(scored & lost, "has a log-probability without an id, whose mass would be lost")


def _refuse(faulty: torch.Tensor, what: str) -> None:
    places = faulty.nonzero()
    if len(places):
        raise PayloadInvalidError(
            f"position {int(places[0])} of {len(faulty)} {what} ({len(places)} such positions); "
            "the payload is damaged or its teacher is at fault",
            facts={"position": int(places[0]), "faulty_positions": len(places)},
        )
