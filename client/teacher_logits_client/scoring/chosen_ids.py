"""Chosen ids: those that a caller wants scored, checked and laid out by wanted positions.

    [P,M]              the wanted positions, one behind the other
    [N,S,M]            a rectangle as a student makes it: position p of row i at [i, p]
    a list of N rows   [count, M] of the wanted positions, or [tokens, M] of all of them

-1 stands for no id, where a position wants fewer. What the server would refuse is refused here,
before anything is sent: no ids, more than the teacher gives, other positions than are wanted, an id
that is no whole number or none of the vocabulary, and one that a position names twice.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch

from teacher_logits.selection.given_ids import check_ids
from teacher_logits.selection_rules import MAX_IDS_PER_TOKEN
from teacher_logits_client.rows.flat_rows import INTEGERS, UNREADABLE, invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.rows import RowBatch

Ids: TypeAlias = "torch.Tensor | Sequence[torch.Tensor | Sequence[Sequence[int]]]"


def check_given(ids: object) -> None:
    """Let an array or a list of rows pass.

    Raises:
        PayloadInvalidError: there are none, which would be an order for the K best; or it is
            neither.
    """
    if ids is None:
        raise invalid(
            "ids is None: give the ids to score, such as student_logits.topk(32).indices, or call "
            "session.score for the K best"
        )
    if not isinstance(ids, Iterable):
        raise invalid(
            f"ids are {reprlib.repr(ids)}, a {type(ids).__name__}: give a tensor of integers, "
            "or a list of one a row",
            given=type(ids).__name__,
        )


def flatten_ids(
    given: Ids, batch: RowBatch, *, vocabulary_size: int, most: int, max_tokens: int
) -> torch.Tensor:
    """Return the ids of a batch's wanted positions, int32 [P,M] on the CPU.

    ``most`` ids a position are taken, and in all ``MAX_IDS_PER_TOKEN`` for each of ``max_tokens``.

    Raises:
        PayloadInvalidError: naming the row, the position and the numbers.
    """
    ids = _tensor(given, "ids") if _is_array(given) else None
    if ids is None:
        flat = _of_rows(given, batch)
    elif ids.dim() == 3:
        flat = _of_rectangle(ids, batch)
    else:
        flat = ids
    positions = batch.position_count
    if flat.dim() != 2 or len(flat) != positions:
        raise invalid(
            f"ids have shape {tuple(flat.shape)}, and {positions} positions are wanted: give "
            f"integers [{positions}, M], or [rows, positions, M] in whole rows",
            positions=positions,
            given_positions=len(flat) if flat.dim() else 0,
        )
    count = flat.shape[1]
    if not 1 <= count <= most:
        raise invalid(
            f"{count} ids a position are to be scored, and the teacher gives 1 to {most}: choose "
            "fewer a request, or have the server's --top-k raised",
            ids_per_position=count,
            limit=most,
        )
    if flat.numel() > max_tokens * MAX_IDS_PER_TOKEN:
        raise invalid(
            f"{flat.numel()} ids are to be scored, and the server takes "
            f"{max_tokens * MAX_IDS_PER_TOKEN} at a time: send fewer rows a request, or fewer ids "
            "a position",
            ids=flat.numel(),
            limit=max_tokens * MAX_IDS_PER_TOKEN,
        )
    flat = flat.detach().to("cpu", torch.int64)
    firsts, counts = batch.windows[:, 0], batch.windows[:, 1]
    starts = [0, *counts.cumsum(0).tolist()]
    check_ids(flat, vocabulary_size, starts=starts, firsts=firsts.tolist())
    return flat.to(torch.int32)


def _is_array(given: object) -> bool:
    return isinstance(given, torch.Tensor) or hasattr(given, "__array__")


def _tensor(given: object, what: str) -> torch.Tensor:
    try:
        ids = given if isinstance(given, torch.Tensor) else torch.tensor(given)
    except UNREADABLE as error:
        raise invalid(f"{what} cannot be read ({error}): give integers") from None
    if ids.dtype not in INTEGERS and ids.numel():
        kind = str(ids.dtype).removeprefix("torch.")
        raise invalid(f"{what} holds {kind}: token ids are integers", dtype=kind)
    return ids


def _of_rectangle(ids: torch.Tensor, batch: RowBatch) -> torch.Tensor:
    rows, width = ids.shape[0], ids.shape[1]
    if rows != batch.rows.row_count:
        raise invalid(
            f"ids are of {rows} rows and input_ids of {batch.rows.row_count}: give those of every "
            "row",
            id_rows=rows,
            rows=batch.rows.row_count,
        )
    firsts, counts = batch.windows[:, 0], batch.windows[:, 1]
    beyond = ((firsts + counts > width) & (counts > 0)).nonzero().flatten()
    if len(beyond):
        row = int(beyond[0])
        raise invalid(
            f"row {row} wants positions up to {int(firsts[row] + counts[row]) - 1}, and ids have "
            f"room for {width} a row: position p of row i is read at ids[i, p]",
            row=row,
            room=width,
        )
    places = torch.arange(width)
    inside = (places >= firsts.unsqueeze(1)) & (places < (firsts + counts).unsqueeze(1))
    return ids[inside.to(ids.device)]


def _of_rows(given: Ids, batch: RowBatch) -> torch.Tensor:
    rows = [_tensor(row, f"row {at} of ids") for at, row in enumerate(given)]
    if len(rows) != batch.rows.row_count:
        raise invalid(
            f"ids are of {len(rows)} rows and input_ids of {batch.rows.row_count}: give those of "
            "every row",
            id_rows=len(rows),
            rows=batch.rows.row_count,
        )
    wanted, widths = [], {row.shape[1] for row in rows if row.dim() == 2 and len(row)}
    windows, lengths = batch.windows.tolist(), batch.rows.lengths.tolist()
    for at, (row, (first, count), length) in enumerate(zip(rows, windows, lengths, strict=True)):
        if not len(row) and not count:
            continue
        if row.dim() != 2 or len(row) not in (count, length) or len(widths) > 1:
            raise invalid(
                f"row {at} of ids has shape {tuple(row.shape)}, and {count} of its {length} "
                "positions are wanted: give [positions, M] of those or of all, with one M for all "
                "rows and -1 where a position wants fewer",
                row=at,
                positions=count,
                tokens=length,
            )
        wanted.append((row if len(row) == count else row[first : first + count]).cpu())
    return torch.cat(wanted) if wanted else torch.empty(0, max(widths, default=1)).long()
