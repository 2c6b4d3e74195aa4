"""Whether a payload that was made for another session suits this one.

Pure. Who acquires a payload, or a step, gets at least what its session settled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind
from teacher_logits_server.capability import listed

if TYPE_CHECKING:
    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile


def check_payload_suits(
    student: StudentProfile, payload: Payload, *, teacher_id: str, vocabulary_size: int
) -> None:
    """Refuse a payload that was made for another session and lacks what this one settled.

    Raises:
        PayloadInvalidError: it is another teacher's, or has fewer entries a position, ids
            beyond this session's vocabulary, not all of its temperatures, or another value type.
    """
    asked_type, has_type = student.value_type, None
    if asked_type is not None:
        has_type = payload.column(ColumnKind.TOPK_LOGPROBS).element_type
    lacking = [t for t in student.all_temperatures if t not in payload.temperatures]
    if (
        payload.teacher_id == teacher_id
        and payload.top_k >= student.top_k
        and payload.vocabulary_size <= vocabulary_size
        and not lacking
        and has_type is asked_type
    ):
        return  # a reader waits: no texts are made for nothing
    for wrong, what, asked, has in (
        (payload.teacher_id != teacher_id, "teacher_id", teacher_id, payload.teacher_id),
        (payload.top_k < student.top_k, "top_k", student.top_k, payload.top_k),
        (
            payload.vocabulary_size > vocabulary_size,
            "vocabulary_size",
            vocabulary_size,
            payload.vocabulary_size,
        ),
        (lacking, "temperatures", listed(student.all_temperatures), listed(payload.temperatures)),
        (
            has_type is not asked_type,
            "value_type",
            asked_type.value if asked_type is not None else "",
            has_type.value if has_type is not None else "",
        ),
    ):
        if wrong:
            raise PayloadInvalidError(
                f"payload {payload.payload_id} was made for another session: its {what} is {has}, "
                f"this session's {asked}; open both sessions with the same wishes",
                facts={f"payload_{what}": has, f"session_{what}": asked},
            )
