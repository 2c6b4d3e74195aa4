"""Answers: the columns of a scored payload, filled in place from an engine's chunks of logits.

    engine -> chunk [c,V] -> split at the borders of requests -> select_top_k -> columns

Requests of one pass may differ in k, temperatures, vocabulary and element type; each gets what
it asked for. Promises: a chunk is selected from before the next is asked for, and what is kept
is written where it will be read. Refuses logits that have another shape or number than the
rows asked for, and, unless told to mask them, rows with a NaN, +inf or nothing finite.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import Column, ColumnKind, RowStatus
from teacher_logits.selection import Selection, row_statuses, select_top_k

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from teacher_logits.payload_room import WriterRoom
    from teacher_logits_server.engines import Engine
    from teacher_logits_server.engines.requests import Request

_BAD = {
    RowStatus.NAN: "a NaN",
    RowStatus.POSITIVE_INFINITY: "a +inf",
    RowStatus.EMPTY_SUPPORT: "nothing finite",
}


class Answer:
    """The columns of one request, in room that stays the caller's.

    ``selection`` holds the columns that an engine fills; row after row, position after position.
    Its tensors view the room: drop the answer before the room goes to somebody else.
    """

    def __init__(
        self,
        request: Request,
        *,
        room: WriterRoom,
        columns: Sequence[Column],
        temperatures: tuple[float, ...],
        vocabulary_size: int,
    ) -> None:
        """Lay the columns over ``room``; what describes the rows is written at once.

        Columns over positions may lie on a device, and so does what is computed beside them then;
        those over rows are on the host, and what is computed from these too.
        ``columns`` are those of ``layout.top_k_columns``.
        """
        self.request = request
        self._temperatures = temperatures
        self._vocabulary_size = vocabulary_size
        self._next_ids = request.next_ids()
        self._room = room
        self._tensors = room.tensors(columns)
        topk_ids = self._tensors[ColumnKind.TOPK_IDS]
        self.selection = Selection(
            topk_ids=topk_ids,
            topk_logprobs=self._tensors[ColumnKind.TOPK_LOGPROBS],
            log_tail=self._tensors[ColumnKind.LOG_TAIL],
            logsumexp=self._tensors[ColumnKind.LOGSUMEXP],
            actual_logprob=self._tensors[ColumnKind.ACTUAL_LOGPROB],
            status=torch.zeros(request.position_count, dtype=torch.uint8, device=topk_ids.device),
        )
        self._tensors[ColumnKind.ROW_OFFSETS].copy_(torch.tensor(request.position_starts))
        self._tensors[ColumnKind.ROW_WINDOWS].copy_(torch.tensor(request.windows))
        self._tensors[ColumnKind.ROW_DIGESTS].copy_(request.digests())

    def write(self, logits: torch.Tensor, first_position: int) -> None:
        """Select from logits [c,V] of the positions that start at ``first_position``.

        Straight into the room where the logits are on its device, and by a copy elsewhere. Work
        that is given to a device is done when ``finish`` has returned.
        """
        part = slice(first_position, first_position + len(logits))
        out = self.selection[part]
        is_there = logits.device == out.topk_ids.device
        beside = out if is_there else _like(out, logits.device)
        select_top_k(
            logits,
            k=out.topk_ids.shape[1],
            temperatures=self._temperatures,
            vocab_size=self._vocabulary_size,
            next_ids=self._next_ids[part],
            out=beside,
        )
        if beside is not out:
            _copy(beside, out)

    def finish(self, *, mask: bool) -> int:
        """Write ``row_status``, wait until all is written, and return how many rows are bad.

        With ``mask`` all positions of a bad row become canonical: ids -1, numbers 0.

        Raises:
            PayloadInvalidError: without ``mask``, of the first bad row.
            DeviceError: the device of the room failed at what it was given.
        """
        offsets = self._tensors[ColumnKind.ROW_OFFSETS]
        status = self.selection.status.cpu()
        statuses = row_statuses(status, offsets)
        self._tensors[ColumnKind.ROW_STATUS].copy_(statuses)
        bad = (statuses != RowStatus.OK).nonzero().flatten().tolist()
        if bad and not mask:
            raise self._refuse(bad[0], RowStatus(int(statuses[bad[0]])), len(bad), status)
        for row in bad:
            self.selection[int(offsets[row]) : int(offsets[row + 1])].blank()
        self._room.settle()
        return len(bad)

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some rows of an answer, to be computed in one pass."""

    answer: Answer
    first_row: int
    row_count: int

    @property
    def positions(self) -> range:
        """Where the rows' positions lie in the answer."""
        starts = self.answer.request.position_starts
        return range(starts[self.first_row], starts[self.first_row + self.row_count])


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
        yield part.answer, part.positions


def _check_chunk(chunk: torch.Tensor, head_rows: int, missing: int) -> None:
    if chunk.dim() != 2 or chunk.shape[1] != head_rows:
        raise ValueError(f"the engine gave logits {tuple(chunk.shape)}, not [c, {head_rows}]")
    if len(chunk) > missing:
        raise ValueError(f"the engine gave {len(chunk)} positions where {missing} were missing")


def _like(selection: Selection, device: torch.device) -> Selection:
    actual = selection.actual_logprob
    return Selection(
        topk_ids=torch.empty_like(selection.topk_ids, device=device),
        topk_logprobs=torch.empty_like(selection.topk_logprobs, device=device),
        log_tail=torch.empty_like(selection.log_tail, device=device),
        logsumexp=torch.empty_like(selection.logsumexp, device=device),
        actual_logprob=None if actual is None else torch.empty_like(actual, device=device),
        status=torch.empty_like(selection.status, device=device),
    )


def _copy(source: Selection, target: Selection) -> None:
    for field in fields(Selection):
        tensor = getattr(target, field.name)
        if tensor is not None:
            tensor.copy_(getattr(source, field.name))
