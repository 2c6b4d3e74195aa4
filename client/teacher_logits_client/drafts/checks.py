"""What is checked of a draft before it is sealed: nothing unwritten, nothing that cannot be.

What ``select_top_k`` wrote into a draft or its parts holds by construction: only the statuses
of its rows are looked at, which were found as it was written. As soon as a teacher writes some
by itself, or has views by which it may, all is read: for what was not written, and in full
(``invariants``): order, ids in range, no value above 0, entries and tail that sum to one; and
an ``actual_logprob`` of 0 where a row ends, and elsewhere, where token ids were given, that of the
token that comes next. What ``write`` is given must fit its column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.layout import RowStatus
from teacher_logits.selection import row_statuses
from teacher_logits.selection.invariants import check_invariants
from teacher_logits_client.drafts.columns import NOT_SELECTED, UNKNOWN, WRITTEN_BY_TEACHER
from teacher_logits_client.drafts.shard_ids import check_own_ids
from teacher_logits_client.rows.alignment import check_lookup_identity
from teacher_logits_client.rows.flat_rows import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Payload
    from teacher_logits_client.drafts.columns import DraftColumns
    from teacher_logits_client.drafts.rows import DraftRows

_BAD = {
    RowStatus.NAN: "a NaN",
    RowStatus.POSITIVE_INFINITY: "a +inf",
    RowStatus.EMPTY_SUPPORT: "nothing finite",
}
# Positions looked at in one go: some copies of their entries are made.
_POSITIONS_A_PASS = 1 << 15


def finish(columns: DraftColumns, rows: DraftRows, payload: Payload, *, mask: bool) -> int:
    """Check a draft and write its ``row_status``; return how many of its rows are bad.

    With ``mask`` bad rows become blank: ids -1, every number 0.

    Raises:
        PayloadInvalidError: of the first fault, with its row and position: something was not
            written; without ``mask``, a row is bad; or values break a rule.
        AlignmentError: an ``actual_logprob`` is not that of the token that comes next.
    """
    selection = columns.selection
    any_by_hand = False
    statuses = columns.row_statuses
    if bool((statuses == UNKNOWN).any()):
        _check_written(columns, rows)
        touched = columns.touched.repeat_interleave(rows.offsets.diff().to(columns.device))
        by_hand = (selection.status == NOT_SELECTED) | (touched & (selection.status == 0))
        any_by_hand = bool(by_hand.any())
        if any_by_hand:
            columns.by_hand = by_hand
            selection.status[by_hand] = _status_by_values(columns)[by_hand]
        statuses = row_statuses(selection.status, rows.offsets)
    bad = (statuses != RowStatus.OK).nonzero().flatten().tolist()
    if bad and not mask:
        raise _bad_rows(columns, rows, statuses, bad)
    for row in bad:
        selection[int(rows.offsets[row]) : int(rows.offsets[row + 1])].blank()
    columns.by_kind[Kind.ROW_STATUS].copy_(statuses)
    if any_by_hand:
        _check_values(columns, rows, payload)
        check_own_ids(columns, rows, payload)
        _check_last_positions(columns, rows)
        _check_lookup(columns, rows)
    columns.bad_row_count = len(bad)
    return len(bad)


def _check_written(columns: DraftColumns, rows: DraftRows) -> None:
    for kind in WRITTEN_BY_TEACHER:
        if kind not in columns.by_kind:
            continue
        missing = columns.unwritten(kind).nonzero().flatten()
        if len(missing):
            row, position = _place(rows, int(missing[0]))
            raise PayloadInvalidError(
                f"{kind.value} was not written for {len(missing)} of {rows.position_count} "
                f"positions, the first of them row {row} (row {rows.rows[row]} of the step), "
                f"position {position}: select into the whole draft, or write all of its columns, "
                "before it is sealed; abandon it otherwise",
                facts={
                    "column": kind.value,
                    "row": row,
                    "step_row": rows.rows[row],
                    "position": position,
                    "unwritten_positions": len(missing),
                    "positions": rows.position_count,
                },
            )


def _status_by_values(columns: DraftColumns) -> torch.Tensor:
    """Return uint8 [P]: the status of positions, as their values show it."""
    selection = columns.selection
    kinds = [kind for kind in WRITTEN_BY_TEACHER if kind is not Kind.TOPK_IDS]
    values = [columns.by_kind[kind] for kind in kinds if kind in columns.by_kind]
    status = torch.zeros_like(selection.status)
    # A logsumexp of +inf is a +inf among the logits; a log-probability of +inf is above 0.
    infinite = torch.stack([_any(each == torch.inf) for each in values]).any(0)
    status.masked_fill_(infinite, RowStatus.POSITIVE_INFINITY)
    status.masked_fill_(selection.topk_ids[:, 0] < 0, RowStatus.EMPTY_SUPPORT)
    nan = torch.stack([_any(each.isnan()) for each in values]).any(0)
    return status.masked_fill_(nan, RowStatus.NAN)


def _any(marks: torch.Tensor) -> torch.Tensor:
    return marks if marks.dim() == 1 else marks.any(1)


def _check_values(columns: DraftColumns, rows: DraftRows, payload: Payload) -> None:
    for first, last in _row_runs(rows):
        start, end = int(rows.offsets[first]), int(rows.offsets[last])
        part = {
            kind: columns.by_kind[kind][start:end]
            for kind in WRITTEN_BY_TEACHER
            if kind in columns.by_kind
        }
        for kind in (Kind.ROW_WINDOWS, Kind.ROW_STATUS):
            part[kind] = columns.by_kind[kind][first:last]
        part[Kind.ROW_OFFSETS] = rows.offsets[first : last + 1] - start
        check_invariants(
            part,
            vocab_size=payload.vocabulary_size,
            temperatures=payload.temperatures,
            first_row=first,
        )


def _check_last_positions(columns: DraftColumns, rows: DraftRows) -> None:
    """Refuse an ``actual_logprob`` where no token comes next. Bad rows are blank by now."""
    actual = columns.by_kind.get(Kind.ACTUAL_LOGPROB)
    if actual is None:
        return
    wrong = ((actual != 0) & ~rows.has_next().to(actual.device)).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        row, position = _place(rows, at)
        raise PayloadInvalidError(
            f"actual_logprob is {float(actual[at]):g} at position {position} of row {row} (row "
            f"{rows.rows[row]} of the step), its last, after which no token comes "
            f"({len(wrong)} such rows): give 0 there",
            facts={
                "column": Kind.ACTUAL_LOGPROB.value,
                "row": row,
                "step_row": rows.rows[row],
                "position": position,
                "faulty_positions": len(wrong),
            },
        )


def _check_lookup(columns: DraftColumns, rows: DraftRows) -> None:
    """Refuse an ``actual_logprob`` that is not the next token's, as each reader would.

    Where token ids were given, which say what comes next; of zeros nothing else can be seen.
    """
    if rows.next_ids is None or Kind.ACTUAL_LOGPROB not in columns.by_kind:
        return
    held = {**columns.by_kind, Kind.ROW_OFFSETS: rows.offsets}
    check_lookup_identity(held, rows.next_ids)


def check_tensor(given: object, what: str) -> None:
    """Refuse what is no tensor, or has no values.

    Raises:
        PayloadInvalidError: naming ``what`` and what it is.
    """
    if isinstance(given, torch.Tensor) and given.layout is torch.strided and not given.is_meta:
        return
    kind = type(given).__name__
    if isinstance(given, torch.Tensor):
        kind = "tensor on the meta device" if given.is_meta else f"{given.layout} tensor"
    raise PayloadInvalidError(
        f"{what} is a {kind}: give a dense torch.Tensor", facts={"argument": what, "given": kind}
    )


def check_kind(given: torch.Tensor, target: torch.Tensor, what: str) -> None:
    """Refuse values of another kind than the column's: floats for ids, or whole numbers for others.

    Raises:
        PayloadInvalidError: naming the column and both types.
    """
    if target.is_floating_point():
        fits, wanted = given.is_floating_point(), "floats"
    else:
        fits, wanted = given.dtype in INTEGERS, "integers"
    if not fits:
        kind = str(given.dtype).removeprefix("torch.")
        raise PayloadInvalidError(
            f"{what} holds {kind}: give {wanted}", facts={"column": what, "dtype": kind}
        )


def narrowed(given: torch.Tensor, target: torch.Tensor, what: str) -> torch.Tensor:
    """Return values in their column's type and place, each of which must fit into it.

    Raises:
        PayloadInvalidError: an id beyond int32, or a finite number that would become infinite.
    """
    stored = given.to(target.device, target.dtype)
    if given.dtype == target.dtype:
        return stored
    here = given.to(target.device)
    if target.is_floating_point():
        wrong = stored.isinf() & ~here.isinf()
    else:
        wrong = stored.to(torch.int64) != here.to(torch.int64)
    if bool(wrong.any()):
        value, kind = here[wrong][0].item(), str(target.dtype).removeprefix("torch.")
        raise PayloadInvalidError(
            f"{what} holds {value}, and its column is of {kind}, in which it has no place "
            f"({int(wrong.sum())} such values): look at what wrote it",
            facts={"column": what, "value": value, "values": int(wrong.sum())},
        )
    return stored


def _row_runs(rows: DraftRows) -> Iterator[tuple[int, int]]:
    """Yield runs of rows, (first, behind the last), of about as many positions as a pass takes."""
    first = 0
    for row in range(1, len(rows.rows) + 1):
        is_full = int(rows.offsets[row] - rows.offsets[first]) >= _POSITIONS_A_PASS
        if is_full or row == len(rows.rows):
            yield first, row
            first = row


def _bad_rows(
    columns: DraftColumns, rows: DraftRows, statuses: torch.Tensor, bad: list[int]
) -> PayloadInvalidError:
    row = bad[0]
    status = RowStatus(int(statuses[row]))
    start, end = int(rows.offsets[row]), int(rows.offsets[row + 1])
    at = int((columns.selection.status[start:end] == status).nonzero()[0])
    _, position = _place(rows, start + at)
    return PayloadInvalidError(
        f"what the teacher says of row {row} (row {rows.rows[row]} of the step) holds "
        f"{_BAD[status]} at position {position} ({len(bad)} of {len(rows.rows)} rows are bad): "
        "write the step again without the fault, or reserve with bad_rows='mask', which masks "
        "such rows and names them in row_status",
        facts={
            "row": row,
            "step_row": rows.rows[row],
            "position": position,
            "status": status.name.lower(),
            "bad_rows": len(bad),
            "rows": len(rows.rows),
        },
    )


def _place(rows: DraftRows, position: int) -> tuple[int, int]:
    """Return the row of a position of the draft, and its place in that row."""
    row = int(torch.searchsorted(rows.offsets, position, right=True)) - 1
    return row, int(rows.places()[position])
