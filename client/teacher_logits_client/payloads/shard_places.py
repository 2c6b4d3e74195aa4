"""Places: where the positions that context-parallel parts hold stand in whole rows.

One plan is made for all rows (``shard_plan``), in which row i's positions count from i * 2**32 on,
so that no run of one is taken for another's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError, TeacherLogitsError
from teacher_logits.shard_plan import ShardBox, ShardPlan, plan_shards
from teacher_logits_client.rows.shard_assembly import assemble_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.payloads.row_columns import Part

    #: Of each row the runs that a shard holds, in the order in which they lie.
    Runs = list[list[range]]

_APART = 1 << 32
_ONE = range(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Where the positions of whole rows [N] come from.

    ``offsets`` int64 [N+1] and ``windows`` int32 [N,2] are those of whole rows.
    """

    offsets: torch.Tensor
    windows: torch.Tensor
    plan: ShardPlan

    @property
    def position_count(self) -> int:
        """Positions of all rows."""
        return int(self.offsets[-1])

    @property
    def is_view(self) -> bool:
        """Whether one part holds all positions as they are wanted."""
        return self.plan.is_view

    def place(self, tensors: Sequence[torch.Tensor], *, device: torch.device) -> torch.Tensor:
        """Return a column [P,...] over the positions of whole rows, out of each part's [Pc,...].

        A view of the one part that holds them all, where there is one.
        """
        # One row, and one entry where a plan has ids.
        boxes = [each.to(device).unsqueeze(0).unsqueeze(2) for each in tensors]
        return assemble_shards(self.plan, boxes).squeeze(2).squeeze(0)


def places_of(columns: Sequence[Sequence[Part]]) -> Places:
    """Return where the positions of some rows come from; see ``Places``.

    ``columns`` are the context-parallel parts, each with its tensor-parallel ones.

    Raises:
        PayloadInvalidError: positions between a row's first and last are missing, or a
            tensor-parallel part holds others than those beside it.
        PayloadConflictError: two parts hold a position.
    """
    held = [_aligned(column) for column in columns]
    windows = [_window(runs) for runs in zip(*held, strict=True)]
    plan = _plan(held, windows, [column[0] for column in columns])
    offsets = [0, *accumulate(len(window) for window in windows)]
    firsts = [[window.start, len(window)] for window in windows]
    return Places(
        offsets=torch.tensor(offsets),
        windows=torch.tensor(firsts, dtype=torch.int32).view(-1, 2),
        plan=plan,
    )


def _plan(held: Sequence[Runs], windows: Sequence[range], shards: Sequence[Part]) -> ShardPlan:
    boxes = [_box([_apart(runs, row) for row, runs in enumerate(shard)]) for shard in held]
    wanted = _box([_apart([window], row) for row, window in enumerate(windows)])
    try:
        return plan_shards(boxes, wanted)
    except TeacherLogitsError:
        _plan_rows(held, windows, shards)
        raise


def _plan_rows(held: Sequence[Runs], windows: Sequence[range], shards: Sequence[Part]) -> None:
    """Have the first row that cannot be planned named by its own numbers."""
    for row, window in enumerate(windows):
        number = shards[0].first_row + row
        rows = range(number, number + 1)
        boxes = [
            ShardBox(
                rows=rows,
                positions=tuple(shard[row]),
                ids=_ONE,
                name=f"payload {part.payload.payload_id}",
            )
            for shard, part in zip(held, shards, strict=True)
        ]
        plan_shards(boxes, ShardBox(rows=rows, positions=(window,), ids=_ONE))


def _box(runs_of_rows: Sequence[Sequence[range]]) -> ShardBox:
    positions = tuple(run for runs in runs_of_rows for run in runs)
    return ShardBox(rows=_ONE, positions=positions, ids=_ONE)


def _apart(runs: Sequence[range], row: int) -> list[range]:
    return [range(run.start + row * _APART, run.stop + row * _APART) for run in runs]


def _window(runs_of_parts: tuple[list[range], ...]) -> range:
    """Return the window of a row whose parts hold these runs, if they leave no hole."""
    runs = [run for runs in runs_of_parts for run in runs if run]
    start = min((run.start for run in runs), default=0)
    return range(start, max((run.stop for run in runs), default=start))


def _aligned(column: Sequence[Part]) -> Runs:
    """Return the runs of a context-parallel part, which all of its tensor-parallel ones hold."""
    first, *others = column
    runs = first.runs()
    for other in others:
        theirs = other.runs()
        if theirs == runs:
            continue
        row = next(at for at, (a, b) in enumerate(zip(runs, theirs, strict=True)) if a != b)
        number = first.first_row + row
        raise PayloadInvalidError(
            f"row {number} has the positions {_text(runs[row])} in payload "
            f"{first.payload.payload_id} and {_text(theirs[row])} in {other.payload.payload_id}, "
            "which holds other ids of the same: give all tensor-parallel ranks the same rows",
            facts={"row": number},
        )
    return runs


def _text(runs: Sequence[range]) -> str:
    return ", ".join(f"{run.start} to {run.stop - 1}" for run in runs) or "none"
