"""Admission: whether a student may have a session with a teacher, by every rule at once.

Pure. ``admit`` looks at two profiles and names every broken rule, in an order that clients may
rely on, since the first decides the refusal's status:

    sizes            not_positive
    batch grid       gbs_mismatch ... teacher_mbs_indivisible (``grid``), then
                     rank_out_of_range, readers_exceed_group
    node locality    topology_mismatch ... group_not_node_aligned (``locality``), or
                     model_grid_missing; only where the student says ``locality=rule``
    the rest         vocabulary, capability, provenance (``capability``), and before that last
                     codec_unavailable (``stream_codecs``)

What a side did not give is a check that is ``unchecked``, never passed. Whether reader and
writer really share memory is no matter of profiles: ``settlement`` decides that by proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits import grid, locality
from teacher_logits.errors import Violation
from teacher_logits.terms import Check, Verdict
from teacher_logits.transport import Locality
from teacher_logits_server.admission.capability import (
    check_capability,
    check_provenance,
    check_vocabulary,
    common_vocabulary,
    describe_scores,
)
from teacher_logits_server.admission.stream_codecs import check_codecs

if TYPE_CHECKING:
    from teacher_logits.profiles import StudentProfile, TeacherProfile


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What became of a student's profile.

    ``checks`` and ``vocabulary_size`` (columns of the vocabulary that take part) count only
    where there are no ``violations``.
    """

    violations: tuple[Violation, ...]
    checks: tuple[Check, ...]
    vocabulary_size: int


def admit(
    student: StudentProfile,
    teacher: TeacherProfile,
    *,
    protocol_version: int,
    is_published: bool = False,
) -> Admission:
    """Judge a student's profile against a teacher's.

    The step's global batch size is the teacher's; where the teacher takes any grid, the
    student's own.
    """
    node_local = _check_node_local(student, teacher)
    insists = student.locality is Locality.RULE
    violations = [
        *_check_sizes(student, teacher),
        *_check_batch_grid(student, teacher),
        *(node_local if insists else ()),
        *check_vocabulary(student, teacher, is_published=is_published),
        *check_capability(
            student, teacher, protocol_version=protocol_version, is_published=is_published
        ),
        *check_codecs(student, teacher, is_published=is_published),
        *check_provenance(student, teacher),
    ]
    checks = (
        *_describe_grids(teacher),
        _describe_node_local(node_local),
        *describe_scores(student, teacher),
    )
    return Admission(
        violations=tuple(violations),
        checks=checks,
        vocabulary_size=common_vocabulary(student, teacher),
    )


def _check_sizes(student: StudentProfile, teacher: TeacherProfile) -> list[Violation]:
    """Return one ``not_positive`` that names every bad size of either side."""
    sizes = grid.batch_sizes(student.batch_grid, side="student")
    if teacher.batch_grid is not None:
        sizes |= grid.batch_sizes(teacher.batch_grid, side="teacher")
    if student.model_grid is not None:
        sizes |= locality.model_sizes(student.model_grid, side="student")
    if teacher.model_grid is not None:
        sizes |= locality.model_sizes(teacher.model_grid, side="teacher")
    sizes |= {"top_k": student.top_k, "readers_per_rank": student.readers_per_rank}
    if student.vocabulary_size != 0:  # zero is "not given"
        sizes["student_vocabulary_size"] = student.vocabulary_size
    return grid.check_sizes(sizes)


def _check_batch_grid(student: StudentProfile, teacher: TeacherProfile) -> list[Violation]:
    step = (teacher.batch_grid or student.batch_grid).global_batch_size
    violations = grid.check_batch_grid(
        global_batch_size=step, student=student.batch_grid, teacher=teacher.batch_grid
    )
    violations += grid.check_rank(
        student.data_parallel_rank,
        student.batch_grid.data_parallel_size,
        name="student_data_parallel_rank",
    )
    if student.model_grid is not None:
        violations += locality.check_model_ranks(student.model_grid, side="student")
        violations += _check_readers(student.readers_per_rank, student.model_grid)
    return _without_sizes(violations)


def _check_readers(readers: int, model: locality.ModelGrid) -> list[Violation]:
    tensor, context = model.tensor_parallel_size, model.context_parallel_size
    if not all(map(grid.is_size, (readers, tensor, context))) or readers <= tensor * context:
        return []
    return [
        Violation(
            rule="readers_exceed_group",
            message=f"readers_per_rank is {readers}, and a data-parallel rank has {tensor} x "
            f"{context} = {tensor * context} processes (tensor x context parallel); give that "
            "many at most",
            facts={
                "readers_per_rank": readers,
                "student_tensor_parallel_size": tensor,
                "student_context_parallel_size": context,
            },
        )
    ]


def _check_node_local(student: StudentProfile, teacher: TeacherProfile) -> list[Violation]:
    """Return what the arithmetic rule has against the two grids, whoever insists on it.

    The rule is sufficient and not necessary, so it refuses only a student that asks for it
    by ``locality=rule``; for the others proof decides.
    """
    mine, theirs = student.model_grid, teacher.model_grid
    missing = []
    if mine is None:
        missing.append("the student's model grid")
    if theirs is None:
        missing.append("the teacher's model grid")
    one_node = mine is not None and theirs is not None and mine.node_count == theirs.node_count == 1
    if teacher.batch_grid is None and not one_node:
        missing.append("the teacher's batch grid")
    if mine is None or theirs is None or missing:
        return [_model_grid_missing(", ".join(missing))]
    dp = student.batch_grid.data_parallel_size
    return _without_sizes(
        locality.check_node_local(
            student=mine,
            teacher=theirs,
            student_dp=dp,
            teacher_dp=teacher.batch_grid.data_parallel_size if teacher.batch_grid else dp,
        )
    )


def _model_grid_missing(missing: str) -> Violation:
    return Violation(
        rule="model_grid_missing",
        message=f"not given: {missing}; locality 'rule' compares both sides' grids: give them, or "
        "use locality 'require'",
        facts={"missing": missing},
    )


def _without_sizes(violations: list[Violation]) -> list[Violation]:
    """Leave out ``not_positive``, which ``_check_sizes`` has named for all sizes at once."""
    return [violation for violation in violations if violation.rule != "not_positive"]


def _describe_grids(teacher: TeacherProfile) -> tuple[Check, Check]:
    student_side = Check(
        name="student_batch_grid",
        verdict=Verdict.PASSED,
        detail="the student's ranks and micro batches tile the global batch",
    )
    if teacher.batch_grid is None:
        detail = "the teacher takes any batch grid"
        return student_side, Check(
            name="teacher_batch_grid", verdict=Verdict.UNCHECKED, detail=detail
        )
    size = teacher.batch_grid.global_batch_size
    detail = f"both sides cut the same {size} rows, and the teacher's ranks tile them"
    return student_side, Check(name="teacher_batch_grid", verdict=Verdict.PASSED, detail=detail)


def _describe_node_local(violations: list[Violation]) -> Check:
    if not violations:
        detail = "by the grids, no row crosses a node"
        return Check(name="node_local_rule", verdict=Verdict.PASSED, detail=detail)
    if violations[0].rule == "model_grid_missing":
        detail = f"not given: {violations[0].facts['missing']}"
    else:
        broken = "; ".join(f"{v.rule}: {v.message}" for v in violations)
        detail = f"by the grids, rows may cross nodes ({broken}); proof decides"
    return Check(name="node_local_rule", verdict=Verdict.UNCHECKED, detail=detail)
