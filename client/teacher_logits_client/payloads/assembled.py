"""Assembled parts: rows whose positions or ids several payloads divide, put together.

    context-parallel parts   each position is placed where it stands in its row (``shard_plan``)
    tensor-parallel parts    their K best are merged (``shard_merging``)

    shard 0, rows of 8 positions   | a b . . . . c d |
    shard 1                        | . . e f g h . . |
    assembled                      | a b e f g h c d |

Promises: a part that is missing, there twice, or at other positions than those beside it is
refused, with what is missing; nothing is filled in. One copy is made, when a column is asked for;
where one payload holds all positions of the rows and all ids, it is viewed. A row that is bad in
one part is bad, and blank in all.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from teacher_logits.error_bounds import EXACT
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.layout import RowStatus, is_on_device, lay_out
from teacher_logits_client.payloads.row_parts import RowPart
from teacher_logits_client.payloads.shard_merging import merge_vocabulary
from teacher_logits_client.payloads.shard_places import places_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits.error_bounds import ErrorBound
    from teacher_logits.layout import Column
    from teacher_logits.payload import Payload
    from teacher_logits_client.payloads.row_columns import Part

_HOST = torch.device("cpu")
_UNKNOWN = 0
"""The bytes of a digest whose publisher was given no token ids."""


def assemble(parts: Sequence[Part]) -> list[RowPart]:
    """Return parts of a step with those put together that divide the same rows, in order.

    Raises:
        PayloadInvalidError: a part of some rows is missing, there twice, or elsewhere.
    """
    found: list[RowPart] = []
    for (first_row, row_count), group in groupby(parts, lambda p: (p.first_row, p.row_count)):
        same = list(group)
        if len(same) == 1 and same[0].payload.part is None:
            found += same
            continue
        whole = next((part for part in same if part.payload.part is None), None)
        if whole is not None:
            raise PayloadInvalidError(
                f"rows {first_row} to {first_row + row_count - 1} are in payload "
                f"{whole.payload.payload_id} whole, and in {len(same) - 1} others",
                facts={"first_row": first_row, "payloads": len(same)},
            )
        found.append(AssembledPart(same))
    return found


class AssembledPart(RowPart):
    """Some rows, over the payloads that divide them; see the module.

    ``row_offsets`` count from 0, and ``row_windows`` are those of whole rows.
    """

    def __init__(self, shards: Sequence[Part]) -> None:
        """Take the same rows of each payload.

        Raises:
            PayloadInvalidError: see ``assemble``.
        """
        self._shards = sorted(shards, key=_place)
        #: Of each context-parallel part, its tensor-parallel ones.
        self._columns = [list(group) for _, group in groupby(self._shards, lambda s: _place(s)[0])]
        self.row_count = shards[0].row_count
        _check_alike(self._shards)
        _check_all_there(self._columns)
        self._places = places_of(self._columns)
        self._merges = len(self._columns[0]) > 1
        self.is_copy = self._merges or not self._places.is_view
        self.payload = _describe(self._shards, self._places.position_count)
        self._made: dict[Kind, torch.Tensor] = {}

    @property
    def first_row(self) -> int:
        """See ``RowPart``."""
        return self._shards[0].first_row

    @property
    def device(self) -> torch.device:
        """See ``RowPart``: the first that some payload is on; the host where none is."""
        return next((each.device for each in self._shards if each.device != _HOST), _HOST)

    @property
    def bound(self) -> ErrorBound:
        """See ``RowPart``."""
        return next((each.bound for each in self._shards if not each.bound.is_exact), EXACT)

    @property
    def status(self) -> memoryview:
        """See ``RowPart``: of each row the worst that its parts say."""
        statuses = [bytes(each.status) for each in self._shards]
        if not any(map(any, statuses)):
            return memoryview(statuses[0])
        return memoryview(bytes(map(_worst, zip(*statuses, strict=True))))

    def rows(self, first: int, row_count: int) -> AssembledPart:
        """Return some of these rows."""
        return AssembledPart([each.rows(first, row_count) for each in self._shards])

    def look_again(self) -> None:
        """See ``RowPart``."""
        for each in self._shards:
            each.look_again()
        self._made.clear()

    def __getitem__(self, kind: Kind) -> torch.Tensor:
        made = self._made.get(kind)
        if made is not None:
            return made
        self.payload.column(kind)
        found = self._make(kind)
        if self.is_copy:  # a view is its payload's to keep, which counts those that are left
            self._made |= found
        return found[kind]

    def __iter__(self) -> Iterator[Kind]:
        return iter(column.kind for column in self.payload.columns)

    def __len__(self) -> int:
        return len(self.payload.columns)

    def _make(self, kind: Kind) -> dict[Kind, torch.Tensor]:
        if kind is Kind.ROW_OFFSETS:
            return {kind: self._places.offsets}
        if kind is Kind.ROW_WINDOWS:
            return {kind: self._places.windows}
        if kind is Kind.ROW_STATUS:
            return {kind: torch.frombuffer(bytearray(self.status), dtype=torch.uint8)}
        if kind is Kind.ROW_DIGESTS:
            return {kind: _same_digests(self._shards)}
        if not self._merges:
            return self._placed([{kind: each[0][kind]} for each in self._columns])
        merged = [
            merge_vocabulary([(each.payload, each) for each in column], device=self.device)
            for column in self._columns
        ]
        return self._placed(merged)

    def _placed(self, sources: list[dict[Kind, torch.Tensor]]) -> dict[Kind, torch.Tensor]:
        found = {}
        for kind in sources[0]:
            tensors = [source[kind] for source in sources]
            found[kind] = self._places.place(tensors, device=self.device)
        if self.is_copy:
            self._blank(found)
        return found

    def _blank(self, found: dict[Kind, torch.Tensor]) -> None:
        """Make bad rows blank, as ``Selection.blank`` does, wherever their fault was."""
        bad = self[Kind.ROW_STATUS] != RowStatus.OK
        if not bool(bad.any()):
            return
        positions = bad.repeat_interleave(self._places.offsets.diff())
        for kind, tensor in found.items():
            tensor[positions.to(tensor.device)] = -1 if kind is Kind.TOPK_IDS else 0


def _place(shard: Part) -> tuple[int, int]:
    part = shard.payload.part
    return (0, 0) if part is None else (part.sequence_part, part.first_id)


def _worst(statuses: tuple[int, ...]) -> int:
    """Return the worst of some statuses: the smaller, the worse, and OK is best."""
    return min((each for each in statuses if each != RowStatus.OK), default=int(RowStatus.OK))


def _check_alike(shards: Sequence[Part]) -> None:
    """Refuse parts of which some say other things than others, or in other types."""
    first = shards[0].payload
    for payload in (shard.payload for shard in shards[1:]):
        for what, mine, theirs in (
            ("top_k", first.top_k, payload.top_k),
            ("temperatures", first.temperatures, payload.temperatures),
            ("vocabulary_size", first.vocabulary_size, payload.vocabulary_size),
            ("selection", first.selection, payload.selection),
            ("columns", _entries_of(first), _entries_of(payload)),
        ):
            if mine != theirs:
                raise PayloadInvalidError(
                    f"payloads {first.payload_id} and {payload.payload_id} are parts of the same "
                    f"rows, and have {what} {mine} and {theirs}: all ranks of a teacher write "
                    "alike",
                    facts={"what": what, "first": str(mine)[:200], "other": str(theirs)[:200]},
                )


def _entries_of(payload: Payload) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what each position, or row, has of each column."""
    return {
        each.kind.value: (each.element_type.value, each.shape[1:])
        for each in payload.columns
        if each.kind is not Kind.ROW_RUNS
    }


