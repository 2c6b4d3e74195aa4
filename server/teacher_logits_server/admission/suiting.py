"""Whether a payload that was made for another session suits this one.

Pure. Who acquires a step gets at least what its session settled, and reads what it asked for of
it. A payload by its id is read as it is, and so it has just that; the client's ``entry_guards`` say
the same.
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
    student: StudentProfile,
    payload: Payload,
    *,
    teacher_id: str,
    vocabulary_size: int,
    is_whole: bool = False,
) -> None:
    """Refuse a payload that was made for another session and is not what this one settled.

    Ids that a client chose are what they are: of those, teacher and vocabulary must suit.

    Args:
        is_whole: it is read by its id, and more entries or temperatures are not passed over.

    Raises:
        PayloadInvalidError: it is another teacher's, or has fewer entries a position, ids
            beyond this session's vocabulary, not all of its temperatures, or another value type;
            or its entries were selected otherwise; or it is read by its id, and a part.
    """
    if is_whole and payload.part is not None:
        raise _is_part(payload.payload_id, payload.part.text)
    wishes = _wishes(student, payload, is_whole=is_whole)
    value_type = wishes.value_type
    has_type = value_type and payload.column(ColumnKind.TOPK_LOGPROBS).element_type
    if (
        payload.teacher_id == teacher_id
        and wishes.has_entries(payload)
        and payload.selection == wishes.selection
        and payload.vocabulary_size <= vocabulary_size
        and wishes.has_temperatures(payload)
        and has_type is value_type
    ):
        return  # a reader waits: no texts are made for nothing
    has, asked = payload, wishes
    size, most = payload.vocabulary_size, vocabulary_size
    temperatures, wanted = listed(has.temperatures), listed(asked.temperatures)
    for fits, what, says, said in (
        (has.teacher_id == teacher_id, "teacher_id", has.teacher_id, teacher_id),
        (asked.has_entries(has), "top_k", has.top_k, asked.top_k),
        (has.selection == asked.selection, "selection", str(has.selection), str(asked.selection)),
        (size <= most, "vocabulary_size", size, most),
        (asked.has_temperatures(has), "temperatures", temperatures, wanted),
        (has_type is value_type, "value_type", _name(has_type), _name(value_type)),
    ):
        if not fits:
            raise PayloadInvalidError(
                f"payload {payload.payload_id} was made for another session: its {what} is {says}, "
                f"this session's {said}; open both sessions with the same wishes",
                facts={f"payload_{what}": says, f"session_{what}": said},
            )


def _is_part(payload_id: str, part: str) -> PayloadInvalidError:
    return PayloadInvalidError(
        f"payload {payload_id} holds a part of its rows ({part}), as one of several ranks of its "
        "teacher: acquire its step, which puts them together",
        facts={"payload_id": payload_id, "part": part},
    )


class _Wishes(NamedTuple):
    """What a session insists on of a payload; a ``value_type`` None is any."""

    top_k: int
    temperatures: tuple[float, ...]
    value_type: ElementType | None
    selection: SelectionRule
    is_exact: bool

    def has_entries(self, payload: Payload) -> bool:
        """Say whether a payload has as many entries a position."""
        return payload.top_k == self.top_k or (payload.top_k > self.top_k and not self.is_exact)

    def has_temperatures(self, payload: Payload) -> bool:
        """Say whether a payload has these temperatures."""
        has = payload.temperatures
        return has == self.temperatures or (
            not self.is_exact and all(each in has for each in self.temperatures)
        )


def _wishes(student: StudentProfile, payload: Payload, *, is_whole: bool) -> _Wishes:
    rule = payload.selection
    if isinstance(rule, ClientIds):
        return _Wishes(0, (), None, rule, is_exact=False)
    asked = student.selection or (TOP_K if is_whole else rule)
    if isinstance(rule, Sampled):  # one seed is as good as another
        asked = rule if isinstance(asked, Sampled) else asked
        return _Wishes(student.top_k, (1.0,), None, asked, is_whole)
    temperatures = student.all_temperatures
    return _Wishes(student.top_k, temperatures, student.value_type, asked, is_whole)


def _name(value_type: ElementType | None) -> str:
    return "" if value_type is None else value_type.value
