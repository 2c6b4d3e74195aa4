"""Step guards: what a registered step is held against before anyone computes with it.

    shape             K and temperatures are at least those that the session asked for, and
                      entries are selected as it asked
    row_status        how many rows are masked, each by a status that there is
    row_digests       the teacher scored these very tokens
    lookup_identity   position s scores token s+1

Each of the last three becomes a ``Check`` of the batch. What fails raises with global row
numbers, and the batch is not handed out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from teacher_logits.digest import DIGEST_BYTES
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits.layout import ColumnKind, RowStatus
from teacher_logits.profiles import NEEDED_COLUMNS, SCORED_COLUMNS
from teacher_logits.tensors import to_bytes
from teacher_logits.terms import Check, Verdict
from teacher_logits_client.payloads.guards import cut_digests, lookup_check, next_ids, passed
from teacher_logits_client.rows.alignment import LookupCheck, check_lookup_identity, compare_digests
from teacher_logits_client.rows.flat_rows import FlatRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.payloads.row_parts import RowPart
    from teacher_logits_client.rows import RowBatch

_OK = int(RowStatus.OK)
#: Of a row whose token ids its publisher did not give.
_UNKNOWN = bytes(DIGEST_BYTES)
_NO_IDS = "the rank's token ids are not known here; pass input_ids to have this checked"


def check_tiling(parts: Sequence[RowPart], rows: range) -> None:
    """Refuse parts that are not the rank's real rows, each once and in order.

    Raises:
        PayloadInvalidError: naming the row that is missing or there twice.
    """
    expected = rows.start
    for part in parts:
        if part.first_row != expected:
            raise _not_tiled(rows, expected, part.first_row)
        expected += part.row_count
    if expected != rows.stop:
        raise _not_tiled(rows, expected, rows.stop)


def _not_tiled(rows: range, expected: int, found: int) -> PayloadInvalidError:
    return PayloadInvalidError(
        f"rows {rows.start} to {rows.stop - 1} were granted, and row {expected} was due where "
        f"{found} came",
        facts={"expected_row": expected, "found_row": found},
    )


def check_shape(payload: Payload, profile: StudentProfile) -> None:
    """Refuse a payload with fewer entries a position, temperatures or columns than asked for.

    Raises:
        PayloadInvalidError: with the numbers of both.
    """
    if tuple([column.kind for column in payload.columns]) != SCORED_COLUMNS:
        for kind in (*NEEDED_COLUMNS, *profile.columns):
            payload.column(kind)
    has, wanted = payload.temperatures, profile.all_temperatures
    missing = has != wanted and [
        asked
        for asked in wanted
        if not any(abs(asked - each) <= 1e-6 * abs(asked) for each in has)  # they travel as fp32
    ]
    if payload.top_k < profile.top_k or missing:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has K = {payload.top_k} and temperatures {has}; the "
            f"session asked for K = {profile.top_k} or more and {wanted}",
            facts={"top_k": payload.top_k, "asked_top_k": profile.top_k},
        )
    if profile.selection not in (None, payload.selection):
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has entries of {payload.selection}, and the session "
            f"asked for {profile.selection}",
            facts={"selection": payload.selection.name},
        )


def check_step(
    parts: Sequence[RowPart],
    *,
    rows: range,
    batch: RowBatch,
) -> tuple[Check, ...]:
    """Hold a step's parts against what was asked for; return what was checked.

    ``rows`` are the rank's global rows, padding included. ``batch`` are its own rows in order,
    padding included or left out.

    Raises:
        PayloadInvalidError: ``batch`` is not of these rows.
        AlignmentError: they are about other tokens, or about the right ones at other places.
    """
    status = _check_status(statuses_of(parts))
    real = sum(part.row_count for part in parts)
    if batch.rows.row_count not in (len(rows), real):
        raise PayloadInvalidError(
            f"input_ids has {batch.rows.row_count} rows, and this rank reads rows {rows.start} to "
            f"{rows.stop - 1} of the step, of which {real} are real: give these, in order, with "
            "or without the padding",
            facts={
                "rows": batch.rows.row_count,
                "expected_rows": len(rows),
                "real_row_count": real,
            },
        )
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.lengths.cumsum(0)]).tolist()
    found, first = [], 0
    for part in parts:
        own = _rows_of(batch, starts, first, part.row_count)
        found.append(_check_part(part, own, has_windows=batch.has_windows))
        first += part.row_count
    return (status, _digests(parts), _lookup(found))


def statuses_of(parts: Sequence[RowPart]) -> bytes:
    """Return the status of each row."""
    return b"".join([part.status for part in parts])


def unchecked_step(statuses: bytes) -> tuple[Check, ...]:
    """Return what is known of a step's rows, by their statuses, where the caller gave no ids."""
    return (_check_status(statuses), *_UNCHECKED)


