"""The rules of cross-tokenizer distillation under the names and keywords that NeMo RL gives them.

Drop-in for a loop that calls NeMo RL's own: the same functions, the same answers where those are
right. Promises on top: the rules hold under ``python -O``, an error names every broken rule with
its numbers, and sizes below 1 are refused. Padding either gives every key exactly the rows that
were asked for, or refuses; NeMo RL pads an empty batch to no rows at all, lets keys of differing
rows stay different, and picks targets that its own sharding then rejects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set, Sized
from typing import TYPE_CHECKING, TypeVar

import torch

from teacher_logits.errors import GridMismatchError, NotNodeLocalError, PayloadInvalidError
from teacher_logits.grid import (
    BatchGrid,
    check_batch_grid,
    check_own_grid,
    check_sizes,
    is_whole,
)
from teacher_logits.locality import ModelGrid, check_node_local

if TYPE_CHECKING:
    from typing import NoReturn

    from teacher_logits.errors import Fact

SAMPLE_MASK = "sample_mask"

BatchT = TypeVar("BatchT", bound=Mapping[str, object])


class PaddingTargetError(PayloadInvalidError, AssertionError):
    """The batch has more rows than the target. An ``AssertionError`` too, as upstream's is."""


def assert_teacher_student_batch_grid(
    *,
    global_batch_size: int,
    student_gbs: int,
    teacher_gbs: int,
    student_dp: int,
    teacher_dp: int,
    student_mbs: int,
    teacher_mbs: int,
) -> None:
    """Return if the two batch grids fit on a step of ``global_batch_size`` rows.

    gbs global batch size, dp data-parallel size, mbs micro batch size; rules in ``grid``.

    Raises:
        GridMismatchError: ``violations`` has every broken rule.
    """
    violations = check_batch_grid(
        global_batch_size=global_batch_size,
        student=BatchGrid(
            global_batch_size=student_gbs,
            data_parallel_size=student_dp,
            micro_batch_size=student_mbs,
        ),
        teacher=BatchGrid(
            global_batch_size=teacher_gbs,
            data_parallel_size=teacher_dp,
            micro_batch_size=teacher_mbs,
        ),
    )
    if violations:
        raise GridMismatchError(violations)


def assert_xtoken_ipc_node_local(
    *,
    num_nodes: int,
    gpus_per_node: int,
    student_tp: int,
    student_cp: int,
    teacher_tp: int,
    teacher_cp: int,
    student_dp: int,
    teacher_dp: int,
) -> None:
    """Return if no handover can cross a node, by arithmetic alone.

    tp tensor-, cp context-, dp data-parallel size; rules in ``locality``.

    Raises:
        NotNodeLocalError: ``violations`` has every broken rule.
    """
    violations = check_node_local(
        student=ModelGrid(
            node_count=num_nodes,
            gpus_per_node=gpus_per_node,
            tensor_parallel_size=student_tp,
            context_parallel_size=student_cp,
        ),
        teacher=ModelGrid(
            node_count=num_nodes,
            gpus_per_node=gpus_per_node,
            tensor_parallel_size=teacher_tp,
            context_parallel_size=teacher_cp,
        ),
        student_dp=student_dp,
        teacher_dp=teacher_dp,
    )
    if violations:
        raise NotNodeLocalError(violations)


