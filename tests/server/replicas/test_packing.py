"""What goes to a replica and comes back is, bit for bit, what an engine here would have written."""

from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.server.replicas.teacher import MOST, VOCABULARY, Teacher

from teacher_logits.cuts import join_parts
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import (
    Column,
    ElementType,
    sampled_columns,
    scored_id_columns,
    top_k_columns,
)
from teacher_logits.payload import Payload
from teacher_logits.payload_room import HostRoom
from teacher_logits.selection_rules import ClientIds, Nucleus, Sampled, TopK
from teacher_logits_server.engines.answers import Answer, Asked, Part, fill
from teacher_logits_server.engines.keepers import Wanted
from teacher_logits_server.engines.requests import Request, read_request
from teacher_logits_server.engines.stored import StoredAnswer
from teacher_logits_server.replicas.packing import compute, pack, piece_of, returned

TEACHER = Teacher(Path())
K = 5

tokens = st.lists(st.integers(0, MOST - 1), min_size=1, max_size=7)
value_types = st.sampled_from([ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32])
rules = st.sampled_from([TopK(), Nucleus(mass=0.9), Sampled(seed=3), ClientIds()])


@st.composite
def asked(draw: st.DrawFn) -> Request:
    """Some rows, with prefixes and windows."""
    rows = draw(st.lists(tokens, min_size=1, max_size=4))
    prefixes = [draw(st.lists(st.integers(0, MOST - 1), max_size=3)) for _ in rows]
    windows = []
    for row in rows:
        first = draw(st.integers(0, len(row)))
        windows.append((first, draw(st.integers(0, len(row) - first))))
    return read_request(
        input_ids=flat(rows),
        row_lengths=[len(row) for row in rows],
        prefix_ids=flat(prefixes),
        prefix_lengths=[len(each) for each in prefixes],
        row_windows=windows,
    )


def flat(rows: list[list[int]]) -> bytes:
    return b"".join(array("i", row).tobytes() for row in rows)


def answer_of(
    request: Request, rule: TopK | Nucleus | Sampled | ClientIds, value_type: ElementType
) -> tuple[Answer, bytearray]:
    """An answer to a request over memory of its own."""
    rows, positions = request.row_count, request.position_count
    temperatures = (1.0,) if isinstance(rule, Sampled) else (1.0, 2.0)
    ids = None
    columns: tuple[Column, ...]
    if isinstance(rule, Sampled):
        columns, size = sampled_columns(row_count=rows, position_count=positions, entry_count=K)
    elif isinstance(rule, ClientIds):
        ids = (torch.arange(positions * K, dtype=torch.int32) % VOCABULARY).view(positions, K)
        columns, size = scored_id_columns(
            row_count=rows, position_count=positions, entry_count=K, temperature_count=2
        )
    else:
        columns, size = top_k_columns(
            row_count=rows,
            position_count=positions,
            top_k=K,
            temperature_count=2,
            value_type=value_type,
        )
    room = bytearray(size)
    wanted = Wanted(selection=rule, temperatures=temperatures, vocabulary_size=VOCABULARY, ids=ids)
    made = Answer(request, room=HostRoom(memoryview(room)), columns=columns, wanted=wanted)
    return made, room


def parts_of(answer: Asked, borders: list[int]) -> list[Part]:
    """An answer's rows in parts."""
    rows = answer.request.row_count
    edges = sorted({0, rows, *(border for border in borders if border < rows)})
    return [Part(answer=answer, first_row=a, row_count=b - a) for a, b in pairwise(edges)]


def by_replica(parts: list[Part]) -> None:
    """Fill parts as a replica does, its buffer read-only as the object store's memory is."""
    packed = [pack(part) for part in parts]
    data = compute(TEACHER, packed).returned
    data.flags.writeable = False
    for part, scores in zip(parts, returned(packed, data), strict=True):
        scores.copy_to(part)


@given(asked(), rules, value_types, st.lists(st.integers(1, 3), max_size=2))
def test_what_a_replica_computes_is_what_this_process_would_have_written(
    request: Request,
    rule: TopK | Nucleus | Sampled | ClientIds,
    value_type: ElementType,
    borders: list[int],
) -> None:
    here, own = answer_of(request, rule, value_type)
    fill(TEACHER, parts_of(here, borders), wanted=lambda: True)
    elsewhere, theirs = answer_of(request, rule, value_type)
    by_replica(parts_of(elsewhere, borders))
    here.finish(mask=True)
    elsewhere.finish(mask=True)
    assert own == theirs


def test_a_row_that_is_bad_is_bad_when_it_comes_back() -> None:
    request = read_request(input_ids=flat([[1, 2], [3, MOST]]), row_lengths=[2, 2])
    answer, _ = answer_of(request, TopK(), ElementType.FLOAT32)
    by_replica(parts_of(answer, [1]))
    assert answer.finish(mask=True) == 1


