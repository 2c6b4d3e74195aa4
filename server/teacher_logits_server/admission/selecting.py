"""How a student wants entries selected, and whether its teacher gives them so.

Pure. An engine's logits are here, and it selects as each session asks; what a publisher writes is
selected already, and by its profile's rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import Violation
from teacher_logits.layout import SAMPLED_COLUMNS
from teacher_logits.selection_rules import TOP_K, Nucleus, Sampled
from teacher_logits.terms import Check, Verdict

if TYPE_CHECKING:
    from teacher_logits.layout import ColumnKind
    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.selection_rules import SelectionRule


def settled_selection(student: StudentProfile, teacher: TeacherProfile) -> SelectionRule:
    """Return the rule that a student's payloads go by: what it asks for, or what there is."""
    return student.selection or teacher.selection


def columns_on_offer(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> tuple[ColumnKind, ...]:
    """Return the columns that a student's payloads have."""
    is_sample = isinstance(student.selection, Sampled) and not is_published
    return SAMPLED_COLUMNS if is_sample else teacher.columns


def check_selection(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> list[Violation]:
    """Return ``selection_unavailable`` where the teacher does not select as the student asks."""
    asked, has = student.selection, teacher.selection
    if asked is None:
        return []
    if is_published and asked != has:
        return [
            _violation(
                f"the teacher publishes entries of {has}, and the student asks for {asked}; leave "
                "selection out to take them as they are, or have its publishers' "
                "TeacherProfile(selection=) say the same",
                asked,
                has,
            )
        ]
    others = student.all_temperatures[1:]
    if isinstance(asked, Sampled) and others:
        given = ", ".join(f"{each:g}" for each in others)
        return [
            _violation(
                f"the student asks for sampled entries at temperature {given}; a sample is drawn "
                "at temperature 1, and none at another follows from it: leave temperatures out",
                asked,
                has,
            )
        ]
    if isinstance(asked, Nucleus) and asked.least > student.top_k:
        return [
            _violation(
                f"the student asks for at least {asked.least} entries a position and for top_k "
                f"{student.top_k}, which is the most; give a nucleus least of at most that",
                asked,
                has,
            )
        ]
    return []


def selection_checks(student: StudentProfile, teacher: TeacherProfile) -> tuple[Check, ...]:
    """Return the check of an admitted student's selection; none where all is as it always was."""
    rule = settled_selection(student, teacher)
    if student.selection is None and rule == TOP_K:
        return ()
    detail = f"entries are selected by {rule}"
    return (Check(name="selection", verdict=Verdict.PASSED, detail=detail),)


def _violation(message: str, asked: SelectionRule, has: SelectionRule) -> Violation:
    return Violation(
        rule="selection_unavailable",
        message=message,
        facts={"selection": asked.name, "teacher_selection": has.name},
    )