def padding_target(rows: int, *, student: BatchGrid, teachers: Iterable[BatchGrid] = ()) -> int:
    """Return the fewest rows, at least ``rows``, that every side can shard.

    A multiple of each side's ranks times micro batch size, and of its global batch size: NeMo RL
    leaves the latter out, and its student then refuses a last batch that was padded so.

    Raises:
        GridMismatchError: a size is below 1, or a grid breaks a rule by itself.
    """
    grids = (student, *teachers)
    violations = check_sizes({"rows": rows}) + check_own_grid(student, side="student")
    for teacher in grids[1:]:
        violations += check_own_grid(teacher, side="teacher")
    if violations:
        raise GridMismatchError(violations)
    quantum = math.lcm(
        *(grid.data_parallel_size * grid.micro_batch_size for grid in grids),
        *(grid.global_batch_size for grid in grids),
    )
    return int(-(-rows // quantum) * quantum)


def pad_distillation_val_batch(batch: BatchT, target_size: int) -> BatchT:
    """Return ``batch`` with ``target_size`` rows under every key; ``padding_target`` picks one.

    Rows are dim 0 of a tensor, items of anything else. The last row is repeated, and the new
    rows are 0 in ``sample_mask``, so that they count for nothing. A batch that has the rows
    already is returned as it is; otherwise the result is a new mapping of the same type with
    new tensors and new lists of the same items, and ``batch`` is left untouched.

    Raises:
        PaddingTargetError: the batch has more rows than ``target_size``.
        PayloadInvalidError: keys differ in their rows, or have none; there is no row to repeat;
            ``sample_mask`` is missing or no tensor.
    """
    rows = _common_rows(batch)
    extra = _extra_rows(rows, target_size)
    if extra == 0:
        return batch
    mask = batch.get(SAMPLE_MASK)
    if not isinstance(mask, torch.Tensor):
        _refuse(
            f"key {SAMPLE_MASK!r} is {_kind(mask)}, so {extra} padded rows would count; give a "
            f"tensor of {rows} rows that is 1 where a row counts",
            key=SAMPLE_MASK,
            rows=rows,
            extra_rows=extra,
        )
    padded = {key: _repeat_last(key, value, extra) for key, value in batch.items()}
    padded[SAMPLE_MASK] = torch.cat([mask, mask.new_zeros((extra, *mask.shape[1:]))])
    return type(batch)(padded)  # type: ignore[call-arg]  # trainers' mapping types take a mapping


def _extra_rows(rows: int, target_size: int) -> int:
    if not is_whole(target_size):
        _refuse(f"the target is {target_size!r}; use a whole number", target_size=repr(target_size))
    if target_size < rows:
        raise PaddingTargetError(
            f"the batch has {rows} rows, more than the target of {target_size}; pad to {rows} rows "
            "or more, or split the batch",
            facts={"rows": rows, "target_size": int(target_size)},
        )
    if rows == 0 < target_size:
        _refuse(
            f"the batch has 0 rows, so there is none to repeat up to {target_size}; leave an empty "
            "batch out",
            rows=rows,
            target_size=int(target_size),
        )
    return int(target_size) - rows


def _common_rows(batch: Mapping[str, object]) -> int:
    counts = {key: _row_count(key, value) for key, value in batch.items()}
    first, first_rows = next(iter(counts.items()), ("", 0))
    for key, rows in counts.items():
        if rows != first_rows:
            _refuse(
                f"key {key!r} has {rows} rows where {first!r} has {first_rows}; give every key the "
                "same number of rows",
                key=key,
                rows=rows,
                first_key=first,
                first_rows=first_rows,
            )
    return first_rows


def _row_count(key: str, value: object) -> int:
    if isinstance(value, torch.Tensor):
        if value.ndim:
            return int(value.shape[0])
    elif isinstance(value, Sized) and not isinstance(value, (str, bytes, Mapping, Set)):
        return len(value)
    _refuse(
        f"key {key!r} is {_kind(value)}, which has no rows; give a tensor, or a list with an item "
        "for each row, or leave it out of the batch",
        key=key,
    )


def _repeat_last(key: str, value: object, extra: int) -> torch.Tensor | list[object]:
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value[-1:].expand(extra, *value.shape[1:])])
    if not isinstance(value, Iterable):
        _refuse(
            f"key {key!r} is {_kind(value)}, whose rows cannot be repeated; give a list", key=key
        )
    items = list(value)
    return items + items[-1:] * extra


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _refuse(message: str, **facts: Fact) -> NoReturn:
    raise PayloadInvalidError(message, facts=facts)
