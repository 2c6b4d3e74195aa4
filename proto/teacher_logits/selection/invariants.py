"""Invariants: what a receiver checks of a payload's values before anybody trains on them.

Cheap, a few passes over [P,K]. That every position sums to one catches a wrong normaliser, a
wrong temperature, rows paired wrongly and most corruption; the rest is order, range and NaN
(docs/math.md, "Invariants of a payload"). Rows whose ``row_status`` is not OK are looked at no
further: nobody is handed their values.

Promises: the first fault, by row and position in the row, with its numbers (how many positions
are at fault likewise is counted in some thousand positions around it). What it cannot see
is a payload that is right but belongs to other tokens; digests and the lookup identity do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.codec import normalisation_tolerance
from teacher_logits.error_bounds import EXACT, ErrorBound
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind, RowStatus
from teacher_logits.selection.entry_invariants import (
    TWICE,
    any_of,
    given_rules,
    sampled_rules,
    stands_twice,
    sums_to_one,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_NEEDED = {
    ColumnKind.TOPK_IDS: (ColumnKind.TOPK_LOGPROBS, ColumnKind.LOG_TAIL),
    ColumnKind.SAMPLED_IDS: (ColumnKind.SAMPLED_WEIGHTS,),
    ColumnKind.SCORED_IDS: (ColumnKind.SCORED_LOGPROBS, ColumnKind.LOG_TAIL),
}
"""What each kind of entries needs beside it and ``row_offsets``; those of the best are the rule."""


_OVER_POSITIONS = (
    ColumnKind.TOPK_IDS,
    ColumnKind.TOPK_LOGPROBS,
    ColumnKind.TOPK_LOGITS,
    ColumnKind.LOG_TAIL,
    ColumnKind.LOGSUMEXP,
    ColumnKind.ACTUAL_LOGPROB,
    ColumnKind.SAMPLED_IDS,
    ColumnKind.SAMPLED_WEIGHTS,
    ColumnKind.SCORED_IDS,
    ColumnKind.SCORED_LOGPROBS,
    ColumnKind.ENTROPY,
)
_TILE_ENTRIES, _DEVICE_ENTRIES = 1 << 16, 1 << 24
"""Entries checked at a time: on a CPU what is made on the way stays in the cache, and a device is
filled and has no copies of a large payload."""


def check_invariants(
    columns: Mapping[ColumnKind, torch.Tensor],
    *,
    vocab_size: int,
    temperatures: Sequence[float] = (1.0,),
    first_row: int = 0,
    bound: ErrorBound = EXACT,
) -> None:
    """Check the values of a payload of P positions in N rows.

    ``first_row`` is what the first of them is called in messages. ``bound`` is what the codec that
    they came in may have moved them by, besides the rounding of their own type.

    ``columns`` has at least ``topk_ids``, ``topk_logprobs``, ``log_tail`` and ``row_offsets``;
    ``topk_logits``, ``logsumexp``, ``actual_logprob``, ``row_windows`` and ``row_status`` are
    checked where they are there. Sampled and client-chosen entries stand in for the best, by
    rules of their own (``entry_invariants``). ``temperatures`` are those of the columns of
    ``log_tail`` and ``logsumexp``.

    Raises:
        PayloadInvalidError: naming the first fault's row, its position in that row, its rule.
    """
    entries = _entries(columns)
    needed = (entries, *_NEEDED[entries], ColumnKind.ROW_OFFSETS)
    missing = [kind.value for kind in needed if kind not in columns]
    if missing:
        raise PayloadInvalidError(
            f"the payload has no column {', '.join(missing)}", facts={"missing": ", ".join(missing)}
        )
    offsets = columns[ColumnKind.ROW_OFFSETS].cpu()
    _check_rows(columns, offsets, first_row, positions=len(columns[entries]))
    good = _good_positions(columns, offsets, columns[entries])
    for run in runs(columns[entries]):
        part = {kind: columns[kind][run] for kind in _OVER_POSITIONS if kind in columns}
        for rule, faulty in _rules(part, vocab_size, temperatures, bound):
            places = (faulty & good[run]).nonzero()
            if len(places):
                place = run.start + int(places[0])
                raise _fault(rule, place, len(places), offsets, first_row)


def runs(ids: torch.Tensor) -> Iterator[slice]:
    """Yield runs of positions of ``ids`` [P,K] that are looked at together."""
    positions = len(ids)
    entries = _TILE_ENTRIES if ids.device.type == "cpu" else _DEVICE_ENTRIES
    step = max(1, entries // max(1, ids.shape[1]))
    for start in range(0, positions, step):
        yield slice(start, min(start + step, positions))


def _entries(columns: Mapping[ColumnKind, torch.Tensor]) -> ColumnKind:
    """Return which of its columns has the payload's ids."""
    found = (kind for kind in _NEEDED if kind in columns)
    return next(found, ColumnKind.TOPK_IDS)