def _check_all_there(columns: Sequence[Sequence[Part]]) -> None:
    """Refuse rows of which a part is missing or there twice."""
    first = columns[0][0]
    part, size = first.payload.part, first.payload.vocabulary_size
    if part is None:
        raise ValueError(f"payload {first.payload.payload_id} is no part")
    there = {_place(column[0])[0] for column in columns}
    lacking = [each for each in range(part.sequence_parts) if each not in there]
    if lacking:
        raise _lacking(first, f"sequence part {lacking[0]} of {part.sequence_parts}")
    for at, column in enumerate(columns):
        expected = 0
        for shard in column:
            own = shard.payload.part
            if own is None or own.sequence_parts != part.sequence_parts or own.first_id != expected:
                raise _lacking(shard, f"sequence part {at}, ids from {expected} on, once")
            expected = own.stop_id
        if expected != size:
            raise _lacking(first, f"sequence part {at}, ids {expected} to {size - 1}")


def _lacking(shard: Part, what: str) -> PayloadInvalidError:
    rows = f"rows {shard.first_row} to {shard.first_row + shard.row_count - 1}"
    return PayloadInvalidError(
        f"{rows} were granted without {what}: each part of them comes from a shard, once, and "
        "nothing is filled in",
        facts={"first_row": shard.first_row, "row_count": shard.row_count, "lacking": what},
    )


def _describe(shards: Sequence[Part], position_count: int) -> Payload:
    """Return what describes rows of several payloads as one would."""
    payload = shards[0].payload
    rows = shards[0].row_count
    columns, size_bytes = lay_out(
        (each.kind, each.element_type, (_entries(each, rows, position_count), *each.shape[1:]))
        for each in payload.columns
        if each.kind is not Kind.ROW_RUNS
    )
    return replace(
        payload,
        first_row=shards[0].first_row,
        row_count=rows,
        position_count=position_count,
        columns=columns,
        size_bytes=size_bytes,
        whole_rows=all(each.payload.whole_rows for each in shards),
        part=None,
    )


def _entries(column: Column, rows: int, positions: int) -> int:
    """Return the entries of a column's outermost axis, of so many rows and positions."""
    if is_on_device(column.kind):
        return positions
    return rows + 1 if column.kind is Kind.ROW_OFFSETS else rows


def _same_digests(shards: Sequence[Part]) -> torch.Tensor:
    """Return the digests of rows, which all parts know alike, or not at all.

    Raises:
        AlignmentError: two parts are of rows with other tokens.
    """
    found = shards[0][Kind.ROW_DIGESTS].clone()
    for shard in shards[1:]:
        own = shard[Kind.ROW_DIGESTS]
        is_unknown, is_known = (found == _UNKNOWN).all(1), (own != _UNKNOWN).any(1)
        found[is_unknown] = own[is_unknown]
        differs = (is_known & (found != own).any(1)).nonzero().flatten()
        if len(differs):
            row = shard.first_row + int(differs[0])
            raise AlignmentError(
                f"the shards of row {row} are of other tokens: its digest differs between payload "
                f"{shards[0].payload.payload_id} and {shard.payload.payload_id}; give all ranks of "
                "the teacher the same input_ids",
                facts={"row": row},
            )
    return found
