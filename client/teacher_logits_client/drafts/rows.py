"""Rows of a draft: what a publisher writes of each of its rows.

The caller's arrays are its own rows in order: all that the grid gives its rank, or those of
them that are no padding. Token ids are checked and made flat by ``rows``; without them the
lengths alone will do, and then ``row_digests`` are zero bytes: the student's check of them is
unchecked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from teacher_logits.digest import DIGEST_BYTES
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_size
from teacher_logits.shard_parts import columns_of_rank
from teacher_logits_client.payloads.guards import next_ids
from teacher_logits_client.rows import make_row_batch
from teacher_logits_client.rows.valid_counts import valid_count, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_client.drafts.held_rows import HeldRows
    from teacher_logits_client.rows.flat_rows import Mask, Numbers, Rows
    from teacher_logits_client.rows.valid_counts import LossMask

Windows: TypeAlias = "torch.Tensor | Sequence[Sequence[int]]"

UNKNOWN_DIGEST = bytes(DIGEST_BYTES)
"""The digest of a row whose token ids its publisher did not give."""


_MOST_TOKENS = (1 << 31) - 1  # ``row_windows`` are int32


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What a caller says of its rows; see ``Publisher.reserve``."""

    input_ids: Rows | None
    lengths: Numbers | None
    attention_mask: Mask | None
    windows: Windows | None
    loss_mask: LossMask | None


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftRows:
    """N rows of a step. Tensors are int64 on the CPU.

    ``padded_count`` is N and the padding rows that the caller's arrays may hold behind them;
    ``width`` that of its rectangle of ids, or its longest row. ``windows`` [N,2] are the first
    position and the count written of each row, ``offsets`` [N+1] where they start, ``next_ids``
    [P] the token that comes next, -1 where none does, or None where ids were not given.
    ``head_rows`` are the columns that logits have at most, by the profile. ``valid_count`` are the
    positions that count, None where no mask was given. ``held`` are the runs of positions of a rank
    that holds part of each row; ``windows`` then are its first position and all that it holds.
    """

    rows: range
    padded_count: int
    width: int
    lengths: torch.Tensor
    windows: torch.Tensor
    offsets: torch.Tensor
    next_ids: torch.Tensor | None
    digests: bytes
    valid_count: int | None
    head_rows: int
    held: HeldRows | None = None
    has_whole_rows: bool | None = None

    @property
    def position_count(self) -> int:
        """P."""
        return int(self.offsets[-1])

    @property
    def are_whole(self) -> bool:
        """Whether every row is written from its first position to its last, by all that hold it."""
        if self.has_whole_rows is not None:
            return self.has_whole_rows
        return torch.equal(self.windows[:, 1], self.lengths)

    @property
    def row_positions(self) -> list[int]:
        """Positions of each row."""
        counts: list[int] = self.windows[:, 1].tolist()
        return counts

    def part(self, rows: object) -> range:
        """Return some of its rows, by their numbers in the step.

        Raises:
            PayloadInvalidError: they are not among these, or no range of rows.
        """
        own = self.rows
        if isinstance(rows, range) and rows.step == 1 and rows:
            if own.start <= rows.start and rows.stop <= own.stop:
                return rows
        raise _invalid(
            f"{rows!r} are not rows of this draft: give a range among rows {own.start} to "
            f"{own.stop - 1} of the step, which it holds",
            first_row=own.start,
            row_count=len(own),
        )

    def micro_batches(self, size: object) -> list[range]:
        """Return its rows in order, ``size`` at a time.

        Raises:
            PayloadInvalidError: the size is none.
        """
        if not is_size(size):
            raise _invalid(
                f"a micro batch of {size!r} rows: give a whole number of at least 1", size=str(size)
            )
        starts = range(self.rows.start, self.rows.stop, int(size))
        return [range(start, min(start + int(size), self.rows.stop)) for start in starts]

    def has_next(self) -> torch.Tensor:
        """Return bool [P]: whether a token comes next, as the lengths say."""
        return self.places() + 1 < self.lengths.repeat_interleave(self.windows[:, 1])

    def places(self) -> torch.Tensor:
        """Return int64 [P]: where each position stands in its row."""
        if self.held is not None:
            return self.held.places
        firsts, counts = self.windows[:, 0], self.windows[:, 1]
        within = torch.arange(self.position_count) - self.offsets[:-1].repeat_interleave(counts)
        return within + firsts.repeat_interleave(counts)