def _check_rows(
    columns: Mapping[ColumnKind, torch.Tensor],
    offsets: torch.Tensor,
    first_row: int,
    *,
    positions: int,
) -> None:
    if len(offsets) == 0:
        raise PayloadInvalidError("row_offsets is empty; N rows have N+1 offsets")
    first, last = int(offsets[0]), int(offsets[-1])
    lengths = offsets.diff()
    if (first, last) != (0, positions) or bool((lengths < 0).any()):
        raise PayloadInvalidError(
            f"row_offsets run from {first} to {last} over {len(lengths)} rows; they start at 0, "
            f"never fall, and end at the number of positions, {positions}",
            facts={"first": first, "last": last, "rows": len(lengths), "positions": positions},
        )
    windows = columns.get(ColumnKind.ROW_WINDOWS)
    if windows is not None:
        _check_each_row(
            (windows[:, 1].cpu() != lengths) | (windows[:, 0].cpu() < 0),
            "its window is not of as many positions as it has, from 0 or later",
            first_row,
        )
    status = columns.get(ColumnKind.ROW_STATUS)
    if status is not None:
        _check_each_row(
            status.cpu() > max(RowStatus),
            f"its status is none of 0 to {max(RowStatus)}",
            first_row,
        )


def _check_each_row(faulty: torch.Tensor, rule: str, first_row: int) -> None:
    places = faulty.nonzero()
    if len(places):
        row = first_row + int(places[0])
        raise PayloadInvalidError(
            f"row {row}: {rule} ({len(places)} such rows)",
            facts={"row": row, "faulty_rows": len(places)},
        )


