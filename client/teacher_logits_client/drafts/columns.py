"""Columns of a draft: tensors over its room, each known to be unwritten until it is written.

Room is used again and holds older payloads' bytes. So what a teacher is to write starts out
with a mark, the bits of a NaN (or an id) that no arithmetic yields, one a position and column;
``unwritten`` finds what still has it. What describes the rows is written at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.digest import payload_digest
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.keys import PayloadKey
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.layout import ElementType, lay_out, top_k_columns
from teacher_logits.payload import Payload
from teacher_logits.profiles import NEEDED_COLUMNS
from teacher_logits.selection import Selection, row_statuses
from teacher_logits.shard_parts import part_of, shard_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.layout import Column
    from teacher_logits.payload_room import WriterRoom
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_client.drafts.rows import DraftRows
    from teacher_logits_client.slabs.placed_columns import PlacedColumns

WRITTEN_BY_TEACHER = (
    Kind.TOPK_IDS,
    Kind.TOPK_LOGPROBS,
    Kind.TOPK_LOGITS,
    Kind.LOG_TAIL,
    Kind.LOGSUMEXP,
    Kind.ACTUAL_LOGPROB,
)
"""The columns that a teacher fills, by ``select_top_k`` or by itself."""

NOT_SELECTED = 255
"""Status of a position into which nothing was selected: whoever wrote it wrote the columns."""

UNKNOWN = 255
"""Status of a row that a teacher wrote by itself or has views of, or not selected as a whole."""

_INTEGERS = {4: torch.int32, 2: torch.int16}
_MARKS = {
    torch.int32: -(1 << 31),
    torch.float32: 0x7FC0DEAD,
    torch.float16: 0x7E5A,
    torch.bfloat16: 0x7FDA,
}


def columns_of(profile: TeacherProfile, rows: DraftRows) -> tuple[tuple[Column, ...], int]:
    """Place the columns that a teacher promises; return them and the payload's size in bytes.

    Raises:
        PayloadInvalidError: the profile promises columns that this release cannot write, or
            lacks some that it needs.
    """
    columns, _ = top_k_columns(
        row_count=len(rows.rows),
        position_count=rows.position_count,
        top_k=profile.top_k,
        temperature_count=len(temperatures_of(profile)),
        value_type=profile.value_type,
        with_logits=True,
    )
    needed, wanted = frozenset(NEEDED_COLUMNS), frozenset(profile.columns)
    known = {column.kind for column in columns}
    if not needed <= wanted <= known:
        unknown = ", ".join(sorted(kind.value for kind in wanted - known)) or "none"
        missing = ", ".join(sorted(kind.value for kind in needed - wanted)) or "none"
        raise PayloadInvalidError(
            f"the teacher's profile promises columns that this release does not write ({unknown}), "
            f"or leaves out some that every payload has ({missing}): publishers write the K best "
            "of each position, and samples or chosen ids come from a server's engine",
            facts={"unknown": unknown, "missing": missing},
        )
    specs = [(c.kind, c.element_type, c.shape) for c in columns if c.kind in wanted]
    if rows.held is not None:
        runs = 2 * rows.held.runs.shape[1]
        specs.append((Kind.ROW_RUNS, ElementType.INT32, (len(rows.rows), runs)))
    return lay_out(specs)


def temperatures_of(profile: TeacherProfile) -> tuple[float, ...]:
    """Return the temperatures of a teacher's payloads: 1, then the others."""
    return tuple(dict.fromkeys((1.0, *profile.temperatures)))


def describe(
    profile: TeacherProfile, step: int, rows: DraftRows, *, placed: PlacedColumns | None = None
) -> Payload:
    """Return what will be written, without the id that its payload will have.

    ``placed`` are its columns where its publisher's own tensors hold them.

    Raises:
        PayloadInvalidError: see ``columns_of``.
    """
    if placed is None:
        columns, size_bytes = columns_of(profile, rows)
    else:
        columns, size_bytes = placed.columns, placed.size_bytes
    return Payload(
        payload_id="",
        teacher_id=profile.teacher_id,
        teacher_revision=profile.revision,
        first_row=rows.rows.start,
        row_count=len(rows.rows),
        position_count=rows.position_count,
        top_k=profile.top_k,
        temperatures=temperatures_of(profile),
        vocabulary_size=profile.vocabulary_size,
        columns=columns,
        size_bytes=size_bytes,
        whole_rows=rows.are_whole,
        selection=profile.selection,
        key=PayloadKey(teacher_id=profile.teacher_id, step=step, shard=shard_of(profile)),
        part=part_of(profile),
    )