def make_draft_rows(
    profile: TeacherProfile, rows: range, padded_count: int, given: Given
) -> DraftRows:
    """Check what a caller says of its rows.

    Raises:
        PayloadInvalidError: naming the row, the place and the numbers.
    """
    if given.input_ids is None:
        lengths = _lengths_alone(given, rows, padded_count, profile.max_row_tokens)
        own = own_rows(given.windows, rows, padded_count, what="windows")
        windows = _windows_alone(own, lengths)
        width, following, digests = int(lengths.max()), None, UNKNOWN_DIGEST * len(rows)
    else:
        batch = make_row_batch(
            own_rows(given.input_ids, rows, padded_count, what="input_ids"),
            own_rows(given.lengths, rows, padded_count, what="lengths"),
            attention_mask=own_rows(
                given.attention_mask, rows, padded_count, what="attention_mask"
            ),
            windows=own_rows(given.windows, rows, padded_count, what="windows"),
            vocabulary_size=profile.vocabulary_size,
            prefix_vocabulary_size=profile.vocabulary_size,
        )
        lengths, windows = batch.rows.lengths, batch.windows
        shape: tuple[int, ...] = getattr(given.input_ids, "shape", ())
        width = int(shape[1]) if len(shape) == 2 else int(lengths.max())
        following, digests = next_ids(batch), batch.digests
    _check_longest(lengths, profile.max_row_tokens)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), windows[:, 1].cumsum(0)])
    mask = own_rows(given.loss_mask, rows, padded_count, what="loss_mask")
    return DraftRows(
        rows=rows,
        padded_count=padded_count,
        width=width,
        lengths=lengths,
        windows=windows,
        offsets=offsets,
        next_ids=following,
        digests=digests,
        head_rows=len(columns_of_rank(profile)),
        valid_count=None if mask is None else valid_count(mask, lengths, windows, width),
    )


def own_rows(given, rows: range, padded_count: int, *, what: str):  # type: ignore[no-untyped-def]
    """Return what is given of the rows to write: of as many, or with padding rows behind."""
    if given is None:
        return None
    try:
        count = len(given)
    except TypeError:
        return given  # whoever reads it says what it should be
    if count not in (len(rows), padded_count):
        also = f", or {padded_count} with padding rows" if padded_count > len(rows) else ""
        raise _invalid(
            f"{what} has {count} rows, and rows {rows.start} to {rows.stop - 1} of the step are "
            f"{len(rows)}{also}: give one for each",
            given_rows=count,
            row_count=len(rows),
        )
    return given[: len(rows)] if count > len(rows) else given


def _lengths_alone(given: Given, rows: range, padded_count: int, longest: int) -> torch.Tensor:
    if given.lengths is None or given.attention_mask is not None:
        raise _invalid(
            "neither input_ids nor lengths are given: give input_ids, or at least the true tokens "
            "of each row"
        )
    own = own_rows(given.lengths, rows, padded_count, what="lengths")
    lengths = whole_numbers(own, "lengths", (len(rows),))
    longest = min(longest, _MOST_TOKENS)
    wrong = ((lengths < 1) | (lengths > longest)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise _invalid(
            f"row {row} has length {int(lengths[row])}, and the teacher's rows have 1 to {longest} "
            "tokens",
            row=row,
            length=int(lengths[row]),
            max_row_tokens=longest,
        )
    return lengths


def _windows_alone(windows: Windows | None, lengths: torch.Tensor) -> torch.Tensor:
    if windows is None:
        return torch.stack([torch.zeros_like(lengths), lengths], 1)
    pairs = whole_numbers(windows, "windows", (len(lengths), 2))
    first, count = pairs[:, 0], pairs[:, 1]
    wrong = ((first < 0) | (count < 0) | (count > lengths - first)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise _invalid(
            f"row {row} has a window of {int(count[row])} positions from {int(first[row])} on, and "
            f"{int(lengths[row])} tokens",
            row=row,
            first=int(first[row]),
            count=int(count[row]),
            length=int(lengths[row]),
        )
    return pairs


def _check_longest(lengths: torch.Tensor, longest: int) -> None:
    if int(lengths.max()) > longest:
        row = int(lengths.argmax())
        raise _invalid(
            f"row {row} has {int(lengths[row])} tokens, and the teacher's profile promises "
            f"{longest} at most (max_row_tokens)",
            row=row,
            length=int(lengths[row]),
            max_row_tokens=longest,
        )


def _invalid(message: str, **facts: int | str) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
