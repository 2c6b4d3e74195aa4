"""Agreement: before the teacher computes, whether its payloads may go past the driver.

They may where every student rank trains on exactly the rows, in exactly the order, that one
teacher rank holds: then that rank's payload is handed over as it lies (``deferred``). Else the
driver gathers, puts in order and cuts anew (``materialised``), with the reason kept. The rules, in
the order in which they are asked; the first that fails is the reason:

    not_plain_policy    both sides are driven by the trainer's own policy
    direct_packed       the batch's rows are dealt out in turn, as one packed by its loader is
    partial_batch       the step has as many rows as the student's global batch
    dp_mismatch         both sides have as many data-parallel ranks
    dynamic_batching    neither side sorts rows by length
    packing_one_sided   both sides pack sequences, or neither
    packing_mismatch    both pack by the same arguments, micro batch tokens included
    row_order_mismatch  the rows of every rank are the same, in the same order

All but the last are NeMo RL's, which finds the last out when the teacher has been paid for. Pure:
sizes in, rows and a reason out; no torch, no Ray.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from teacher_logits.errors import GridMismatchError, Violation
from teacher_logits.grid import check_sizes
from teacher_logits_client.ray.given import as_violation, whole_numbers
from teacher_logits_client.ray.row_orders import (
    DynamicBatching,
    RowOrder,
    SequencePacking,
    row_order,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.errors import Fact

    Rows = tuple[tuple[int, ...], ...]


class Path(enum.Enum):
    """Which way a step's payloads take."""

    DEFERRED = "deferred"
    MATERIALISED = "materialised"


@dataclass(frozen=True, kw_only=True)
class Side:
    """How one side holds a step's rows.

    ``micro_batch_tokens`` stands in for the tokens of its ``batching``, as a trainer's own setting
    for one call does. ``rows`` are those of each rank where the side knows them; else they are
    planned (``row_order``). ``global_batch_size`` is the student's, for the teacher the step's.
    """

    data_parallel_size: int
    global_batch_size: int
    batching: SequencePacking | DynamicBatching | None = None
    micro_batch_tokens: int | None = None
    rows: Rows | None = None
    is_plain_policy: bool = True


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step of both sides, before the teacher computes.

    ``lengths``: each row's tokens, needed where rows are packed or sorted, and where a payload has
    to be padded. ``sequence_length``, ``top_k`` and ``vocabulary_size`` are what the student
    expects; what is None is not checked.
    """

    row_count: int
    student: Side
    teacher: Side
    is_direct_packed: bool = False
    lengths: Sequence[int] | None = None
    sequence_length: int | None = None
    top_k: int | None = None
    vocabulary_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The way a step takes, why it is no shorter, and what every rank of either side holds."""

    path: Path
    reason: Violation | None
    plan: StepPlan
    student_rows: Rows
    teacher_rows: Rows


def agree(plan: StepPlan) -> Agreement:
    """Return the way that a step's payloads will take. Ask it before the teacher computes.

    Raises:
        GridMismatchError: a side's rows cannot be cut as it says, or an override of its micro
            batch tokens is no size, or for a side that batches by no tokens.
    """
    _check_kinds(plan)
    if plan.lengths is not None:
        with as_violation("not_whole"):
            plan = replace(plan, lengths=whole_numbers(plan.lengths, what="lengths"))
    student = _overridden(plan.student, "student")
    teacher = _overridden(plan.teacher, "teacher")
    _check_sizes(plan)
    mine = _rows_of(plan, student, is_student=True)
    theirs = _rows_of(plan, teacher, is_student=False)
    reason = next(_reasons(plan, student, teacher), None)
    if reason is None and mine != theirs:
        reason = _row_order_mismatch(mine, theirs)
    return Agreement(
        path=Path.DEFERRED if reason is None else Path.MATERIALISED,
        reason=reason,
        plan=plan,
        student_rows=mine,
        teacher_rows=theirs,
    )


