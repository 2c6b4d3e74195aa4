"""Selection rules on the wire: what is said is heard, and what is unknown is refused."""

from dataclasses import replace

import pytest

from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import (
    ElementType,
    sampled_columns,
    scored_id_columns,
    top_k_columns,
)
from teacher_logits.payload import Payload, check_payload
from teacher_logits.profiles import StudentProfile, TeacherProfile
from teacher_logits.selection_rules import ClientIds, Nucleus, Sampled, SelectionRule, TopK
from teacher_logits.v1 import profile_pb2, selection_pb2
from teacher_logits.wire import (
    student_from_wire,
    student_to_wire,
    teacher_from_wire,
    teacher_to_wire,
)
from teacher_logits.wire.payloads import payload_from_wire, payload_to_wire
from teacher_logits.wire.selection import selection_from_wire, selection_to_wire

RULES: list[SelectionRule] = [
    TopK(),
    Nucleus(mass=0.25, least=3),
    Sampled(seed=2**64 - 1),
    ClientIds(),
]
GRID = BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)


def a_payload(rule: SelectionRule) -> Payload:
    if isinstance(rule, Sampled):
        columns, size = sampled_columns(row_count=2, position_count=3, entry_count=4)
    elif isinstance(rule, ClientIds):
        columns, size = scored_id_columns(
            row_count=2, position_count=3, entry_count=4, temperature_count=1
        )
    else:
        columns, size = top_k_columns(
            row_count=2,
            position_count=3,
            top_k=4,
            temperature_count=1,
            value_type=ElementType.FLOAT16,
        )
    return Payload(
        payload_id="p-1",
        teacher_id="t",
        teacher_revision="",
        first_row=0,
        row_count=2,
        position_count=3,
        top_k=4,
        temperatures=(1.0,),
        vocabulary_size=9,
        columns=columns,
        size_bytes=size,
        selection=rule,
    )


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_heard_as_it_was_said(rule: SelectionRule) -> None:
    assert selection_from_wire(selection_to_wire(rule)) == rule


@pytest.mark.parametrize("rule", RULES)
def test_a_payload_says_what_its_entries_are(rule: SelectionRule) -> None:
    payload = a_payload(rule)

    assert payload_from_wire(payload_to_wire(payload)) == payload


@pytest.mark.parametrize("rule", [None, *RULES[:3]])
def test_a_student_asks_for_a_rule_or_for_what_there_is(rule: SelectionRule | None) -> None:
    student = StudentProfile(batch_grid=GRID, selection=rule)

    assert student_from_wire(student_to_wire(student)).selection == rule


@pytest.mark.parametrize("rule", RULES[:2])
def test_a_teacher_says_how_it_selects(rule: SelectionRule) -> None:
    teacher = TeacherProfile(
        teacher_id="t", vocabulary_size=9, head_rows=9, top_k=4, max_row_tokens=8, selection=rule
    )

    assert teacher_from_wire(teacher_to_wire(teacher)).selection == rule


def test_who_says_nothing_means_the_k_best() -> None:
    assert selection_from_wire(selection_pb2.Selection()) == TopK()


def test_a_rule_of_a_later_release_is_refused() -> None:
    later = selection_pb2.Selection()
    later.MergeFromString(b"\x7a\x00")  # field 15, a message

    with pytest.raises(RequestInvalidError, match="does not know"):
        selection_from_wire(later)


@pytest.mark.parametrize(
    "message",
    [
        selection_pb2.Selection(nucleus=selection_pb2.Nucleus(mass=0.5)),
        selection_pb2.Selection(nucleus=selection_pb2.Nucleus(mass=2.0, least=1)),
        selection_pb2.Selection(client_ids=selection_pb2.ClientIds()),
    ],
)
def test_what_a_student_cannot_ask_for_is_refused(message: selection_pb2.Selection) -> None:
    asked = student_to_wire(StudentProfile(batch_grid=GRID))
    asked.selection.CopyFrom(message)

    with pytest.raises(RequestInvalidError):
        student_from_wire(profile_pb2.StudentProfile.FromString(asked.SerializeToString()))


@pytest.mark.parametrize(("has", "says"), [(0, 2), (0, 3), (2, 0), (3, 0), (2, 3), (3, 2), (2, 1)])
def test_entries_of_another_kind_than_a_payload_says_are_refused(has: int, says: int) -> None:
    payload = replace(a_payload(RULES[has]), selection=RULES[says])

    with pytest.raises(PayloadInvalidError, match=f"its entries are {RULES[says].name}"):
        check_payload(payload)


def test_a_sample_of_another_size_than_said_is_refused() -> None:
    with pytest.raises(PayloadInvalidError, match="sampled_ids"):
        check_payload(replace(a_payload(RULES[2]), top_k=5))
