"""What a student asks an engine for: rows of token ids, prefixes, and windows of positions.

``read_request`` turns the flat form of the wire into a ``Request`` and ``check_request`` holds
it against a teacher, both before anything is computed. Both refuse by row, with the numbers,
the rule and the way out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from teacher_logits.digest import DIGEST_BYTES, row_digest
from teacher_logits.errors import PayloadInvalidError
from teacher_logits_server.engines import Row

if TYPE_CHECKING:
    from collections.abc import Sequence

_SERIAL_ELEMENTS = 1 << 15


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Rows to score, in their order.

    Row ``i`` has the student's tokens ``token_ids[row_starts[i]:row_starts[i+1]]``, behind a
    prefix that only the teacher sees, cut alike from ``prefix_ids``. Both are int32 on the CPU;
    ``raw_ids`` are the bytes of the first.
    Of row ``i`` the positions ``windows[i] = (first, count)`` are wanted, counted from the
    student's first token; they lie at ``position_starts[i]`` among those of all rows.
    """

    raw_ids: bytearray
    token_ids: torch.Tensor
    row_starts: tuple[int, ...]
    prefix_ids: torch.Tensor
    prefix_starts: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]
    position_starts: tuple[int, ...]

    @property
    def row_count(self) -> int:
        """Rows."""
        return len(self.windows)

    @property
    def position_count(self) -> int:
        """Wanted positions of all rows."""
        return self.position_starts[-1]

    @property
    def has_whole_rows(self) -> bool:
        """Whether all positions of every row are wanted."""
        starts = self.row_starts
        return all(
            first == 0 and count == starts[row + 1] - starts[row]
            for row, (first, count) in enumerate(self.windows)
        )

    @property
    def token_count(self) -> int:
        """Tokens of all rows, prefixes included."""
        return self.row_starts[-1] + self.prefix_starts[-1]

    def computed_tokens(self) -> list[int]:
        """Return how many tokens of each row the engine gets.

        None of a row without a wanted position, and none behind the last wanted one.
        """
        prefixes = self.prefix_starts
        return [
            prefixes[row + 1] - prefixes[row] + first + count if count else 0
            for row, (first, count) in enumerate(self.windows)
        ]

    def engine_rows(self, first_row: int, row_count: int) -> list[Row]:
        """Return some rows as an engine takes them; rows without wanted positions are left out."""
        rows = []
        origin = self.row_starts[first_row]
        all_ids = self.token_ids[origin : self.row_starts[first_row + row_count]].long()
        for row in range(first_row, first_row + row_count):
            first, count = self.windows[row]
            if not count:
                continue
            start = self.row_starts[row] - origin
            ids = all_ids[start : start + first + count]
            before, behind = self.prefix_starts[row : row + 2]
            if behind > before:
                ids = torch.cat([self.prefix_ids[before:behind].long(), ids])
            rows.append(Row(token_ids=ids, first=behind - before + first, count=count))
        return rows

    def next_ids(self) -> torch.Tensor:
        """Return the token behind each wanted position, int64 [P]; -1 behind a row's last."""
        row_starts, position_starts = (
            torch.tensor(self.row_starts),
            torch.tensor(self.position_starts),
        )
        behind = self.token_ids.long().roll(-1)
        behind[row_starts[1:] - 1] = -1
        shift = row_starts[:-1] + torch.tensor(self.windows)[:, 0] - position_starts[:-1]
        places = torch.arange(self.position_count)
        return behind[places + shift.repeat_interleave(position_starts.diff())]

    def digests(self) -> torch.Tensor:
        """Return ``digest.row_digest`` of the student's own tokens of each row, uint8 [N,16]."""
        ids = memoryview(self.raw_ids).cast("i")
        starts = self.row_starts
        found = b"".join(row_digest(ids[a:b]) for a, b in pairwise(starts))
        return torch.frombuffer(bytearray(found), dtype=torch.uint8).view(-1, DIGEST_BYTES)


