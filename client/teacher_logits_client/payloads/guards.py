"""Guards: what a payload is held against before anyone computes with it.

    request           rows, windows, K, temperatures and selection are those that were asked for
    row_status        no bad row where the request refuses them
    row_digests       the teacher scored these very tokens
    lookup_identity   position s scores token s+1

Each becomes a ``Check`` of the payload: passed, or unchecked where what it needs is not known.
What fails raises instead, and the payload is not handed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.digest import DIGEST_BYTES
from teacher_logits.error_bounds import EXACT
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind, RowStatus
from teacher_logits.selection_rules import ClientIds, Sampled
from teacher_logits.tensors import to_bytes
from teacher_logits.terms import Check, Verdict
from teacher_logits_client.payloads.columns import LeasedColumns
from teacher_logits_client.payloads.entry_guards import (
    check_chosen_lookup,
    check_entries,
    check_sample_lookup,
    check_values,
)
from teacher_logits_client.rows.alignment import check_lookup_identity, compare_digests
from teacher_logits_client.rows.labels import next_token_labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.selection_rules import SelectionRule
    from teacher_logits_client.rows import RowBatch

    Columns = Mapping[ColumnKind, torch.Tensor]

_STATUSES = bytes(RowStatus)
_NO_IDS = "the request's token ids are not known here; pass input_ids to have this checked"


def check_scored(
    payload: Payload,
    columns: Columns,
    *,
    batch: RowBatch | None,
    profile: StudentProfile,
    reject_bad_rows: bool,
) -> tuple[Check, ...]:
    """Hold a payload against what was asked for; return what was checked and what could not be.

    ``batch`` are the rows that were sent, None where this client did not send them.

    Raises:
        PayloadInvalidError: it is not what was asked for, or holds bad rows.
        AlignmentError: it is about other tokens, or about the right ones at other places.
    """
    check_entries(payload, profile, batch)
    status = _check_status(payload, columns, reject=reject_bad_rows)
    check_values(payload, columns, batch)
    if batch is None:
        return (
            status,
            _unchecked("row_digests", _NO_IDS),
            _unchecked("lookup_identity", _NO_IDS),
        )
    _check_rows(payload, columns, batch)
    return (
        status,
        _check_digests(columns, batch),
        _check_lookup(payload.selection, columns, batch),
    )


def check_statuses(statuses: bytes, *, first_row: int) -> None:
    """Refuse a status that there is none of; ``first_row`` is whose status comes first.

    Raises:
        PayloadInvalidError: naming the first such row.
    """
    if statuses.count(RowStatus.OK) == len(statuses):
        return
    unknown = statuses.translate(None, _STATUSES)
    if unknown:
        row = first_row + statuses.index(unknown[:1])
        raise PayloadInvalidError(
            f"row {row} has status {unknown[0]}; the statuses are 0 to {max(RowStatus)}: the "
            "payload is damaged or its teacher is at fault",
            facts={"row": row, "status": unknown[0]},
        )


def _check_status(payload: Payload, columns: Columns, *, reject: bool) -> Check:
    status = columns[ColumnKind.ROW_STATUS]
    bad = (status != RowStatus.OK).nonzero().flatten()
    if len(bad) and reject:
        check_statuses(to_bytes(status), first_row=payload.first_row)
        row = int(bad[0])
        reason = RowStatus(int(status[row])).name.lower()
        raise PayloadInvalidError(
            f"{len(bad)} of {len(status)} rows could not be scored, the first of them row {row} "
            f"({reason}): look at the teacher, or ask for bad_rows='mask' and leave those rows out",
            facts={"row": row, "bad_rows": len(bad), "rows": len(status), "status": reason},
        )
    return passed("row_status", f"{len(bad)} of {len(status)} rows are masked")


def _check_rows(payload: Payload, columns: Columns, batch: RowBatch) -> None:
    windows = columns[ColumnKind.ROW_WINDOWS]
    if windows.shape == batch.windows.shape and torch.equal(windows.long(), batch.windows):
        offsets = columns[ColumnKind.ROW_OFFSETS]
        if torch.equal(offsets.diff(), batch.windows[:, 1]) and int(offsets[0]) == 0:
            return
    raise PayloadInvalidError(
        f"payload {payload.payload_id} has {payload.row_count} rows and {payload.position_count} "
        f"positions, and {batch.rows.row_count} rows with {batch.position_count} positions were "
        "asked for, or it has others of them",
        facts={
            "rows": payload.row_count,
            "positions": payload.position_count,
            "asked_rows": batch.rows.row_count,
            "asked_positions": batch.position_count,
        },
    )


def _check_digests(columns: Columns, batch: RowBatch) -> Check:
    received = to_bytes(columns[ColumnKind.ROW_DIGESTS])
    if received != batch.digests:
        # Only now an object a row: what was expected of the others is fine.
        compare_digests(
            cut_digests(batch.digests),
            cut_digests(received),
            ids=[row.tolist() for row in batch.rows.ids.split(batch.rows.lengths.tolist())],
        )
    return passed("row_digests", f"{batch.rows.row_count} rows have the tokens that were sent")


def _check_lookup(selection: SelectionRule, columns: Columns, batch: RowBatch) -> Check:
    if isinstance(selection, Sampled):
        return check_sample_lookup()
    if isinstance(selection, ClientIds):
        return check_chosen_lookup(columns, next_ids(batch))
    bound = columns.bound if isinstance(columns, LeasedColumns) else EXACT
    found = check_lookup_identity(columns, next_ids(batch), bound=bound)
    return lookup_check(found.checked, found.among_k)


def lookup_check(checked: int, among_k: int) -> Check:
    """Return the check of so many positions, some of whose next tokens are among the K ids."""
    detail = (
        f"{checked} positions score the token that comes next, {among_k} of them among the K ids"
    )
    verdict = Verdict.PASSED if checked else Verdict.UNCHECKED
    return Check(name="lookup_identity", verdict=verdict, detail=detail)


def next_ids(batch: RowBatch) -> torch.Tensor:
    """Return the token that comes next at each position wanted [P], -1 where none does."""
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.lengths.cumsum(0)])
    following = next_token_labels(batch.rows.ids, bounds, ignore_index=-1)
    if not batch.has_windows:
        return following
    firsts, counts = batch.windows[:, 0], batch.windows[:, 1]
    starts = (bounds[:-1] + firsts).repeat_interleave(counts)
    within = torch.arange(len(starts)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return following[starts + within]


def cut_digests(digests: bytes) -> list[bytes]:
    """Return row digests [N,16] as an object a row."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def passed(name: str, detail: str) -> Check:
    """Return a check that passed."""
    return Check(name=name, verdict=Verdict.PASSED, detail=detail)


def _unchecked(name: str, detail: str) -> Check:
    return Check(name=name, verdict=Verdict.UNCHECKED, detail=detail)