def tokens_of(batch: RowBatch, *, row_count: int, real_row_count: int) -> torch.Tensor:
    """Return the tokens of each of the rank's rows, 0 for padding, int64 [row_count]."""
    lengths = torch.zeros(row_count, dtype=torch.int64)
    lengths[:real_row_count] = batch.rows.lengths[:real_row_count]
    return lengths


def _check_status(statuses: bytes) -> Check:
    bad = len(statuses) - statuses.count(_OK)
    return passed("row_status", f"{bad} of {len(statuses)} rows are masked")


def _rows_of(batch: RowBatch, starts: list[int], first: int, count: int) -> RowBatch:
    """Return ``count`` rows of the rank's own, from its row ``first`` on."""
    stop = first + count
    rows = FlatRows(
        ids=batch.rows.ids[starts[first] : starts[stop]], lengths=batch.rows.lengths[first:stop]
    )
    return replace(
        batch,
        rows=rows,
        windows=batch.windows[first:stop],
        digests=batch.digests[first * DIGEST_BYTES : stop * DIGEST_BYTES],
    )


def _check_part(part: RowPart, own: RowBatch, *, has_windows: bool) -> LookupCheck:
    received = to_bytes(part[ColumnKind.ROW_DIGESTS])
    if received != own.digests:
        pairs = list(zip(cut_digests(own.digests), cut_digests(received), strict=True))
        compare_digests(
            [got if got == _UNKNOWN else expected for expected, got in pairs],
            [got for _, got in pairs],
            ids=[row.tolist() for row in own.rows.ids.split(own.rows.lengths.tolist())],
            first_row=part.first_row,
            what="the publisher registered other tokens than this rank's input_ids",
        )
    windows = part[ColumnKind.ROW_WINDOWS].long()
    wanted = own.windows if has_windows else windows
    wrong = (windows != wanted).any(1) | (windows.sum(1) > own.rows.lengths)
    wrong |= (windows < 0).any(1) | (part[ColumnKind.ROW_OFFSETS].diff() != windows[:, 1])
    if bool(wrong.any()):
        raise _other_positions(part, own, windows, int(wrong.nonzero()[0]))
    following = next_ids(replace(own, windows=windows, has_windows=True))
    return check_lookup_identity(part, following, first_row=part.first_row, bound=part.bound)


def _other_positions(
    part: RowPart, own: RowBatch, windows: torch.Tensor, row: int
) -> AlignmentError:
    first, count = windows[row].tolist()
    wanted_first, wanted_count = own.windows[row].tolist()
    length = int(own.rows.lengths[row])
    number = part.first_row + row
    return AlignmentError(
        f"row {number} was registered at {count} positions from {first} on, and has {length} "
        f"tokens, of which {wanted_count} positions from {wanted_first} on are wanted",
        facts={
            "row": number,
            "first": first,
            "positions": count,
            "wanted_first": wanted_first,
            "wanted_positions": wanted_count,
            "tokens": length,
        },
    )


def _digests(parts: Sequence[RowPart]) -> Check:
    digests = [
        each for part in parts for each in cut_digests(to_bytes(part[ColumnKind.ROW_DIGESTS]))
    ]
    known = len(digests) - digests.count(_UNKNOWN)
    return Check(
        name="row_digests",
        verdict=Verdict.PASSED if known == len(digests) else Verdict.UNCHECKED,
        detail=f"{known} of {len(digests)} rows are known to have the tokens that were given",
    )


def _lookup(found: Sequence[LookupCheck]) -> Check:
    checked = sum(each.checked for each in found)
    among = sum(each.among_k for each in found)
    return lookup_check(checked, among)


_UNCHECKED = tuple(
    Check(name=name, verdict=Verdict.UNCHECKED, detail=_NO_IDS)
    for name in ("row_digests", "lookup_identity")
)