def _good_positions(
    columns: Mapping[ColumnKind, torch.Tensor], offsets: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return bool [P]: the positions of rows whose status is OK."""
    status = columns.get(ColumnKind.ROW_STATUS)
    if status is None:
        return torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    good = (status == RowStatus.OK).to(ids.device)
    return good.repeat_interleave(offsets.diff().to(ids.device))


def _rules(
    columns: Mapping[ColumnKind, torch.Tensor],
    vocab_size: int,
    temperatures: Sequence[float],
    bound: ErrorBound,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each rule and where it is broken, bool [P]; the cheap and telling ones first."""
    if _entries(columns) is ColumnKind.SAMPLED_IDS:
        yield from sampled_rules(columns, vocab_size)
        return
    if _entries(columns) is ColumnKind.SCORED_IDS:
        yield from given_rules(columns, vocab_size, temperatures)
        return
    yield from _top_k_rules(columns, vocab_size, temperatures, bound)


def _top_k_rules(
    columns: Mapping[ColumnKind, torch.Tensor],
    vocab_size: int,
    temperatures: Sequence[float],
    bound: ErrorBound,
) -> Iterator[tuple[str, torch.Tensor]]:
    ids, stored = columns[ColumnKind.TOPK_IDS], columns[ColumnKind.TOPK_LOGPROBS]
    tails, values = columns[ColumnKind.LOG_TAIL], stored.float()
    tolerance = normalisation_tolerance(stored, tails[:, 0])
    outside = (ids.amax(1) >= vocab_size) | (ids.amin(1) < -1)
    yield _outside(vocab_size), outside
    # NaN fails every comparison, so each rule says what must hold.
    yield "a log-probability that is NaN or above 0", ~(values.amax(1) <= tolerance)
    yield "a log_tail that is NaN or above 0", ~(tails.amax(1) <= tolerance)
    absent = ids < 0
    yield (
        "an id without a log-probability, or a log-probability without an id",
        any_of(absent != (values == -torch.inf)),
    )
    yield _RISES, _rises(values)
    for column, temperature in enumerate(temperatures):
        yield from sums_to_one(columns, stored, column, temperature, bound)
    yield TWICE, stands_twice(ids)
    logits = columns.get(ColumnKind.TOPK_LOGITS)
    if logits is not None:
        raw = logits.float()
        unpaired = absent != (raw == -torch.inf)
        yield "an id without a logit, or a logit without an id", any_of(unpaired)
        yield (
            "logits that are NaN, infinite or not in falling order",
            ~((raw[:, 1:] <= raw[:, :-1]).all(1) & (raw.amax(1) < torch.inf)),
        )
    actual = columns.get(ColumnKind.ACTUAL_LOGPROB)
    if actual is not None:
        yield "an actual_logprob that is NaN or above 0", ~(actual <= tolerance)


def rules_of_targets(
    columns: Mapping[ColumnKind, torch.Tensor],
    *,
    vocab_size: int | None,
    temperatures: Mapping[int, float],
    bound: ErrorBound,
    are_best: bool = True,
) -> Iterator[tuple[slice, str, torch.Tensor]]:
    """Yield what makes entries unfit to learn from: a run of positions, rule, where it is broken.

    For entries that hold no NaN or +inf, at ``temperatures`` by their column. Cheap enough for each
    reader and payload: what only says something of the writer is left to ``check_invariants``. An
    entry without mass may have an id, as one has that fp16 rounded to -inf. Unless they
    ``are_best``, entries have no order, and were looked at before.
    """
    ids, stored = columns[ColumnKind.TOPK_IDS], columns[ColumnKind.TOPK_LOGPROBS]
    kinds = (ColumnKind.LOG_TAIL, ColumnKind.LOGSUMEXP)
    beside = {kind: columns[kind] for kind in kinds if kind in columns}
    for run in runs(ids):
        if are_best and vocab_size is not None:
            yield run, _outside(vocab_size), ids[run].amax(1) >= vocab_size
        if are_best:
            yield run, _RISES, _rises(stored[run])
        part = {kind: column[run] for kind, column in beside.items()}
        for column, temperature in temperatures.items():
            for rule, faulty in sums_to_one(part, stored[run], column, temperature, bound):
                yield run, rule, faulty
        if are_best:
            yield run, TWICE, stands_twice(ids[run])


_RISES = "log-probabilities that are not in falling order"


def _outside(vocab_size: int) -> str:
    return f"an id outside the vocabulary of {vocab_size}"


def _rises(values: torch.Tensor) -> torch.Tensor:
    # NaN fails every comparison. An absent entry is -inf, and so stands behind all the others.
    return any_of(~(values[:, 1:] <= values[:, :-1]))


def _fault(
    rule: str, place: int, count: int, offsets: torch.Tensor, first_row: int
) -> PayloadInvalidError:
    # The last row that starts at or before the place; rows without positions are stepped over.
    row = int(torch.searchsorted(offsets, place, right=True)) - 1
    position = place - int(offsets[row])
    row += first_row
    return PayloadInvalidError(
        f"row {row}, position {position}: {rule} ({count} such positions of {int(offsets[-1])}); "
        "the payload is damaged or its teacher is at fault",
        facts={"row": row, "position": position, "faulty_positions": count},
    )
