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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.payloads.row_columns import Part

    #: Of each row the runs that a shard holds, in the order in which they lie.
    Runs = list[list[range]]

_APART = 1 << 32
_ONE = range(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Where whole rows' positions come from. Of rows [N]: ``offsets`` int64 [N+1] and ``windows``
    int32 [N,2]; of each part, ``sources`` are the positions that are taken from it and ``targets``
    where they go, int64; a ``sources`` None is all of them, in order.
    """

    offsets: torch.Tensor
    windows: torch.Tensor
    sources: tuple[torch.Tensor | None, ...]
    targets: tuple[torch.Tensor, ...]
    #: The part that holds all positions as they are wanted; None where they are copied.
    viewed: int | None

    @property
    def position_count(self) -> int:
        """Positions of all rows."""
        return int(self.offsets[-1])

    @property
    def is_view(self) -> bool:
        """Whether one part holds all positions as they are wanted."""
        return self.viewed is not None

    def place(self, tensors: Sequence[torch.Tensor], *, device: torch.device) -> torch.Tensor:
        """Return a column [P,...] over the positions of whole rows, out of each part's [Pc,...].

        A view of the one part that holds them all, where there is one.
        """
        if self.viewed is not None:
            return tensors[self.viewed]
        shape = (self.position_count, *tensors[0].shape[1:])
        out = torch.empty(shape, dtype=tensors[0].dtype, device=device)
        for tensor, source, target in zip(tensors, self.sources, self.targets, strict=True):
            taken = tensor if source is None else tensor[source.to(tensor.device)]
            out.index_copy_(0, target.to(device), taken.to(device))
        return out


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
    counts = [sum(len(run) for runs in shard for run in runs) for shard in held]
    found = [_indices(plan, at, count) for at, count in enumerate(counts)]
    firsts = [[window.start, len(window)] for window in windows]
    return Places(
        offsets=torch.tensor(offsets),
        windows=torch.tensor(firsts, dtype=torch.int32).view(-1, 2),
        sources=tuple(source for source, _ in found),
        targets=tuple(target for _, target in found),
        viewed=_viewed(plan, counts),
    )


def _viewed(plan: ShardPlan, counts: Sequence[int]) -> int | None:
    """Return the part that is the rows: of which all is one piece of it, and it has no other."""
    if not plan.is_view:
        return None
    at = plan.pieces[0].shard
    return at if counts[at] == plan.size[1] else None


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


def _indices(plan: ShardPlan, at: int, count: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return which positions of a part are taken, None for all in order, and where they go."""
    pieces = sorted(
        (p for p in plan.pieces if p.shard == at), key=lambda p: p.source_positions.start
    )
    sources = _spread([p.source_positions for p in pieces])
    targets = _spread([p.positions for p in pieces])
    is_all = len(sources) == count and torch.equal(sources, torch.arange(count))
    return None if is_all else sources, targets


def _spread(runs: Sequence[range]) -> torch.Tensor:
    """Return the numbers of some runs, one behind the other, int64."""
    starts = torch.tensor([run.start for run in runs], dtype=torch.int64)
    lengths = torch.tensor([len(run) for run in runs], dtype=torch.int64)
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return (starts - before).repeat_interleave(lengths) + torch.arange(total)


def _text(runs: Sequence[range]) -> str:
    return ", ".join(f"{run.start} to {run.stop - 1}" for run in runs) or "none"