class DraftColumns:
    """A draft's tensors. ``selection`` are those that a teacher fills, over the room where the
    payload has them, and ``by_kind`` all that the payload has.

    ``row_statuses`` uint8 [N] are the statuses of rows that were selected into as a whole and not
    touched otherwise, before or after, which need no other check; ``UNKNOWN`` for the others.
    ``bad_row_count`` is what a check of all found, None where something was written since.
    All of these are where the ids are; columns over rows may be elsewhere.
    """

    def __init__(
        self,
        tensors: Mapping[Kind, torch.Tensor],
        rows: DraftRows,
        *,
        temperatures: int,
        is_written: bool = False,
    ) -> None:
        """Take tensors over the room; ``is_written`` where a teacher has filled them already."""
        self.by_kind = found = dict(tensors)
        self.device = device = found[Kind.TOPK_IDS].device
        positions = rows.position_count
        beside = (positions, temperatures)
        self.selection = Selection(
            topk_ids=found[Kind.TOPK_IDS],
            topk_logprobs=found[Kind.TOPK_LOGPROBS],
            log_tail=found[Kind.LOG_TAIL],
            logsumexp=(
                found[Kind.LOGSUMEXP]
                if Kind.LOGSUMEXP in found
                else torch.empty(beside, dtype=torch.float32, device=device)
            ),
            actual_logprob=found.get(Kind.ACTUAL_LOGPROB),
            status=torch.full((positions,), NOT_SELECTED, dtype=torch.uint8, device=device),
            topk_logits=found.get(Kind.TOPK_LOGITS),
        )
        self.row_statuses = torch.full((len(rows.rows),), UNKNOWN, dtype=torch.uint8, device=device)
        #: Bool [N]: rows that were written by hand, or of which views were given out, once.
        self.touched = torch.zeros(len(rows.rows), dtype=torch.bool, device=device)
        self.bad_row_count: int | None = None
        #: Bool [P]: whose status a check has found by their values; None where there are none.
        self.by_hand: torch.Tensor | None = None
        if is_written:
            self.touched.fill_(True)
        else:
            self._mark(rows)
        self._describe(rows)

    def _describe(self, rows: DraftRows) -> None:
        """Write what describes the rows."""
        found = self.by_kind
        found[Kind.ROW_OFFSETS].copy_(rows.offsets)
        found[Kind.ROW_WINDOWS].copy_(rows.windows)
        if rows.held is not None:
            found[Kind.ROW_RUNS].copy_(rows.held.runs.flatten(1))
        digests = torch.frombuffer(bytearray(rows.digests), dtype=torch.uint8)
        found[Kind.ROW_DIGESTS].copy_(digests.view_as(found[Kind.ROW_DIGESTS]))
        found[Kind.ROW_STATUS].zero_()

    def _mark(self, rows: DraftRows) -> None:
        """Mark all that a teacher is to fill as unwritten."""
        for kind in self._filled():
            _marked(self.by_kind[kind]).fill_(_MARKS[self.by_kind[kind].dtype])
        if self.selection.actual_logprob is not None:
            has_next = rows.has_next().to(self.device)
            self.selection.actual_logprob.masked_fill_(~has_next, 0.0)

    def touch(self, rows: slice, positions: slice) -> None:
        """Note that some rows are written by hand, or views of them given to who may write."""
        self.touched[rows] = True
        self.begin(rows, positions)

    def begin(self, rows: slice, positions: slice) -> None:
        """Note that some rows are about to be written."""
        self.row_statuses[rows] = UNKNOWN
        self.bad_row_count = None
        if self.by_hand is not None:  # what a check has found of them is of before
            self.selection.status[positions][self.by_hand[positions]] = NOT_SELECTED

    def note_selected(self, rows: slice, positions: slice, offsets: torch.Tensor) -> None:
        """Note that rows were selected into: these positions, from ``offsets`` [N+1] on."""
        found = row_statuses(self.selection.status[positions], offsets)
        self.row_statuses[rows] = found.masked_fill(self.touched[rows], UNKNOWN)

    def writable(self, positions: slice) -> dict[str, torch.Tensor]:
        """Return what a teacher fills of some positions, by name."""
        return {kind.value: self.by_kind[kind][positions] for kind in self._filled()}

    def unwritten(self, kind: Kind) -> torch.Tensor:
        """Return bool [P]: the positions of a column that nobody has written."""
        tensor = self.by_kind[kind]
        return _marked(tensor) == _MARKS[tensor.dtype]

    def _filled(self) -> list[Kind]:
        return [kind for kind in WRITTEN_BY_TEACHER if kind in self.by_kind]


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    """Return the last entry of each position, as integers: whoever fills a row gets there."""
    last = tensor if tensor.dim() == 1 else tensor[:, -1]
    return last.view(_INTEGERS[tensor.element_size()])


def digest_of(payload: Payload, room: WriterRoom) -> str:
    """Return the digest of a draft's bytes."""
    return payload_digest(
        (
            column.kind.value,
            column.element_type.value,
            column.shape,
            room.read(column),
        )
        for column in payload.columns
    )
