"""Valid positions: which of a payload may be learnt from, and what they may not hold.

A position counts as scored where its row's status is OK, and as valid where something comes next
there as well. What is scored must be numbers, and what came from a teacher be what it selects:
ids of its vocabulary, each once, best first, that sum to one with the mass outside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind, RowStatus
from teacher_logits.selection.invariants import rules_of_targets

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


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What is known of entries as they came from a teacher, by which they are checked.

    ``bound`` is what the codec that they came in may have moved them by; None where they did not
    come so, and may be anything. ``vocab_size`` is None where it is not known. ``temperatures`` are
    those that are used, by the column of each. ``are_best``: they are the K best, and neither a
    sample nor a client's choice.
    """

    bound: ErrorBound | None
    vocab_size: int | None
    temperatures: Mapping[int, float]
    are_best: bool


def refuse_faults(
    columns: Mapping[ColumnKind, torch.Tensor],
    scored: torch.Tensor,
    *,
    logprobs: torch.Tensor,
    log_tail: torch.Tensor,
    origin: Origin,
) -> None:
    """Let scored positions pass that hold numbers and, by their ``origin``, what a teacher gives.

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
    if origin.bound is None:
        return
    for run, rule, faulty in rules_of_targets(
        columns,
        vocab_size=origin.vocab_size,
        temperatures=origin.temperatures,
        bound=origin.bound,
        are_best=origin.are_best,
    ):
        _refuse(scored[run] & faulty, f"has {rule}", first=run.start, positions=len(scored))


def _check_absent(ids: torch.Tensor, scored: torch.Tensor, logprobs: torch.Tensor) -> None:
    """Refuse ids that are neither one of a vocabulary nor absent, and mass without an id."""
    if not ids.numel() or int(ids.amin()) >= 0:
        return
    _refuse(scored & (ids < -1).any(1), "holds an id below -1, and -1 is what is absent")
    lost = ((ids < 0) & (logprobs > -math.inf)).any(1)
    _refuse(scored & lost, "has a log-probability without an id, whose mass would be lost")


def _refuse(
    faulty: torch.Tensor, what: str, *, first: int = 0, positions: int | None = None
) -> None:
    """Refuse marked positions; ``first`` is where they begin among ``positions``."""
    places = faulty.nonzero()
    if len(places):
        place = first + int(places[0])
        raise PayloadInvalidError(
            f"position {place} of {len(faulty) if positions is None else positions} {what} "
            f"({len(places)} such positions); the payload is damaged or its teacher is at fault",
            facts={"position": place, "faulty_positions": len(places)},
        )
