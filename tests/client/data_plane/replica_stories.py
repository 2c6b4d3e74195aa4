"""What a rank of a replica does with its turn, and what it says of it. No test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from teacher_logits.errors import TeacherLogitsError
from teacher_logits_client.data_plane.group_reads import GroupReads
from teacher_logits_client.data_plane.jagged import pack_jagged
from teacher_logits_client.data_plane.row_store import RowsMissingError

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = (3, 0, 1)


def fields_of(rank: int) -> dict[str, torch.Tensor]:
    """Nested and dense, of several types, some of nothing; of a rank, so that it is told."""
    return pack_jagged(
        {
            "input_ids": torch.arange(9).reshape(3, 3) + rank,
            "input_lengths": torch.tensor(LENGTHS) + rank,
            "advantages": (torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(rank))).to(
                torch.bfloat16
            ),
            "token_mask": torch.ones(3, 3, dtype=torch.bool),
            "nothing": torch.zeros(3, 0),
        },
        LENGTHS,
    )


def shared(group: dist.ProcessGroup, rank: int) -> tuple[bool, int, list[str]]:
    """Whether it leads, how often it read, and its fields in words."""
    reads = []

    def read() -> dict[str, torch.Tensor]:
        reads.append(rank)
        return fields_of(rank)

    replica = GroupReads(group=group)
    words = in_words(replica.share(read))
    return replica.is_leader, len(reads), words


def in_words(fields: dict[str, torch.Tensor]) -> list[str]:
    """Everything of the fields, as text: what travels between processes is plain."""
    rows = {
        name: [row.tolist() for row in each.unbind()] if each.is_nested else each.tolist()
        for name, each in fields.items()
    }
    return [f"{name} {fields[name].dtype} {fields[name].is_nested} {rows[name]}" for name in rows]


def of_what_failed(group: dist.ProcessGroup, rank: int) -> str:
    """What a rank is told where the leader finds no rows; and that the next turn is as ever."""

    def nothing() -> dict[str, torch.Tensor]:
        raise RowsMissingError("row 'c' is not there")

    replica = GroupReads(group=group)
    said = _told(lambda: replica.share(nothing))
    replica.share(lambda: fields_of(rank))
    return said


def _told(call: Callable[[], object]) -> str:
    try:
        call()
    except TeacherLogitsError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