def test_requests_of_one_pass_come_back_each_to_its_own() -> None:
    requests = [read_request(input_ids=flat([row]), row_lengths=[len(row)]) for row in ([1], [2])]
    answers = [answer_of(each, TopK(), ElementType.FLOAT32) for each in requests]
    by_replica([part for answer, _ in answers for part in parts_of(answer, [])])
    for answer, room in answers:
        alone, expected = answer_of(answer.request, TopK(), ElementType.FLOAT32)
        fill(TEACHER, parts_of(alone, []), wanted=lambda: True)
        answer.finish(mask=False)
        alone.finish(mask=False)
        assert room == expected


def test_bytes_that_are_not_what_was_asked_for_are_refused() -> None:
    request = read_request(input_ids=flat([[1, 2]]), row_lengths=[2])
    answer, _ = answer_of(request, TopK(), ElementType.FLOAT32)
    [part] = parts_of(answer, [])
    [scores] = returned([pack(part)], numpy.zeros(3, numpy.uint8))
    with pytest.raises(ValueError, match="returned 3 bytes"):
        scores.copy_to(part)


class Rows:
    """Rows that a replica keeps."""

    def __init__(self, data: memoryview, status: bytes) -> None:
        self.data, self.status, self.dropped = data, status, 0

    def drop(self) -> None:
        self.dropped += 1


def stored_by_replica(answer: StoredAnswer, borders: list[int]) -> list[Rows]:
    """Fill an answer's parts as a replica does whose rows stay there."""
    parts = parts_of(answer, borders)
    computed = compute(TEACHER, [pack(part) for part in parts])
    assert not computed.returned.size
    rows = [
        Rows(data.data, status)
        for data, status in zip(computed.stored, computed.statuses, strict=True)
    ]
    for part, own in zip(parts, rows, strict=True):
        assert piece_of(part, key=0).stored_bytes == own.data.nbytes
        answer.take_stored(part, own)
    return rows


@given(asked(), rules, value_types, st.lists(st.integers(1, 3), max_size=2), st.booleans())
def test_what_stays_with_replicas_is_put_together_what_this_process_would_have_written(
    request: Request,
    rule: TopK | Nucleus | Sampled | ClientIds,
    value_type: ElementType,
    borders: list[int],
    is_bad: bool,
) -> None:
    if is_bad:
        request = read_request(input_ids=flat([[1, 2], [3, MOST], [4]]), row_lengths=[2, 2, 1])
    here, own = answer_of(request, rule, value_type)
    fill(TEACHER, parts_of(here, borders), wanted=lambda: True)
    bad = here.finish(mask=True)
    answer = StoredAnswer(request, columns=here.columns, wanted=here.wanted)
    rows = stored_by_replica(answer, borders)
    assert answer.finish(mask=True) == bad == int(is_bad)
    room = bytearray(b"\xff" * len(own))
    parts = [(p.rows, p.positions, own.data) for p, own in zip(answer.parts, rows, strict=True)]
    join_parts(whole(here, len(own)), parts, memoryview(room), copy=copy)
    assert own == room


def copy(found: memoryview, room: memoryview) -> None:
    room[:] = found


def whole(answer: Answer, size_bytes: int) -> Payload:
    """The payload that an answer becomes, as far as its layout goes."""
    return Payload(
        payload_id="p",
        teacher_id="t",
        teacher_revision="",
        first_row=0,
        row_count=answer.request.row_count,
        position_count=answer.request.position_count,
        top_k=K,
        temperatures=(1.0,),
        vocabulary_size=VOCABULARY,
        columns=answer.columns,
        size_bytes=size_bytes,
    )


def stored_answer(leave: list[str]) -> StoredAnswer:
    request = read_request(input_ids=flat([[1, 2], [3, MOST]]), row_lengths=[2, 2])
    model, _ = answer_of(request, TopK(), ElementType.FLOAT32)
    return StoredAnswer(
        request, columns=model.columns, wanted=model.wanted, leave=lambda: leave.append("left")
    )


def test_a_bad_row_that_stays_is_refused_by_its_position() -> None:
    answer = stored_answer([])
    stored_by_replica(answer, [1])
    with pytest.raises(PayloadInvalidError, match="row 1 hold a NaN at position 0"):
        answer.finish(mask=False)


def test_what_stays_is_let_go_of_once_and_so_is_what_comes_too_late() -> None:
    left: list[str] = []
    answer = stored_answer(left)
    rows = stored_by_replica(answer, [1])
    answer.drop()
    answer.drop()
    assert ([each.dropped for each in rows], left) == ([1, 1], ["left"])
    late = stored_by_replica(answer, [])
    assert [each.dropped for each in late] == [1]
