"""The model grid: where a side's processes live, and when that keeps every handover on a node.

A side runs one model-parallel group (tensor x context parallel GPUs) a data-parallel rank, on
``node_count`` nodes of ``gpus_per_node`` GPUs. The arithmetic rule accepts grids for which no
student rank can need a teacher rank of another node, given dense placement: data parallel
outermost, then context, tensor innermost. Two nodes of 4 GPUs, groups of 2:

    node               0           |           1
    GPU            0   1   2   3   |   4   5   6   7
    group            0   |   1     |     2   |   3

Promises: what it accepts never crosses a node, every broken rule is named with its numbers,
and the first one named is the one that NeMo RL would have stopped at. It is sufficient, not
necessary, and it is arithmetic over claims: what is really shared is proven elsewhere.

The rules, in the order in which they are checked; each needs what stands behind "given":

    not_positive            every size is a whole number of at least 1, with one node too
    topology_mismatch       both sides say the same nodes and GPUs a node
    dp_mismatch             both sides have equally many data-parallel ranks
    group_mismatch          both sides have groups of equally many GPUs, however split
    group_exceeds_node      a group fits on a node, given group_mismatch and equal nodes
    group_not_node_aligned  groups tile a node, given group_exceeds_node

Where both sides live on one node, all of these but ``not_positive`` pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import Violation
from teacher_logits.grid import check_rank, check_sizes, is_size

if TYPE_CHECKING:
    from teacher_logits.errors import Fact
    from teacher_logits.grid import Side


@dataclass(frozen=True, kw_only=True)
class ModelGrid:
    """How one side lays its model-parallel groups over nodes, and this rank's place in its group.

    Building one checks nothing, so that a handshake can name every broken rule at once. The
    ranks are zero where a side speaks for its whole group; the arithmetic rule ignores them.
    """

    node_count: int
    gpus_per_node: int
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    context_parallel_rank: int = 0


def check_node_local(
    *, student: ModelGrid, teacher: ModelGrid, student_dp: int, teacher_dp: int
) -> list[Violation]:
    """Return every rule by which a handover between the two grids may cross a node.

    ``student_dp`` and ``teacher_dp`` are the data-parallel sizes of the two batch grids. In the
    order of the module's table; empty where every handover stays on its node. A rule whose
    premise already failed is left out.
    """
    sizes = model_sizes(student, side="student") | model_sizes(teacher, side="teacher")
    sizes |= {"student_data_parallel_size": student_dp, "teacher_data_parallel_size": teacher_dp}
    violations = check_sizes(sizes)
    nodes = (student.node_count, teacher.node_count)
    if nodes == (1, 1):
        return violations
    violations += _check_topology(student, teacher)
    if all(map(is_size, nodes)):
        violations += _check_data_parallel(student_dp, teacher_dp)
        violations += _check_groups(student, teacher)
    return violations


def model_sizes(grid: ModelGrid, *, side: Side) -> dict[str, int]:
    """Return the grid's sizes under the names that messages and facts give them."""
    return {
        f"{side}_node_count": grid.node_count,
        f"{side}_gpus_per_node": grid.gpus_per_node,
        f"{side}_tensor_parallel_size": grid.tensor_parallel_size,
        f"{side}_context_parallel_size": grid.context_parallel_size,
    }


def check_model_ranks(grid: ModelGrid, *, side: Side) -> list[Violation]:
    """Return a ``rank_out_of_range`` violation for each of the grid's ranks that has no place."""
    tensor, context = f"{side}_tensor_parallel_rank", f"{side}_context_parallel_rank"
    return [
        *check_rank(grid.tensor_parallel_rank, grid.tensor_parallel_size, name=tensor),
        *check_rank(grid.context_parallel_rank, grid.context_parallel_size, name=context),
    ]


def _check_topology(student: ModelGrid, teacher: ModelGrid) -> list[Violation]:
    facts: dict[str, Fact] = {}
    for name, mine, theirs in (
        ("node_count", student.node_count, teacher.node_count),
        ("gpus_per_node", student.gpus_per_node, teacher.gpus_per_node),
    ):
        if is_size(mine) and is_size(theirs) and mine != theirs:
            facts |= {f"student_{name}": int(mine), f"teacher_{name}": int(theirs)}
    if not facts:
        return []
    named = ", ".join(f"{name} is {size}" for name, size in facts.items())
    message = f"{named}; both sides must describe the same nodes"
    return [Violation(rule="topology_mismatch", message=message, facts=facts)]


def _check_data_parallel(student_dp: int, teacher_dp: int) -> list[Violation]:
    if not (is_size(student_dp) and is_size(teacher_dp)) or student_dp == teacher_dp:
        return []
    message = (
        f"{student_dp} student ranks read from {teacher_dp} teacher ranks, which may lie on other "
        "nodes; use the same data-parallel size on both sides, or one node"
    )
    facts: dict[str, Fact] = {
        "student_data_parallel_size": int(student_dp),
        "teacher_data_parallel_size": int(teacher_dp),
    }
    return [Violation(rule="dp_mismatch", message=message, facts=facts)]


def _check_groups(student: ModelGrid, teacher: ModelGrid) -> list[Violation]:
    mine, theirs = _group(student), _group(teacher)
    if mine is None or theirs is None:
        return []
    if mine == theirs:
        return _check_fit(student, teacher, group=mine)
    message = (
        f"a student group has {_product(student)} GPUs, a teacher group {_product(teacher)} "
        "(tensor x context parallel); make the two products equal"
    )
    facts: dict[str, Fact] = {
        "student_group_size": mine,
        "teacher_group_size": theirs,
        **_group_sizes(student, side="student"),
        **_group_sizes(teacher, side="teacher"),
    }
    return [Violation(rule="group_mismatch", message=message, facts=facts)]


def _check_fit(student: ModelGrid, teacher: ModelGrid, *, group: int) -> list[Violation]:
    gpus = student.gpus_per_node
    if not is_size(gpus) or gpus != teacher.gpus_per_node or gpus % group == 0:
        return []
    if group > gpus:
        rule = "group_exceeds_node"
        message = (
            f"a group of {_product(student)} GPUs (tensor x context parallel) does not fit on a "
            f"node of {gpus}; make the product {gpus} at most"
        )
    else:
        rule = "group_not_node_aligned"
        message = (
            f"groups of {_product(student)} GPUs (tensor x context parallel) do not tile a node "
            f"of {gpus}, so one spans two nodes; make the product a divisor of {gpus}"
        )
    facts: dict[str, Fact] = {
        "group_size": group,
        "gpus_per_node": int(gpus),
        **_group_sizes(student, side="student"),
    }
    return [Violation(rule=rule, message=message, facts=facts)]


def _group(grid: ModelGrid) -> int | None:
    tensor, context = grid.tensor_parallel_size, grid.context_parallel_size
    return int(tensor) * int(context) if is_size(tensor) and is_size(context) else None


def _group_sizes(grid: ModelGrid, *, side: Side) -> dict[str, int]:
    return {
        f"{side}_tensor_parallel_size": int(grid.tensor_parallel_size),
        f"{side}_context_parallel_size": int(grid.context_parallel_size),
    }


def _product(grid: ModelGrid) -> str:
    tensor, context = grid.tensor_parallel_size, grid.context_parallel_size
    return f"{tensor} x {context} = {tensor * context}"
