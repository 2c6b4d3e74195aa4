"""Whether a payload that was made for another session suits this one.

Pure. Who acquires a payload, or a step, gets at least what its session settled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind
from teacher_logits.selection_rules import TOP_K, ClientIds, Sampled
from teacher_logits_server.capability import listed

if TYPE_CHECKING:
    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile


def check_payload_suits(
    student: StudentProfile, payload: Payload, *, teacher_id: str, vocabulary_size: int
) -> None:
    """Refuse a payload that was made for another session and lacks what this one settled.

    Ids that a client chose are what they are: of those, teacher and vocabulary must suit.

    Raises:
        PayloadInvalidError: it is another teacher's, or has fewer entries a position, ids
            beyond this session's vocabulary, not all of its temperatures, or another value type;
            or its entries were selected otherwise.
    """
    asked_type, has_type = student.value_type, None
    chosen = isinstance(payload.selection, ClientIds)
    sampled = isinstance(payload.selection, Sampled)
    if asked_type is not None and not (chosen or sampled):
        has_type = payload.column(ColumnKind.TOPK_LOGPROBS).element_type
    else:
        asked_type = None
    selection = student.selection or (payload.selection if payload.key is not None else TOP_K)
    lacking = [t for t in student.all_temperatures if t not in payload.temperatures]
    if chosen:
        selection, lacking = payload.selection, []
    fewest = 0 if chosen else student.top_k
    if (
        payload.teacher_id == teacher_id
        and payload.top_k >= fewest
        and payload.selection == selection
        and payload.vocabulary_size <= vocabulary_size
        and not lacking
        and has_type is asked_type
    ):
        return  # a reader waits: no texts are made for nothing
    for wrong, what, asked, has in (
        (payload.teacher_id != teacher_id, "teacher_id", teacher_id, payload.teacher_id),
        (payload.top_k < fewest, "top_k", fewest, payload.top_k),
        (
            payload.selection != selection,
            "selection",
            repr(selection),
            repr(payload.selection),
        ),
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
