"""Alignment: do teacher and student speak of the same tokens, at the same positions?

    digests          the teacher scored these very rows: order, length, first token   a row
    lookup identity  position s really scores token s+1                               a batch

Digests are blind to a shift of scores against tokens; the identity sees it at once on varied
text, whatever the teacher is worth: where the token that comes next is among the K ids, its
log-probability there must be its ``actual_logprob``, and where it is not, that must be no
larger than the last of the K (docs/math.md, "How a shift is found").

Promises: errors that name row and position, and say when the data is merely shifted or differs
in its first token, since that is a thing to mend and not to look for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.codec import entry_tolerance
from teacher_logits.codec.value_codecs import entry_errors
from teacher_logits.digest import row_digest
from teacher_logits.error_bounds import EXACT, ErrorBound
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits.layout import ColumnKind, RowStatus
from teacher_logits.selection.invariants import runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SHIFTS = {
    0: "each position scores its own token: the data is one token late",
    2: "each position scores the token after the next: the data is one token early",
    -1: "each position scores the token before its own: the data is two tokens late",
}
_NAMED_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class LookupCheck:
    """How many positions the lookup identity was checked on, and how many had their id in K."""

    checked: int
    among_k: int


def compare_digests(
    expected: Sequence[bytes],
    received: Sequence[bytes],
    *,
    ids: Sequence[Sequence[int]] | None = None,
    first_row: int = 0,
    what: str = "the teacher scored other tokens than were sent",
) -> None:
    """Refuse rows whose digests differ; ``expected`` are the student's own, 16 bytes each.

    With the student's ``ids``, rows without padding, the error also says when the teacher
    scored the same row without its first token, or with it doubled. ``first_row`` is the
    number that the first row goes by in the message, and ``what`` its first words.

    Raises:
        AlignmentError: naming the rows that differ.
    """
    if len(expected) != len(received):
        raise AlignmentError(
            f"the teacher scored {len(received)} rows and {len(expected)} were sent",
            facts={"expected_rows": len(expected), "received_rows": len(received)},
        )
    wrong = [row for row, digest in enumerate(received) if digest != expected[row]]
    if not wrong:
        return
    row = wrong[0]
    named = ", ".join(str(first_row + r) for r in wrong[:_NAMED_ROWS])
    more = ", ..." if len(wrong) > _NAMED_ROWS else ""
    cause = _cause(expected, received[row], None if ids is None else ids[row], first_row)
    raise AlignmentError(
        f"{what} in {len(wrong)} of {len(expected)} rows "
        f"({named}{more}): row {first_row + row} came with digest {received[row].hex()}, and "
        f"its tokens have {expected[row].hex()}; {cause}",
        facts={
            "row": first_row + row,
            "wrong_rows": len(wrong),
            "rows": len(expected),
            "expected": expected[row].hex(),
            "received": received[row].hex(),
        },
    )


def _cause(
    expected: Sequence[bytes], received: bytes, ids: Sequence[int] | None, first_row: int
) -> str:
    if received in expected:
        other = first_row + list(expected).index(received)
        return f"that is the digest of row {other}: the rows are in another order"
    if ids is None or len(ids) == 0:
        return "see whether both sides tokenise and pad alike"
    given = [int(i) for i in ids]
    if received == row_digest(given[1:]):
        return (
            f"without its first token ({given[0]}) the row is the same: the two sides disagree on "
            "whether a row begins with a beginning-of-sequence token"
        )
    if received == row_digest([given[0], *given]):
        return (
            f"with its first token ({given[0]}) doubled the row is the same: one side adds it again"
        )
    if received == row_digest(given[:-1]):
        return f"without its last token ({given[-1]}) the row is the same"
    return "see whether both sides tokenise and pad alike"


def check_lookup_identity(
    columns: Mapping[ColumnKind, torch.Tensor],
    next_ids: torch.Tensor,
    *,
    tolerance: float | None = None,
    first_row: int = 0,
    bound: ErrorBound = EXACT,
) -> LookupCheck:
    """Refuse a payload whose position s does not score the token that comes next.

    ``columns`` are a payload's: ``topk_ids``, ``topk_logprobs``, ``actual_logprob`` and
    ``row_offsets``, and ``row_status`` where it is there; rows that are not OK are left out.
    ``next_ids`` [P] is the student's own ids[s+1] at each position, -1 where none comes next.
    ``tolerance`` in nats replaces the one that the element type of ``topk_logprobs`` implies, to
    which ``bound`` adds what the codec that they came in may cost.
    ``first_row`` as for ``compare_digests``. Nothing was checked where the answer's ``checked``
    is 0, as without ``actual_logprob``.

    Raises:
        AlignmentError: naming the first row and position, and whether the data is shifted.
        PayloadInvalidError: not one next id a position.
    """
    ids, stored = columns[ColumnKind.TOPK_IDS], columns[ColumnKind.TOPK_LOGPROBS]
    if next_ids.numel() != len(ids):
        raise PayloadInvalidError(
            f"{next_ids.numel()} next ids are given for {len(ids)} positions",
            facts={"next_ids": next_ids.numel(), "positions": len(ids)},
        )
    if ColumnKind.ACTUAL_LOGPROB not in columns:
        return LookupCheck(checked=0, among_k=0)
    offsets = columns[ColumnKind.ROW_OFFSETS].to(ids.device)
    rows = torch.arange(len(offsets) - 1, device=ids.device).repeat_interleave(offsets.diff())
    wanted = next_ids.reshape(-1).to(ids.device, torch.int32)
    if ColumnKind.ROW_STATUS in columns:
        good = (columns[ColumnKind.ROW_STATUS] == RowStatus.OK).to(ids.device)
        wanted = wanted.masked_fill(~good[rows], -1)
    lookup = _Lookup(
        ids=ids,
        logprobs=stored,
        tolerance=tolerance,
        bound=bound,
        actual=columns[ColumnKind.ACTUAL_LOGPROB].float(),
    )
    faulty, found = lookup.compare(wanted)
    places = faulty.nonzero()
    if len(places):
        shift = _shift(lookup, wanted, rows)
        raise _misaligned(
            lookup, wanted, offsets, places.flatten(), shift=shift, first_row=first_row
        )
    return LookupCheck(checked=int((wanted >= 0).sum()), among_k=int(found.sum()))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Lookup:
    """A payload's entries [P,K] as they came, and ``actual`` [P] that is held against them.

    Compared some positions at a time: beside a large payload there is no room for as much again.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    tolerance: float | None
    bound: ErrorBound
    actual: torch.Tensor

    def compare(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where ``actual`` cannot be that of ``wanted`` [P], and where K holds it."""
        faulty = torch.empty(len(wanted), dtype=torch.bool, device=wanted.device)
        found = torch.empty_like(faulty)
        for run in runs(self.ids):
            faulty[run], found[run] = self._compare(run, wanted[run])
        return faulty, found

    def _compare(self, run: slice, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, stored, asked = self.ids[run], self.logprobs[run], wanted >= 0
        match = (ids == wanted.unsqueeze(1)) & asked.unsqueeze(1)
        found = match.any(1)
        # Of the entries that exist, the one that bounds everything outside: the smallest.
        column = torch.where(found, match.int().argmax(1), (ids >= 0).sum(1) - 1)
        column = column.clamp_min(0).unsqueeze(1)
        held = stored.gather(1, column)
        excess = self.actual[run] - held.float().squeeze(1)
        tolerance = entry_tolerance(held)
        if self.tolerance is not None:
            tolerance = torch.full_like(tolerance, self.tolerance)
        elif not self.bound.is_exact:
            tolerance = tolerance + entry_errors(stored, self.bound).gather(1, column)
        # NaN fails every comparison.
        near = torch.where(found, excess.abs(), excess) <= tolerance.squeeze(1)
        return asked & ~near, found


def _shift(lookup: _Lookup, wanted: torch.Tensor, rows: torch.Tensor) -> int | None:
    """Return the lag d at which position s agrees with ids[s+d] throughout, if there is one."""
    places = torch.arange(len(wanted), device=wanted.device)
    for lag in _SHIFTS:
        source = (places + lag - 1).clamp(0, len(wanted) - 1)
        same_row = (rows[source] == rows) & (source == places + lag - 1) & (wanted[source] >= 0)
        faulty, found = lookup.compare(torch.where(same_row, wanted[source], -1))
        if bool(found.any()) and not bool(faulty.any()):
            return lag
    return None


def _misaligned(
    lookup: _Lookup,
    wanted: torch.Tensor,
    offsets: torch.Tensor,
    places: torch.Tensor,
    *,
    shift: int | None,
    first_row: int,
) -> AlignmentError:
    place = int(places[0])
    row = int(torch.searchsorted(offsets, place, right=True)) - 1
    position, token = place - int(offsets[row]), int(wanted[place])
    row += first_row
    actual, total = float(lookup.actual[place]), int((wanted >= 0).sum())
    held = lookup.logprobs[place].float().tolist()
    entries = dict(zip(lookup.ids[place].tolist(), held, strict=True))
    entries.pop(-1, None)
    if token in entries:
        stands = f"among the K ids it has {entries[token]:.4f}"
    else:
        least = min(entries.values(), default=-math.inf)
        stands = f"it is not among the K ids, of which the last has {least:.4f}"
    cause = "it is no shift of -1, 1 or 2 tokens" if shift is None else _SHIFTS[shift]
    return AlignmentError(
        f"row {row}, position {position}: the token that comes next is {token}, its "
        f"log-probability is said to be {actual:.4f}, and {stands} ({len(places)} of {total} "
        f"positions disagree); {cause}",
        facts={
            "row": row,
            "position": position,
            "token_id": token,
            "actual_logprob": actual,
            "wrong_positions": len(places),
            "checked_positions": total,
            "offset": 0 if shift is None else 1 - shift,
        },
    )