def read_request(
    *,
    input_ids: bytes,
    row_lengths: Sequence[int],
    prefix_ids: bytes = b"",
    prefix_lengths: Sequence[int] = (),
    row_windows: Sequence[tuple[int, int]] = (),
) -> Request:
    """Read the flat form: ids int32, little-endian, row after row.

    ``prefix_lengths`` and ``row_windows`` have an entry a row, or none at all: no prefixes, and
    all positions.

    Raises:
        PayloadInvalidError: no rows, an empty row, lengths that do not add up to the ids, or a
            window outside its row.
    """
    if not row_lengths:
        raise PayloadInvalidError("the batch is empty: send at least one row")
    for name, given in (("prefix_lengths", prefix_lengths), ("row_windows", row_windows)):
        if given and len(given) != len(row_lengths):
            raise PayloadInvalidError(
                f"{name} has {len(given)} entries for {len(row_lengths)} rows: give one a row, "
                "or none",
                facts={"entries": len(given), "rows": len(row_lengths)},
            )
    _check_lengths("row", row_lengths, input_ids, shortest=1)
    _check_lengths("prefix", prefix_lengths, prefix_ids, shortest=0)
    windows = tuple(row_windows) or tuple((0, length) for length in row_lengths)
    for row, (first, count) in enumerate(row_windows):
        length = row_lengths[row]
        if first < 0 or count < 0 or first + count > length:
            raise PayloadInvalidError(
                f"row {row} has {length} tokens, and positions {first} to {first + count} were "
                f"asked for: a window starts at 0 or later and ends at {length} or before",
                facts={"row": row, "tokens": length, "first": first, "count": count},
            )
    raw_ids = bytearray(input_ids)
    return Request(
        raw_ids=raw_ids,
        token_ids=_int32(raw_ids),
        row_starts=_starts(row_lengths),
        prefix_ids=_int32(bytearray(prefix_ids)),
        prefix_starts=_starts(prefix_lengths or [0] * len(row_lengths)),
        windows=windows,
        position_starts=_starts([count for _, count in windows]),
    )


def check_request(
    request: Request, *, vocabulary_size: int, teacher_vocabulary_size: int, max_row_tokens: int
) -> None:
    """Hold a request against a teacher and the vocabulary that its session settled on.

    A prefix is the teacher's own text and may use all of the teacher's vocabulary.

    Raises:
        PayloadInvalidError: a row is too long, or an id is outside the vocabulary.
    """
    rows = request.row_starts
    prefixes = request.prefix_starts
    for row, ((start, end), (before, behind)) in enumerate(
        zip(pairwise(rows), pairwise(prefixes), strict=True)
    ):
        own, prefix = end - start, behind - before
        if own + prefix > max_row_tokens:
            beside = f" behind a prefix of {prefix}" if prefix else ""
            raise PayloadInvalidError(
                f"row {row} has {own} tokens{beside}, and the teacher reads {max_row_tokens} at "
                "most: shorten it",
                facts={"row": row, "tokens": own, "prefix": prefix, "limit": max_row_tokens},
            )
    _check_ids("row", request.token_ids, rows, vocabulary_size)
    _check_ids("the prefix of row", request.prefix_ids, prefixes, teacher_vocabulary_size)


def _check_lengths(what: str, lengths: Sequence[int], ids: bytes, *, shortest: int) -> None:
    if min(lengths, default=shortest) < shortest:
        row, length = next((r, each) for r, each in enumerate(lengths) if each < shortest)
        rule = "a row has at least one token" if shortest else "lengths start at 0"
        raise PayloadInvalidError(
            f"{what} {row} has length {length}: {rule}", facts={"row": row, "length": length}
        )
    total = sum(lengths)
    if total * 4 != len(ids):
        raise PayloadInvalidError(
            f"{what} lengths add up to {total} tokens, which take {total * 4} bytes, and "
            f"{len(ids)} bytes of ids came: send int32 without padding",
            facts={"tokens": total, "expected_bytes": total * 4, "size_bytes": len(ids)},
        )


def _check_ids(what: str, ids: torch.Tensor, starts: Sequence[int], size: int) -> None:
    # By parts that torch looks at without its threads: the caller may be the serving thread.
    bounds = [part.aminmax() for part in ids.split(_SERIAL_ELEMENTS) if len(part)]
    if all(int(least) >= 0 and int(most) < size for least, most in bounds):
        return
    at = int(((ids < 0) | (ids >= size)).nonzero()[0])
    row = bisect_right(starts, at) - 1
    raise PayloadInvalidError(
        f"{what} {row} has id {int(ids[at])} at position {at - starts[row]}, outside the "
        f"vocabulary of {size}: leave padding out, and check that the tokenizer is the teacher's",
        facts={
            "row": row,
            "position": at - starts[row],
            "token_id": int(ids[at]),
            "vocabulary_size": size,
        },
    )


def _int32(ids: bytearray) -> torch.Tensor:
    if not ids:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(ids, dtype=torch.int32)


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))
