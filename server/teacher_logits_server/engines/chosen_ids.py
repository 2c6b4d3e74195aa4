"""Chosen ids: those of a client, as they came over the wire, held against its rows.

Refuses by position, with the numbers, the rule and the way out, before anything is computed:
none at all, more than the teacher gives entries, too few or too many bytes for the positions that
are wanted, ids outside the vocabulary, and one that stands at a position twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.selection.given_ids import check_ids

if TYPE_CHECKING:
    from teacher_logits_server.engines.requests import Request

_ID_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ChosenIds:
    """Ids of a request: int32, little-endian, ``per_position`` for each wanted position in turn.

    -1 fills up where a position wants fewer.
    """

    data: bytes
    per_position: int


def check_count(chosen: ChosenIds, *, position_count: int, most: int) -> None:
    """Refuse what are not ``per_position`` ids for each position, from 1 to ``most``.

    Raises:
        PayloadInvalidError: with the numbers.
    """
    count = chosen.per_position
    if not 1 <= count <= most:
        raise PayloadInvalidError(
            f"{count} ids a position are to be scored, and the teacher gives 1 to {most}: choose "
            "fewer a request, or have the server's --top-k raised",
            facts={"ids_per_position": count, "limit": most},
        )
    expected = position_count * count * _ID_BYTES
    if len(chosen.data) != expected:
        raise PayloadInvalidError(
            f"{count} ids for each of {position_count} positions take {expected} bytes, and "
            f"{len(chosen.data)} came: send int32 for each wanted position, and -1 where one wants "
            "fewer",
            facts={
                "positions": position_count,
                "ids_per_position": count,
                "expected_bytes": expected,
                "size_bytes": len(chosen.data),
            },
        )


def read_chosen_ids(
    chosen: ChosenIds, request: Request, *, vocabulary_size: int, most: int
) -> torch.Tensor:
    """Return the ids of a request's wanted positions, int32 [P,M].

    Raises:
        PayloadInvalidError: see the module.
    """
    position_count = request.position_count
    check_count(chosen, position_count=position_count, most=most)
    if not position_count:
        return torch.empty(0, chosen.per_position, dtype=torch.int32)
    ids = torch.frombuffer(bytearray(chosen.data), dtype=torch.int32)
    ids = ids.view(position_count, chosen.per_position)
    firsts = [first for first, _ in request.windows]
    check_ids(ids, vocabulary_size, starts=request.position_starts, firsts=firsts)
    return ids