def _reasons(plan: StepPlan, student: Side, teacher: Side) -> Iterator[Violation]:
    for name, side in (("student", student), ("teacher", teacher)):
        if not side.is_plain_policy:
            message = f"the {name} is driven by a policy of its own kind, whose calls may differ"
            yield Violation(rule="not_plain_policy", message=message, facts={"side": name})
    if plan.is_direct_packed:
        message = "the batch comes packed from its loader: its rows are dealt out in turn"
        yield Violation(rule="direct_packed", message=message)
    if plan.row_count != student.global_batch_size:
        message = (
            f"the step has {plan.row_count} rows and the student's global batch "
            f"{student.global_batch_size}"
        )
        yield _violation("partial_batch", message, row_count=plan.row_count,
                         student_global_batch_size=student.global_batch_size)  # fmt: skip
    if student.data_parallel_size != teacher.data_parallel_size:
        ranks = student.data_parallel_size, teacher.data_parallel_size
        message = f"the student has {ranks[0]} data-parallel ranks and the teacher {ranks[1]}"
        yield _violation("dp_mismatch", message, student_data_parallel_size=ranks[0],
                         teacher_data_parallel_size=ranks[1])  # fmt: skip
    for name, side in (("student", student), ("teacher", teacher)):
        if isinstance(side.batching, DynamicBatching):
            message = f"the {name} sorts rows by length"
            yield Violation(rule="dynamic_batching", message=message, facts={"side": name})
    yield from _packing_reasons(student.batching, teacher.batching)


