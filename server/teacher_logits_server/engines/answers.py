"""Answers: the columns of a scored payload, filled in place from an engine's chunks of logits.

    engine -> chunk [c,V] -> split at the borders of requests -> keeper -> columns

Requests of one pass may differ in k, temperatures, vocabulary, element type and in what is kept;
each gets what it asked for. Promises: a chunk is selected from before the next is asked for, and
what is kept is written where it will be read. Refuses logits that have another shape or number
than the rows asked for, and, unless told to mask them, rows with a NaN, +inf or nothing finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import Column, ColumnKind, RowStatus
from teacher_logits.selection import row_statuses
from teacher_logits_server.engines.keepers import make_keeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from teacher_logits.payload_room import WriterRoom
    from teacher_logits_server.engines import Engine
    from teacher_logits_server.engines.keepers import Wanted
    from teacher_logits_server.engines.requests import Request

_BAD = {
    RowStatus.NAN: "a NaN",
    RowStatus.POSITIVE_INFINITY: "a +inf",
    RowStatus.EMPTY_SUPPORT: "nothing finite",
}


class Asked:
    """A request's columns, wherever they are to lie: what is wanted of its rows, and its layout."""

    def __init__(self, request: Request, *, columns: Sequence[Column], wanted: Wanted) -> None:
        """``columns`` are those that ``layout`` places for the rule of ``wanted``."""
        self.request = request
        self.columns = tuple(columns)
        self.wanted = wanted

    def check(self, status: torch.Tensor, *, mask: bool) -> tuple[torch.Tensor, list[int]]:
        """Return the status of each row, by that of each position (uint8 [P]), and the bad rows.

        Raises:
            PayloadInvalidError: without ``mask``, of the first bad row.
        """
        offsets = torch.tensor(self.request.position_starts)
        statuses = row_statuses(status, offsets)
        bad: list[int] = (statuses != RowStatus.OK).nonzero().flatten().tolist()
        if bad and not mask:
            raise self._refuse(bad[0], RowStatus(int(statuses[bad[0]])), len(bad), status)
        return statuses, bad

    def _refuse(
        self, row: int, status: RowStatus, bad_rows: int, of_positions: torch.Tensor
    ) -> PayloadInvalidError:
        start, end = self.request.position_starts[row : row + 2]
        at = int((of_positions[start:end] == status).nonzero()[0])
        position = self.request.windows[row][0] + at
        return PayloadInvalidError(
            f"the teacher's logits of row {row} hold {_BAD[status]} at position {position} "
            f"({bad_rows} of {self.request.row_count} rows are bad): leave the row out, or score "
            "with bad_rows mask, which masks such rows and names them in row_status",
            facts={
                "row": row,
                "position": position,
                "row_status": int(status),
                "bad_rows": bad_rows,
            },
        )


