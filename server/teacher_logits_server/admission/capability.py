"""What a student asks of a teacher's scores, and whether the teacher can give it.

Pure. The rules of admission about vocabulary, capability and provenance, in this order:

    tokenizer_mismatch        both gave a tokenizer fingerprint, and they differ
    vocab_mismatch            sizes differ under the policy ``strict``
    top_k_too_large           more entries than the teacher gives, or than ids take part
    temperature_unavailable   outside 0.01 to 100, more than 4 besides 1, or not on offer
    column_unavailable        a column, or a value type, that the teacher does not write
    selection_unavailable     entries selected otherwise than the teacher publishes them, sampled at
                              other temperatures than 1, or more of a nucleus than ``top_k``
    protocol_version          the two sides speak no version in common (``protocol``)
    engine_mismatch           an engine was insisted on, and the teacher has another
    arithmetic_type_mismatch  the same of the arithmetic
"""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING

from teacher_logits.errors import Violation
from teacher_logits.grid import is_size
from teacher_logits.layout import COLUMN_RULES, ColumnKind
from teacher_logits.payload import MAX_TEMPERATURES
from teacher_logits.profiles import VocabularyPolicy
from teacher_logits.protocol import OURS, Spoken, check_protocol
from teacher_logits.terms import Check, Verdict
from teacher_logits_server.admission.selecting import (
    check_selection,
    columns_on_offer,
    selection_checks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits.errors import Fact
    from teacher_logits.profiles import StudentProfile, TeacherProfile

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Beyond these, float32 scores divided by a temperature carry nothing of use."""


def common_vocabulary(student: StudentProfile, teacher: TeacherProfile) -> int:
    """Return how many columns of the vocabulary take part: no id that either side lacks."""
    if is_size(student.vocabulary_size):
        return min(student.vocabulary_size, teacher.vocabulary_size)
    return teacher.vocabulary_size


def check_vocabulary(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool = False
) -> list[Violation]:
    """Return the rules that the two vocabularies break. What was not given breaks none."""
    return [
        *_check_tokenizer(student, teacher),
        *_check_vocabulary_size(student, teacher, is_published=is_published),
    ]


def _check_tokenizer(student: StudentProfile, teacher: TeacherProfile) -> list[Violation]:
    mine, theirs = student.tokenizer_fingerprint, teacher.tokenizer_fingerprint
    if not mine or not theirs or mine == theirs:
        return []
    mine, theirs = mine[:64], theirs[:64]
    return [
        Violation(
            rule="tokenizer_mismatch",
            message=f"the student's tokenizer is {mine}, the teacher's {theirs}: the same id "
            "may be another token; train with the teacher's tokenizer",
            facts={"student_fingerprint": mine, "teacher_fingerprint": theirs},
        )
    ]


def _check_vocabulary_size(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> list[Violation]:
    size = student.vocabulary_size
    if size in (0, teacher.vocabulary_size) or not is_size(size):
        return []  # not_positive has named what is no size
    cannot_mask = is_published and size < teacher.vocabulary_size
    if student.vocabulary_policy is VocabularyPolicy.TRUNCATE and not cannot_mask:
        return []
    way_out = (
        "if it is one tokenizer and a head is padded, give StudentProfile(vocabulary_policy="
        "tl.VocabularyPolicy.TRUNCATE): ids beyond the smaller size are masked"
    )
    if cannot_mask:
        way_out = (
            "a published teacher's entries are selected already, so that its publishers must "
            f"mask the ids from {size} on, and give that vocabulary size"
        )
    return [
        Violation(
            rule="vocab_mismatch",
            message=f"the student has {size} ids, the teacher {teacher.vocabulary_size} (its "
            f"head {teacher.head_rows} rows); {way_out}",
            facts={
                "student_vocabulary_size": size,
                "teacher_vocabulary_size": teacher.vocabulary_size,
                "teacher_head_rows": teacher.head_rows,
            },
        )
    ]


def check_capability(
    student: StudentProfile,
    teacher: TeacherProfile,
    *,
    protocol_version: int,
    is_published: bool = False,
) -> list[Violation]:
    """Return what the student asks for and the teacher cannot give."""
    return [
        *_check_top_k(student, teacher, is_published=is_published),
        *_check_temperatures(student, teacher),
        *_check_columns(student, teacher, is_published=is_published),
        *_check_value_type(student, teacher, is_published=is_published),
        *check_selection(student, teacher, is_published=is_published),
        *check_protocol(Spoken.only(protocol_version), OURS),
    ]


def check_provenance(student: StudentProfile, teacher: TeacherProfile) -> list[Violation]:
    """Return where the teacher's scores come from elsewhere than the student insists on."""
    violations = []
    for name, wanted, has in (
        ("engine", student.engine, teacher.engine),
        ("arithmetic_type", student.arithmetic_type, teacher.arithmetic_type),
    ):
        if wanted and wanted != has:
            violations.append(
                Violation(
                    rule=f"{name}_mismatch",
                    message=f"the student insists on {name} {wanted[:64]!r}, and the teacher has "
                    f"{has!r}; drop the wish, or use another teacher",
                    facts={f"student_{name}": wanted[:64], f"teacher_{name}": has},
                )
            )
    return violations


def describe_scores(student: StudentProfile, teacher: TeacherProfile) -> tuple[Check, ...]:
    """Return the checks of what an admitted student is told: whose, of what, selected how."""
    return (
        _tokenizer_check(student, teacher),
        _vocabulary_check(student, teacher),
        *selection_checks(student, teacher),
        _provenance_check(student, teacher),
    )


def _check_top_k(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> list[Violation]:
    vocabulary_size = common_vocabulary(student, teacher)
    if not is_size(student.top_k) or student.top_k <= min(teacher.top_k, vocabulary_size):
        return []
    most = min(teacher.top_k, vocabulary_size)
    way_out = f"ask for at most {most}"
    if teacher.top_k < vocabulary_size:
        useful = min(student.top_k, vocabulary_size)
        raised = (
            "its publishers' TeacherProfile(top_k=)" if is_published else "the server's --top-k"
        )
        way_out += f", or have {raised} raised to {useful}"
        if useful < student.top_k:
            way_out += f" and ask for {useful}"
    return [
        Violation(
            rule="top_k_too_large",
            message=f"top_k is {student.top_k}; the teacher gives at most {teacher.top_k} entries "
            f"a position, and {vocabulary_size} ids take part; {way_out}",
            facts={
                "top_k": student.top_k,
                "teacher_top_k": teacher.top_k,
                "vocabulary_size": vocabulary_size,
            },
        )
    ]


def _check_temperatures(student: StudentProfile, teacher: TeacherProfile) -> list[Violation]:
    asked, offered = student.all_temperatures, teacher.temperatures
    bad = [t for t in asked if not MIN_TEMPERATURE <= t <= MAX_TEMPERATURE]
    missing = [t for t in asked if offered and t not in (1.0, *offered)]
    if bad:
        why = (
            f"{listed(bad)} cannot be a temperature; give numbers from {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}"
        )
    elif missing:
        why = (
            f"the teacher has no temperature {listed(missing)}; it has {listed(offered)}; ask for "
            "none but these, or have its publishers' TeacherProfile(temperatures=) name it"
        )
    elif len(asked) > MAX_TEMPERATURES:
        most = MAX_TEMPERATURES - 1
        why = f"{len(asked) - 1} temperatures besides 1; ask for at most {most} in one session"
    else:
        return []
    facts: dict[str, Fact] = {
        "temperatures": listed(asked[1:]),
        "teacher_temperatures": listed(offered) or "any",
        "temperature_count": len(asked) - 1,
        "most_temperatures": MAX_TEMPERATURES - 1,
    }
    return [Violation(rule="temperature_unavailable", message=why, facts=facts)]


def _check_columns(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> list[Violation]:
    offered = columns_on_offer(student, teacher, is_published=is_published)
    missing = ", ".join(c.value for c in student.columns if c not in offered)
    if not missing:
        return []
    has = ", ".join(c.value for c in offered)
    way_out = "ask for none but these"
    if is_published:
        way_out += ", or have its publishers' TeacherProfile(columns=) name it"
    return [
        Violation(
            rule="column_unavailable",
            message=f"the teacher has no {missing}; it has {has}; {way_out}",
            facts={"missing": missing, "columns": has},
        )
    ]


def _check_value_type(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> list[Violation]:
    types, _ = COLUMN_RULES[ColumnKind.TOPK_LOGPROBS]
    asked, has = student.value_type, teacher.value_type
    if asked is None or (asked is has if is_published else asked in types):
        return []
    may_be = ", ".join(sorted(t.value for t in types))
    message = f"topk_logprobs cannot be {asked.value}; use {may_be}"
    facts: dict[str, Fact] = {"value_type": asked.value, "value_types": may_be}
    if asked in types:
        message = (
            f"topk_logprobs are published in {has.value}, and the student asks for {asked.value}; "
            "leave value_type out to take them as they are, or have its publishers' "
            f"TeacherProfile(value_type=) say {asked.value}"
        )
        facts = {"value_type": asked.value, "teacher_value_type": has.value}
    return [Violation(rule="column_unavailable", message=message, facts=facts)]


def _tokenizer_check(student: StudentProfile, teacher: TeacherProfile) -> Check:
    given = {"student": student.tokenizer_fingerprint, "teacher": teacher.tokenizer_fingerprint}
    silent = [side for side, fingerprint in given.items() if not fingerprint]
    if silent:
        detail = f"no tokenizer fingerprint from the {' and the '.join(silent)}"
        return Check(name="tokenizer", verdict=Verdict.UNCHECKED, detail=detail)
    detail = f"both have tokenizer {teacher.tokenizer_fingerprint[:64]}"
    return Check(name="tokenizer", verdict=Verdict.PASSED, detail=detail)


def _vocabulary_check(student: StudentProfile, teacher: TeacherProfile) -> Check:
    mine, theirs = student.vocabulary_size, teacher.vocabulary_size
    if mine == 0:
        detail = f"the student gave no vocabulary size; the teacher has {theirs} ids"
        return Check(name="vocabulary", verdict=Verdict.UNCHECKED, detail=detail)
    detail = (
        f"{common_vocabulary(student, teacher)} ids take part, of the student's {mine} and the "
        f"teacher's {theirs}"
    )
    return Check(name="vocabulary", verdict=Verdict.PASSED, detail=detail)


def _provenance_check(student: StudentProfile, teacher: TeacherProfile) -> Check:
    detail = f"engine {teacher.engine!r}, arithmetic {teacher.arithmetic_type!r}"
    if student.engine or student.arithmetic_type:
        return Check(name="provenance", verdict=Verdict.PASSED, detail=detail)
    detail += "; the student insists on none"
    return Check(name="provenance", verdict=Verdict.UNCHECKED, detail=detail)


def listed(numbers: Iterable[float]) -> str:
    """Return temperatures as messages name them: short, and told apart where fp32 does."""
    short = ((f"{n:g}", n) for n in numbers)
    return ", ".join(s if isclose(float(s), n, rel_tol=2**-25) else f"{n:.9g}" for s, n in short)