def _packing_reasons(student: object, teacher: object) -> Iterator[Violation]:
    mine = asdict(student) if isinstance(student, SequencePacking) else None
    theirs = asdict(teacher) if isinstance(teacher, SequencePacking) else None
    if mine is None and theirs is None:
        return
    if mine is None or theirs is None:
        name = "teacher" if mine is None else "student"
        message = f"the {name} packs sequences and the other side does not"
        yield Violation(rule="packing_one_sided", message=message, facts={"side": name})
    elif mine != theirs:
        apart = {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
        named = ", ".join(f"{name} {a} and {b}" for name, (a, b) in apart.items())
        facts: dict[str, Fact] = {f"student_{name}": a for name, (a, _) in apart.items()}
        facts |= {f"teacher_{name}": b for name, (_, b) in apart.items()}
        message = f"student and teacher pack by differing arguments: {named}"
        yield Violation(rule="packing_mismatch", message=message, facts=facts)


def _row_order_mismatch(mine: Rows, theirs: Rows) -> Violation:
    rank = next(d for d, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    a, b = mine[rank], theirs[rank]
    place = next(
        (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    message = (
        f"rank {rank} of the student holds {len(a)} rows and of the teacher {len(b)}, which differ "
        f"from place {place} on"
    )
    return _violation("row_order_mismatch", message, rank=rank, place=place,
                      student_rows=len(a), teacher_rows=len(b))  # fmt: skip


def _overridden(side: Side, name: str) -> Side:
    """Return a side whose batching has the tokens that stand in for its own."""
    if side.micro_batch_tokens is None:
        return side
    broken = check_sizes({f"{name}_micro_batch_tokens": side.micro_batch_tokens})
    if side.batching is None:
        message = (
            f"{name}_micro_batch_tokens is {side.micro_batch_tokens}, and the {name} batches by no "
            "tokens: leave it out, or say how it packs"
        )
        facts = {f"{name}_micro_batch_tokens": str(side.micro_batch_tokens)}
        broken.append(Violation(rule="override_unused", message=message, facts=facts))
    if broken or side.batching is None:
        raise GridMismatchError(broken)
    tokens = int(side.micro_batch_tokens)
    return replace(side, batching=replace(side.batching, max_tokens_per_micro_batch=tokens))


def _check_sizes(plan: StepPlan) -> None:
    sizes = {"row_count": plan.row_count}
    for name, side in (("student", plan.student), ("teacher", plan.teacher)):
        sizes[f"{name}_data_parallel_size"] = side.data_parallel_size
        sizes[f"{name}_global_batch_size"] = side.global_batch_size
    expected = ("sequence_length", "top_k", "vocabulary_size")
    sizes |= {name: getattr(plan, name) for name in expected if getattr(plan, name) is not None}
    broken = check_sizes(sizes)
    if plan.lengths is not None and len(plan.lengths) != plan.row_count:
        message = f"{plan.row_count} rows have {len(plan.lengths)} lengths: give one a row, or none"
        broken.append(_violation("lengths_missing", message, rows=str(plan.row_count),
                                 lengths=len(plan.lengths)))  # fmt: skip
    broken += _too_long(plan)
    if broken:
        raise GridMismatchError(broken)


def _too_long(plan: StepPlan) -> list[Violation]:
    """Return the first row that is longer than the batch it is padded in."""
    if plan.lengths is None or plan.sequence_length is None:
        return []
    width = plan.sequence_length
    row = next((at for at, each in enumerate(plan.lengths) if each > width), None)
    if row is None:
        return []
    message = (
        f"row {row} has {plan.lengths[row]} tokens and the batch {width} positions a row: give the "
        "width of the padded batch as sequence_length"
    )
    return [_violation("row_too_long", message, row=row, tokens=plan.lengths[row],
                       sequence_length=width)]  # fmt: skip


def _rows_of(plan: StepPlan, side: Side, *, is_student: bool) -> Rows:
    if side.rows is not None:
        return _tiling(side.rows, plan.row_count, side.data_parallel_size)
    if plan.is_direct_packed and is_student:
        ranks = side.data_parallel_size
        return tuple(tuple(range(rank, plan.row_count, ranks)) for rank in range(ranks))
    chunked = is_student and plan.row_count >= side.global_batch_size
    order: RowOrder = row_order(
        row_count=plan.row_count,
        ranks=side.data_parallel_size,
        batch_size=side.global_batch_size if chunked else None,
        lengths=plan.lengths,
        batching=side.batching,
    )
    return order.rows


def _tiling(rows: Rows, row_count: int, ranks: int) -> Rows:
    """Return rows as they were given, once they are known to tile the step."""
    with as_violation("not_whole"):
        rows = tuple(whole_numbers(each, what=f"rows[{rank}]") for rank, each in enumerate(rows))
    held = sorted(row for each in rows for row in each)
    if len(rows) != ranks or held != list(range(row_count)):
        message = (
            f"{len(rows)} of {ranks} ranks hold {len(held)} rows, {len(set(held))} of them "
            f"different: together they hold each of {row_count} rows once"
        )
        facts = {"ranks": ranks, "given": len(rows), "held": len(held), "rows": row_count}
        raise GridMismatchError([Violation(rule="rows_not_tiled", message=message, facts=facts)])
    return rows


def _check_kinds(plan: object) -> None:
    """Refuse what is no plan of two sides."""
    if not isinstance(plan, StepPlan):
        message = f"the plan is a {type(plan).__name__}: give a StepPlan"
        raise GridMismatchError([Violation(rule="not_whole", message=message)])
    for name, side in (("student", plan.student), ("teacher", plan.teacher)):
        batching = side.batching if isinstance(side, Side) else None
        if not isinstance(side, Side):
            message = f"the {name} is a {type(side).__name__}: give a Side"
        elif not isinstance(batching, SequencePacking | DynamicBatching | None):
            message = (
                f"the {name} batches by {batching!r}: give SequencePacking(...), "
                "DynamicBatching(...) or None"
            )
        elif not isinstance(side.rows, Sequence | None):
            message = f"the {name}'s rows are {side.rows!r}: give those of each rank, in order"
        else:
            continue
        raise GridMismatchError([Violation(rule="not_whole", message=message)])


def _violation(rule: str, message: str, **facts: Fact) -> Violation:
    return Violation(rule=rule, message=message, facts=facts)