class Answer(Asked):
    """The columns of one request, in room that stays the caller's.

    ``keeper`` fills the columns that an engine fills; row after row, position after position.
    Its tensors view the room: drop the answer before the room goes to somebody else.
    """

    def __init__(
        self, request: Request, *, room: WriterRoom, columns: Sequence[Column], wanted: Wanted
    ) -> None:
        """Lay the columns over ``room``; what describes the rows is written at once.

        Columns over positions may lie on a device, and so does what is computed beside them then;
        those over rows are on the host, and what is computed from these too.
        ``columns`` are those that ``layout`` places for the rule of ``wanted``.
        """
        super().__init__(request, columns=columns, wanted=wanted)
        self._room = room
        self._tensors = room.tensors(columns)
        self.keeper = make_keeper(self._tensors, request, wanted)
        self._tensors[ColumnKind.ROW_OFFSETS].copy_(torch.tensor(request.position_starts))
        self._tensors[ColumnKind.ROW_WINDOWS].copy_(torch.tensor(request.windows))
        self._tensors[ColumnKind.ROW_DIGESTS].copy_(request.digests())

    def write(self, logits: torch.Tensor, first_position: int) -> None:
        """Keep what is wanted of logits [c,V] of the positions that start at ``first_position``.

        Straight into the room where the logits are on its device, and by a copy elsewhere. Work
        that is given to a device is done when ``finish`` has returned.
        """
        self.keeper.keep(logits, slice(first_position, first_position + len(logits)))

    def take(
        self, positions: range, tensors: Mapping[ColumnKind, torch.Tensor], status: torch.Tensor
    ) -> None:
        """Keep what another answer has kept of the same positions.

        Args:
            tensors: its columns over positions, of the same types and row sizes.
            status: what it says of each position, uint8 [c].
        """
        part = slice(positions.start, positions.stop)
        for kind, values in tensors.items():
            self._tensors[kind][part].copy_(values)
        self.keeper.status[part].copy_(status)

    def finish(self, *, mask: bool) -> int:
        """Write ``row_status``, wait until all is written, and return how many rows are bad.

        With ``mask`` all positions of a bad row become canonical: ids -1, numbers 0.

        Raises:
            PayloadInvalidError: without ``mask``, of the first bad row.
            DeviceError: the device of the room failed at what it was given.
        """
        statuses, bad = self.check(self.keeper.status.cpu(), mask=mask)
        self._tensors[ColumnKind.ROW_STATUS].copy_(statuses)
        starts = self.request.position_starts
        for row in bad:
            self.keeper.blank(slice(starts[row], starts[row + 1]))
        self._room.settle()
        return len(bad)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some rows of an answer, to be computed in one pass."""

    answer: Asked
    first_row: int
    row_count: int

    @property
    def written(self) -> Answer:
        """The answer, where its rows are written here.

        Raises:
            ValueError: they are to stay where they are computed.
        """
        if not isinstance(self.answer, Answer):
            raise ValueError("these rows are written where they are computed, and not here")
        return self.answer

    @property
    def rows(self) -> range:
        """Which rows of the answer they are."""
        return range(self.first_row, self.first_row + self.row_count)

    @property
    def positions(self) -> range:
        """Where the rows' positions lie in the answer."""
        starts = self.answer.request.position_starts
        return range(starts[self.first_row], starts[self.first_row + self.row_count])

    @property
    def token_count(self) -> int:
        """Tokens that the engine gets for the rows."""
        return sum(self.answer.request.computed_tokens()[self.first_row :][: self.row_count])


def fill(engine: Engine, parts: Sequence[Part], *, wanted: Callable[[], bool]) -> bool:
    """Run an engine once over the rows of some answers and write what it says.

    Stops between two chunks when nothing is ``wanted`` any more, and returns False then.
    Whatever the engine raises comes through. In both cases the rows can be tried anew.

    Raises:
        ValueError: the engine's chunks are not the logits of these rows.
    """
    rows = [
        row
        for part in parts
        for row in part.answer.request.engine_rows(part.first_row, part.row_count)
    ]
    total = sum(row.count for row in rows)
    if not total:
        return True
    spans = _spans(parts)
    answer, positions = next(spans)
    done = 0
    with torch.no_grad():
        for chunk in engine.logits(rows):
            _check_chunk(chunk, engine.profile.head_rows, total - done)
            done += len(chunk)
            while len(chunk):
                if not len(positions):
                    answer, positions = next(spans)
                    continue
                here = min(len(chunk), len(positions))
                answer.write(chunk[:here], positions[0])
                chunk, positions = chunk[here:], positions[here:]
            if done < total and not wanted():
                return False
    if done < total:
        raise ValueError(f"the engine gave {done} positions for {total}")
    return True


def _spans(parts: Sequence[Part]) -> Iterator[tuple[Answer, range]]:
    for part in parts:
        yield part.written, part.positions


def _check_chunk(chunk: torch.Tensor, head_rows: int, missing: int) -> None:
    if chunk.dim() != 2 or chunk.shape[1] != head_rows:
        raise ValueError(f"the engine gave logits {tuple(chunk.shape)}, not [c, {head_rows}]")
    if len(chunk) > missing:
        raise ValueError(f"the engine gave {len(chunk)} positions where {missing} were missing")
