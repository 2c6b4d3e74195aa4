"""Stream codecs: which of those that a student asks for its streams are encoded in.

Pure. Of each list the first counts that saves something over what is written and can carry it:

    values   fewer bytes an entry than the written element type, or that very type;
             bfloat16_exact only of fp32 log-probabilities whose teacher computes in bf16
    ids      the vocabulary fits

Samples, fp32 weights and int32 ids, go as they were written: a session of ``Sampled`` has no other
payloads, and is granted no codec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.encodings import AS_WRITTEN, IdCodec, StreamCodec, ValueCodec, value_codec_for
from teacher_logits.error_bounds import EXACT, bound_of
from teacher_logits.errors import Violation
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.selection_rules import Sampled
from teacher_logits.terms import StreamTerms
from teacher_logits_server.admission.capability import common_vocabulary

if TYPE_CHECKING:
    from teacher_logits.profiles import StudentProfile, TeacherProfile


def check_codecs(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> list[Violation]:
    """Return ``codec_unavailable`` for each list of which nothing can be had."""
    if isinstance(student.selection, Sampled):
        return _check_for_samples(student)
    violations = []
    written = _written(student, teacher, is_published=is_published)
    if student.value_codecs and _values(student, teacher, written) is None:
        asked = ", ".join(each.value for each in student.value_codecs)
        violations.append(
            Violation(
                rule="codec_unavailable",
                message=f"log-probabilities are written in {written.value} (arithmetic "
                f"{teacher.arithmetic_type!r}), of which codec {asked} saves nothing or cannot "
                "carry it; end value_codecs with 'as_written'",
                facts={
                    "value_codecs": asked,
                    "value_type": written.value,
                    "arithmetic_type": teacher.arithmetic_type,
                },
            )
        )
    vocabulary = common_vocabulary(student, teacher)
    if student.id_codecs and _ids(student, vocabulary) is None:
        asked = ", ".join(each.value for each in student.id_codecs)
        most = max(each.most_ids for each in student.id_codecs)
        violations.append(
            Violation(
                rule="codec_unavailable",
                message=f"{vocabulary} ids take part, and codec {asked} carries {most} at most; "
                "end id_codecs with 'planes24' or 'int32'",
                facts={"id_codecs": asked, "vocabulary_size": vocabulary, "most_ids": most},
            )
        )
    return violations


def choose_codec(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> StreamTerms:
    """Return what an admitted student's streams are encoded in, and the bound of that."""
    if isinstance(student.selection, Sampled):
        return StreamTerms(codec=AS_WRITTEN, bound=EXACT)
    written = _written(student, teacher, is_published=is_published)
    codec = StreamCodec(
        values=_values(student, teacher, written) or ValueCodec.AS_WRITTEN,
        ids=_ids(student, common_vocabulary(student, teacher)) or IdCodec.INT32,
    )
    top_k = max(student.top_k, teacher.top_k if is_published else 0)
    return StreamTerms(codec=codec, bound=bound_of(codec, written=written, top_k=top_k))


def _check_for_samples(student: StudentProfile) -> list[Violation]:
    lists = (
        ("value_codecs", [each.value for each in student.value_codecs], ("as_written", "float32")),
        ("id_codecs", [each.value for each in student.id_codecs], ("int32",)),
    )
    return [
        Violation(
            rule="codec_unavailable",
            message="a sample goes as it was written, in fp32 weights and int32 ids, which codec "
            f"{', '.join(asked)} does not carry; end {name} with {carried[0]!r}, or leave it out",
            facts={name: ", ".join(asked), "selection": "sampled"},
        )
        for name, asked, carried in lists
        if asked and not {*carried} & {*asked}
    ]


def _written(
    student: StudentProfile, teacher: TeacherProfile, *, is_published: bool
) -> ElementType:
    if is_published:
        return teacher.value_type
    return student.value_type or ElementType.FLOAT16


def _values(
    student: StudentProfile, teacher: TeacherProfile, written: ElementType
) -> ValueCodec | None:
    has_logsumexp = ColumnKind.LOGSUMEXP in teacher.columns
    for asked in student.value_codecs:
        if asked is ValueCodec.BFLOAT16_EXACT and teacher.arithmetic_type not in ("", "bfloat16"):
            continue
        found = value_codec_for(asked, written, has_logsumexp=has_logsumexp)
        if found is not None:
            return found
    return None


def _ids(student: StudentProfile, vocabulary_size: int) -> IdCodec | None:
    return next((each for each in student.id_codecs if vocabulary_size <= each.most_ids), None)
