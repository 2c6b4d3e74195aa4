"""Whether a payload suits a session: the server's word and the client's are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.services.registry_rig import VOCABULARY, a_payload, a_student

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.selection_rules import TOP_K, Nucleus, SelectionRule
from teacher_logits_client.payloads.entry_guards import check_entries
from teacher_logits_client.payloads.step_guards import check_shape
from teacher_logits_server.admission.suiting import check_payload_suits

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile

RULES = st.sampled_from([TOP_K, Nucleus(mass=0.9), Nucleus(mass=0.9, least=2)])
TEMPERATURES = st.lists(st.sampled_from([2.0, 3.0]), unique=True, max_size=2).map(tuple)


def payload_of(top_k: int, others: tuple[float, ...], selection: SelectionRule) -> Payload:
    payload = a_payload(top_k=top_k)
    return replace(
        payload, payload_id="p-1", temperatures=(1.0, *others), selection=selection, key=None
    )


def is_refused(check: Callable[[], object]) -> bool:
    try:
        check()
    except PayloadInvalidError:
        return True
    return False


def is_refused_by_server(student: StudentProfile, payload: Payload, *, is_whole: bool) -> bool:
    return is_refused(
        lambda: check_payload_suits(
            student,
            payload,
            teacher_id=payload.teacher_id,
            vocabulary_size=VOCABULARY,
            is_whole=is_whole,
        )
    )


@given(
    asked=st.integers(1, 4),
    has=st.integers(1, 4),
    wanted=TEMPERATURES,
    others=TEMPERATURES,
    rule=st.none() | RULES,
    selection=RULES,
)
def test_what_the_server_grants_the_client_takes_and_nothing_else(
    *,
    asked: int,
    has: int,
    wanted: tuple[float, ...],
    others: tuple[float, ...],
    rule: SelectionRule | None,
    selection: SelectionRule,
) -> None:
    student = replace(a_student(), top_k=asked, temperatures=wanted, selection=rule)
    payload = payload_of(has, others, selection)

    assert is_refused_by_server(student, payload, is_whole=True) == is_refused(
        lambda: check_entries(payload, student, None)
    )
    assert is_refused_by_server(student, payload, is_whole=False) == is_refused(
        lambda: check_shape(payload, student)
    )


def test_a_wider_payload_is_refused_by_its_id_with_the_numbers() -> None:
    student, payload = replace(a_student(), top_k=2), payload_of(3, (), TOP_K)

    with pytest.raises(PayloadInvalidError, match="its top_k is 3, this session's 2") as refusal:
        check_payload_suits(
            student,
            payload,
            teacher_id=payload.teacher_id,
            vocabulary_size=VOCABULARY,
            is_whole=True,
        )
    assert refusal.value.facts == {"payload_top_k": 3, "session_top_k": 2}
    assert not is_refused_by_server(student, payload, is_whole=False)
