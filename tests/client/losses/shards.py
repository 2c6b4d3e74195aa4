"""Shards of registered steps, as a right-minded publisher writes them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from teacher_logits.cuts import cut_rows
from teacher_logits.digest import row_digest
from teacher_logits.keys import PayloadKey
from teacher_logits.layout import ColumnKind, ElementType, RowStatus, top_k_columns
from teacher_logits.payload import Payload
from teacher_logits.selection import Selection, select_top_k
from teacher_logits.tensors import column_tensors

VOCABULARY_SIZE, K = 16, 4
Ids = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A payload, its bytes, and the positions of each of its rows."""

    payload: Payload
    data: bytes
    positions: tuple[int, ...]

    def cut(self, first_row: int, row_count: int) -> "Shard":
        """What a streamed reader of some of the rows is sent."""
        cut = cut_rows(self.payload, self.positions, first_row=first_row, row_count=row_count)
        data = bytearray(cut.payload.size_bytes)
        for each in cut.segments:
            stop = each.source_offset_bytes + each.size_bytes
            data[each.offset_bytes : each.offset_bytes + each.size_bytes] = self.data[
                each.source_offset_bytes : stop
            ]
        first = first_row - self.payload.first_row
        return Shard(
            payload=cut.payload,
            data=bytes(data),
            positions=self.positions[first : first + row_count],
        )


def some_ids(count: int, *, seed: int = 0) -> Ids:
    """Rows of varied lengths."""
    dice = random.Random(seed)
    return [
        [dice.randrange(VOCABULARY_SIZE) for _ in range(dice.randint(2, 7))] for _ in range(count)
    ]


def logits_of(row: Sequence[int], *, shift: int = 0) -> torch.Tensor:
    """What the teacher says about a row [L,V]; it likes the token that comes next."""
    generator = torch.Generator().manual_seed(sum(row) + 31 * len(row))
    logits = torch.randn(len(row), VOCABULARY_SIZE, generator=generator)
    following = torch.tensor([*row[1:], row[0]]).roll(shift)
    return logits.scatter_add_(1, following.unsqueeze(1), torch.full((len(row), 1), 3.0))


def shard_of(
    ids: Ids,
    *,
    step: int = 7,
    shard: int = 0,
    first_row: int = 0,
    top_k: int = K,
    temperatures: tuple[float, ...] = (1.0,),
    bad_rows: Sequence[int] = (),
) -> Shard:
    """A shard with whole rows scored; ``bad_rows``, counted in the shard, are masked."""
    lengths = [len(row) for row in ids]
    columns, size = top_k_columns(
        row_count=len(ids),
        position_count=sum(lengths),
        top_k=top_k,
        temperature_count=len(temperatures),
        value_type=ElementType.FLOAT16,
    )
    payload = Payload(
        payload_id=f"p-{step}-{shard}",
        teacher_id="teacher",
        teacher_revision="",
        first_row=first_row,
        row_count=len(ids),
        position_count=sum(lengths),
        top_k=top_k,
        temperatures=temperatures,
        vocabulary_size=VOCABULARY_SIZE,
        columns=columns,
        size_bytes=size,
        bad_row_count=len(bad_rows),
        key=PayloadKey(teacher_id="teacher", step=step, shard=shard),
    )
    data = bytearray(size)
    tensors = column_tensors(data, columns)
    selection = Selection(
        topk_ids=tensors[ColumnKind.TOPK_IDS],
        topk_logprobs=tensors[ColumnKind.TOPK_LOGPROBS],
        log_tail=tensors[ColumnKind.LOG_TAIL],
        logsumexp=tensors[ColumnKind.LOGSUMEXP],
        actual_logprob=tensors[ColumnKind.ACTUAL_LOGPROB],
        status=torch.empty(sum(lengths), dtype=torch.uint8),
    )
    start = 0
    for at, row in enumerate(ids):
        part = selection[start : start + len(row)]
        following = torch.tensor([*row[1:], -1])
        select_top_k(
            logits_of(row), k=top_k, temperatures=temperatures, next_ids=following, out=part
        )
        if at in bad_rows:
            part.blank()
            tensors[ColumnKind.ROW_STATUS][at] = RowStatus.NAN
        tensors[ColumnKind.ROW_DIGESTS][at] = torch.tensor(list(row_digest(row)))
        start += len(row)
    counts = torch.tensor(lengths)
    tensors[ColumnKind.ROW_OFFSETS][1:] = counts.cumsum(0)
    tensors[ColumnKind.ROW_WINDOWS][:, 1] = counts
    return Shard(payload=payload, data=bytes(data), positions=tuple(lengths))


def shards_of(ids: Ids, sizes: Sequence[int], *, step: int = 7, **given: object) -> list[Shard]:
    """The rows of a step in shards of some sizes."""
    shards, first = [], 0
    for number, size in enumerate(sizes):
        rows = ids[first : first + size]
        shards.append(shard_of(rows, step=step, shard=number, first_row=first, **given))  # type: ignore[arg-type]
        first += size
    return shards
