"""Whether a payload that was made for another session suits this one.

Pure. Who acquires a payload, or a step, gets at least what its session settled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind
from teacher_logits.selection_rules import TOP_K, ClientIds, Sampled
from teacher_logits_server.admission.capability import listed

if TYPE_CHECKING:
    from teacher_logits.layout import ElementType
    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.selection_rules import SelectionRule


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
    wishes = _wishes(student, payload)
    value_type = wishes.value_type
    has_type = value_type and payload.column(ColumnKind.TOPK_LOGPROBS).element_type
    lacking = [t for t in wishes.temperatures if t not in payload.temperatures]
    if (
        payload.teacher_id == teacher_id
        and payload.top_k >= wishes.top_k
        and payload.selection == wishes.selection
        and payload.vocabulary_size <= vocabulary_size
        and not lacking
        and has_type is value_type
    ):
        return  # a reader waits: no texts are made for nothing
    for wrong, what, asked, has in (
        (payload.teacher_id != teacher_id, "teacher_id", teacher_id, payload.teacher_id),
        (payload.top_k < wishes.top_k, "top_k", wishes.top_k, payload.top_k),
        (
            payload.selection != wishes.selection,
            "selection",
            str(wishes.selection),
            str(payload.selection),
        ),
        (
            payload.vocabulary_size > vocabulary_size,
            "vocabulary_size",
            vocabulary_size,
            payload.vocabulary_size,
        ),
        (lacking, "temperatures", listed(wishes.temperatures), listed(payload.temperatures)),
        (has_type is not value_type, "value_type", _name(value_type), _name(has_type)),
    ):
        if wrong:
            raise PayloadInvalidError(
                f"payload {payload.payload_id} was made for another session: its {what} is {has}, "
                f"this session's {asked}; open both sessions with the same wishes",
                facts={f"payload_{what}": has, f"session_{what}": asked},
            )


class _Wishes(NamedTuple):
    """What a session insists on of a payload; a ``value_type`` None is any."""

    top_k: int
    temperatures: tuple[float, ...]
    value_type: ElementType | None
    selection: SelectionRule


def _wishes(student: StudentProfile, payload: Payload) -> _Wishes:
    rule = payload.selection
    if isinstance(rule, ClientIds):
        return _Wishes(0, (), None, rule)
    asked = student.selection or (rule if payload.key is not None else TOP_K)
    if isinstance(rule, Sampled):  # one seed is as good as another
        asked = rule if isinstance(asked, Sampled) else asked
        return _Wishes(student.top_k, (1.0,), None, asked)
    return _Wishes(student.top_k, student.all_temperatures, student.value_type, asked)


def _name(value_type: ElementType | None) -> str:
    return "" if value_type is None else value_type.value
