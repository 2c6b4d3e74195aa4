"""Rows to score: what a caller hands in, checked and made flat.

Rows come in any of the forms of ``flat_rows``, padded on the right if at all. They leave as
int32 on the CPU, one behind the other, without padding, with a digest of each. What the server
would refuse is refused here, before anything is sent: a length beyond the width, an empty batch
or row, an id that is no whole number, or none of the teacher's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.digest import DIGEST_BYTES, row_digest
from teacher_logits.tensors import to_bytes
from teacher_logits_client.rows.flat_rows import INTEGERS, UNREADABLE, FlatRows, flatten, invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.rows.flat_rows import Mask, Numbers, Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBatch:
    """What one request asks to be scored.

    ``windows`` int64 [N,2] are the first position and the count wanted of each row;
    ``ids_bytes`` and ``prefix_bytes`` are the ids as they travel (int32, little-endian), and
    ``digests`` the digests of the rows, 16 bytes each, prefixes not included. ``chosen`` int32
    [P,M] are the ids that are to be scored at the wanted positions, None for the session's own
    selection; ``seed`` that of its sample, None for the session's own.
    """

    rows: FlatRows
    prefix: FlatRows | None
    windows: torch.Tensor
    has_windows: bool
    ids_bytes: bytes
    prefix_bytes: bytes
    digests: bytes
    chosen: torch.Tensor | None = None
    seed: int | None = None

    @property
    def position_count(self) -> int:
        """Positions that are wanted."""
        return int(self.windows[:, 1].sum())

    @property
    def token_count(self) -> int:
        """Tokens to run the teacher over, prefixes included."""
        return self.rows.token_count + (self.prefix.token_count if self.prefix else 0)


def make_row_batch(
    input_ids: Rows,
    lengths: Numbers | None = None,
    *,
    attention_mask: Mask | None = None,
    prefix_ids: Rows | None = None,
    prefix_lengths: Numbers | None = None,
    windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
    vocabulary_size: int,
    prefix_vocabulary_size: int,
) -> RowBatch:
    """Check a request's rows and make them flat.

    Args:
        input_ids: integers [N,S], or a list of N rows (1-D tensors or lists of ints).
        lengths: true tokens of each row of a rectangle that is padded on the right.
        attention_mask: bool or integers [N,S] instead of ``lengths``: 1 at each token, 0 at
            the padding behind them. All S count where neither is given.
        prefix_ids, prefix_lengths: the same for tokens that only the teacher sees, in front
            of each row; a row's prefix may be empty.
        windows: [N,2], first position and count wanted of each row; all where not given.
        vocabulary_size, prefix_vocabulary_size: ids are below this; the prefix is the
            teacher's own text, and may use all of its vocabulary.

    Raises:
        PayloadInvalidError: naming the row, the place and the numbers.
    """
    rows = flatten(input_ids, lengths, attention_mask, what="input_ids", shortest=1)
    rows = _as_int32(rows, vocabulary_size, what="input_ids")
    prefix = None
    if prefix_ids is not None:
        prefix = flatten(prefix_ids, prefix_lengths, what="prefix_ids", shortest=0)
        prefix = _as_int32(prefix, prefix_vocabulary_size, what="prefix_ids")
        if prefix.row_count != rows.row_count:
            raise invalid(
                f"prefix_ids has {prefix.row_count} rows and input_ids {rows.row_count}: give "
                "every row a prefix, empty where it has none",
                prefix_rows=prefix.row_count,
                rows=rows.row_count,
            )
    elif prefix_lengths is not None:
        raise invalid("prefix_lengths came without prefix_ids")
    ids_bytes = to_bytes(rows.ids)
    return RowBatch(
        rows=rows,
        prefix=prefix,
        windows=_windows(windows, rows),
        has_windows=windows is not None,
        ids_bytes=ids_bytes,
        prefix_bytes=to_bytes(prefix.ids) if prefix else b"",
        digests=_digests(ids_bytes, rows.lengths.tolist()),
    )


def _as_int32(rows: FlatRows, vocabulary_size: int, *, what: str) -> FlatRows:
    """Refuse ids outside the vocabulary (padding is gone by now), and narrow the rest."""
    wrong = ((rows.ids < 0) | (rows.ids >= vocabulary_size)).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        starts = rows.lengths.cumsum(0)
        row = int(torch.searchsorted(starts, at, right=True))
        place = at - (int(starts[row - 1]) if row else 0)
        raise invalid(
            f"row {row}, position {place} of {what} is {int(rows.ids[at])}, and the teacher's "
            f"ids are 0 to {vocabulary_size - 1}: padding belongs behind a row's length, and an "
            "ignored label is no token id",
            row=row,
            position=place,
            token_id=int(rows.ids[at]),
            vocabulary_size=vocabulary_size,
        )
    return FlatRows(ids=rows.ids.to(torch.int32), lengths=rows.lengths)


def _windows(
    windows: torch.Tensor | Sequence[Sequence[int]] | None, rows: FlatRows
) -> torch.Tensor:
    if windows is None:
        return torch.stack([torch.zeros_like(rows.lengths), rows.lengths], 1)
    try:
        pairs = torch.as_tensor(windows)
    except UNREADABLE as error:
        raise invalid(f"windows cannot be read ({error}): give integers [rows, 2]") from None
    if pairs.dtype not in INTEGERS or pairs.shape != (rows.row_count, 2):
        raise invalid(
            f"windows has shape {tuple(pairs.shape)} of {pairs.dtype}: give integers "
            f"[{rows.row_count}, 2], the first position and the count wanted of each row",
            rows=rows.row_count,
        )
    pairs = pairs.detach().to("cpu", torch.int64)
    first, count = pairs[:, 0], pairs[:, 1]
    wrong = ((first < 0) | (count < 0) | (count > rows.lengths - first)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise invalid(
            f"row {row} wants {int(count[row])} positions from {int(first[row])} on, and has "
            f"{int(rows.lengths[row])} tokens",
            row=row,
            first=int(first[row]),
            count=int(count[row]),
            length=int(rows.lengths[row]),
        )
    return pairs


def _digests(ids_bytes: bytes, lengths: list[int]) -> bytes:
    ids = memoryview(ids_bytes).cast("i") if ids_bytes else memoryview(b"")
    digests = bytearray(len(lengths) * DIGEST_BYTES)
    start = 0
    for at, length in enumerate(lengths):
        digest = row_digest(ids[start : start + length])
        digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] = digest
        start += length
    return bytes(digests)
