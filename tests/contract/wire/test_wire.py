"""Profiles, terms, payloads and leases cross the wire whole, and nonsense is refused by name."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits import wire
from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.keys import PayloadKey
from teacher_logits.layout import ColumnKind, ElementType, top_k_columns
from teacher_logits.locality import ModelGrid
from teacher_logits.payload import Extent, Payload
from teacher_logits.profiles import (
    NodeHints,
    StudentProfile,
    TeacherProfile,
    VocabularyPolicy,
)
from teacher_logits.terms import Check, LeaseTerms, SessionTerms, Verdict
from teacher_logits.transport import (
    Locality,
    Refusal,
    RefusalReason,
    Settlement,
    Transport,
)
from teacher_logits.v1 import (
    payload_pb2,
    profile_pb2,
    session_pb2,
    tensor_pb2,
    transport_pb2,
)
from teacher_logits.wire import payloads as wire_payloads
from teacher_logits.wire import session as wire_session
from teacher_logits.wire import transport as wire_transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

M = TypeVar("M", bound="Message")

int32 = st.integers(-(2**31), 2**31 - 1)
text = st.text(max_size=12)
columns = st.lists(st.sampled_from(ColumnKind), max_size=4).map(tuple)
temperatures = st.lists(st.floats(allow_nan=False), max_size=5).map(tuple)
value_types = [ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32]

batch_grids = st.builds(
    BatchGrid, global_batch_size=int32, data_parallel_size=int32, micro_batch_size=int32
)
model_grids = st.builds(
    ModelGrid,
    **{field.name: int32 for field in dataclasses.fields(ModelGrid)},
)
hints = st.builds(
    NodeHints,
    host_name=text,
    boot_id=text,
    pid=st.integers(0, 2**63 - 1),
    namespaces=st.dictionaries(text, st.integers(0, 2**64 - 1), max_size=3),
    device_uuids=st.lists(text, max_size=3).map(tuple),
    versions=st.dictionaries(text, text, max_size=3),
    ray_node_id=text,
)
teachers = st.builds(
    TeacherProfile,
    teacher_id=text,
    vocabulary_size=int32,
    head_rows=int32,
    top_k=int32,
    max_row_tokens=int32,
    revision=text,
    batch_grid=st.none() | batch_grids,
    model_grid=st.none() | model_grids,
    tokenizer_fingerprint=text,
    temperatures=temperatures,
    columns=columns,
    engine=text,
    arithmetic_type=text,
    hints=hints,
)
students = st.builds(
    StudentProfile,
    batch_grid=batch_grids,
    data_parallel_rank=int32,
    teacher_id=text,
    model_grid=st.none() | model_grids,
    tokenizer_fingerprint=text,
    vocabulary_size=int32,
    vocabulary_policy=st.sampled_from(VocabularyPolicy),
    top_k=int32,
    temperatures=temperatures,
    columns=columns,
    value_type=st.sampled_from(ElementType),
    student_id=text,
    readers_per_rank=int32,
    engine=text,
    arithmetic_type=text,
    transports=st.lists(st.sampled_from(Transport), max_size=5).map(tuple),
    locality=st.sampled_from(Locality),
    hints=hints,
)
refusals = st.builds(
    Refusal,
    transport=st.sampled_from(Transport),
    reason=st.sampled_from(RefusalReason),
    message=text,
)
settlements = st.builds(
    Settlement,
    writer_id=text,
    transport=st.none() | st.sampled_from(Transport),
    refusals=st.lists(refusals, max_size=3).map(tuple),
)
spans = st.timedeltas(timedelta(0), timedelta(days=10_000))
terms = st.builds(
    SessionTerms,
    session_id=text,
    epoch=text,
    ttl=spans,
    renew_interval=spans,
    default_wait=spans,
    teacher=teachers,
    checks=st.lists(
        st.builds(Check, name=text, verdict=st.sampled_from(Verdict), detail=text), max_size=3
    ).map(tuple),
    vocabulary_size=int32,
    max_request_tokens=int32,
    settlements=st.lists(settlements, max_size=2).map(tuple),
)


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    rows, positions = draw(st.integers(0, 5)), draw(st.integers(0, 9))
    top_k = draw(st.integers(1, 9))
    others = draw(st.lists(st.floats(0.1, 9), max_size=4, unique=True))
    laid_out, size_bytes = top_k_columns(
        row_count=rows,
        position_count=positions,
        top_k=top_k,
        temperature_count=1 + len(others),
        value_type=draw(st.sampled_from(value_types)),
    )
    return Payload(
        payload_id=draw(text),
        teacher_id=draw(text),
        teacher_revision=draw(text),
        first_row=draw(st.integers(0, 2**62)),
        row_count=rows,
        position_count=positions,
        top_k=top_k,
        temperatures=(1.0, *others),
        vocabulary_size=draw(st.integers(0, 2**31 - 1)),
        columns=laid_out,
        size_bytes=size_bytes,
        bad_row_count=draw(st.integers(0, rows)),
        key=draw(
            st.none()
            | st.builds(
                PayloadKey, teacher_id=text, step=st.integers(0, 2**62), shard=st.integers(0, 9)
            )
        ),
    )


@st.composite
def leases(draw: st.DrawFn) -> LeaseTerms:
    payload = draw(payloads())
    extent = Extent(
        slab_id=draw(text),
        offset_bytes=draw(st.integers(0, 2**40)),
        size_bytes=payload.size_bytes + draw(st.integers(0, 4096)),
        slot=draw(st.integers(0, 8183)),
        generation=draw(st.integers(0, 2**63)),
    )
    return LeaseTerms(
        lease_id=draw(text),
        payload=payload,
        writer_id=draw(text),
        extent=draw(st.sampled_from([None, extent])),
    )


def sent(message: M) -> M:
    """The message as it comes out at the other end."""
    return type(message).FromString(message.SerializeToString())


class TestRoundTrips:
    @given(teachers)
    def test_of_teachers(self, teacher: TeacherProfile) -> None:
        assert wire.teacher_from_wire(sent(wire.teacher_to_wire(teacher))) == teacher

    @given(students)
    def test_of_students(self, student: StudentProfile) -> None:
        assert wire.student_from_wire(sent(wire.student_to_wire(student))) == student

    @given(terms)
    def test_of_sessions(self, terms: SessionTerms) -> None:
        message = sent(wire_session.session_to_wire(terms))

        assert wire_session.session_from_wire(message) == terms

    @given(refusals)
    def test_of_refusals(self, refusal: Refusal) -> None:
        message = sent(wire_transport.refusal_to_wire(refusal))

        assert wire_transport.refusal_from_wire(message) == refusal

    @given(payloads())
    def test_of_payloads(self, payload: Payload) -> None:
        message = sent(wire_payloads.payload_to_wire(payload))

        assert wire_payloads.payload_from_wire(message) == payload

    @given(leases())
    def test_of_leases(self, lease: LeaseTerms) -> None:
        assert wire_payloads.lease_from_wire(sent(wire_payloads.lease_to_wire(lease))) == lease

    @pytest.mark.parametrize("temperature", [0.7, 0.1, 1 / 3])
    def test_of_a_temperature_are_exact(self, temperature: float) -> None:
        student = StudentProfile(batch_grid=GRID, temperatures=(temperature,))

        there = wire.student_from_wire(sent(wire.student_to_wire(student)))

        assert there.temperatures == (temperature,)


GRID = BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (ColumnKind, tensor_pb2.ColumnKind),
        (ElementType, tensor_pb2.ElementType),
        (Transport, transport_pb2.Transport),
        (Locality, profile_pb2.Locality),
        (VocabularyPolicy, profile_pb2.VocabularyPolicy),
        (Verdict, session_pb2.Verdict),
    ],
)
def test_the_schema_has_every_name_that_the_code_has_and_no_other(
    kind: type[ColumnKind], numbers: type[tensor_pb2.ColumnKind]
) -> None:
    names = [name for name, number in numbers.items() if number]
    prefix = next(name for name, number in numbers.items() if not number)
    prefix = prefix.removesuffix("UNSPECIFIED")

    assert {name.removeprefix(prefix) for name in names} == set(kind.__members__)


class TestWhatIsRefused:
    @pytest.mark.parametrize("number", [0, -1, 99])
    @pytest.mark.parametrize(
        "read",
        [wire.element_type_from_wire, wire.column_kind_from_wire, wire.transport_from_wire],
    )
    def test_a_number_that_this_release_does_not_know(
        self, read: Callable[[int], object], number: int
    ) -> None:
        with pytest.raises(RequestInvalidError, match=str(number or "is not set")) as caught:
            read(number)

        assert caught.value.facts["number"] == number

    def test_a_student_that_says_nothing(self) -> None:
        with pytest.raises(RequestInvalidError, match="vocabulary_policy is not set"):
            wire.student_from_wire(profile_pb2.StudentProfile())

    @pytest.mark.parametrize(
        "changes",
        [
            {"top_k": 2**31},
            {"student_id": "\ud800"},
            {"batch_grid": dataclasses.replace(GRID, global_batch_size=2**40)},
            {"model_grid": ModelGrid(node_count=1, gpus_per_node=-(2**40))},
        ],
    )
    def test_a_profile_that_no_message_can_hold(self, changes: dict[str, object]) -> None:
        student = dataclasses.replace(
            StudentProfile(batch_grid=GRID),
            **changes,  # type: ignore[arg-type]
        )

        with pytest.raises(RequestInvalidError, match="student's profile cannot be sent"):
            wire.student_to_wire(student)

    def test_a_refusal_for_no_known_reason(self) -> None:
        message = transport_pb2.TransportRefusal(
            transport=transport_pb2.TRANSPORT_STREAM, reason="BECAUSE"
        )

        with pytest.raises(RequestInvalidError, match="BECAUSE"):
            wire_transport.refusal_from_wire(message)

    def test_a_lease_from_a_source_of_tomorrow(self) -> None:
        with pytest.raises(RequestInvalidError, match="source"):
            wire_payloads.lease_from_wire(payload_pb2.Lease(lease_id="l"))

    @given(leases())
    def test_a_lease_whose_payload_is_larger_than_its_room(self, lease: LeaseTerms) -> None:
        extent = Extent(
            slab_id="slab",
            offset_bytes=0,
            size_bytes=lease.payload.size_bytes - 1,
            slot=0,
            generation=2,
        )
        in_slab = dataclasses.replace(lease, extent=extent, as_object=False)
        message = wire_payloads.lease_to_wire(in_slab)

        with pytest.raises(PayloadInvalidError, match="bytes of room"):
            wire_payloads.lease_from_wire(message)

    @given(payloads())
    def test_a_payload_that_does_not_hold_together(self, payload: Payload) -> None:
        message = wire_payloads.payload_to_wire(payload)
        message.columns[0].shape[0] += 1

        with pytest.raises(PayloadInvalidError, match="topk_ids"):
            wire_payloads.payload_from_wire(message)


def test_not_a_number_crosses_as_it_is() -> None:
    student = StudentProfile(batch_grid=GRID, temperatures=(math.nan,))

    (there,) = wire.student_from_wire(sent(wire.student_to_wire(student))).temperatures

    assert math.isnan(there)


@pytest.mark.parametrize(("field", "most"), [("columns", 64), ("transports", 16)])
def test_a_list_of_a_profile_is_counted_before_it_is_read(field: str, most: int) -> None:
    message = wire.student_to_wire(StudentProfile(batch_grid=GRID, top_k=8))
    message.ClearField(field)
    getattr(message, field).extend([1] * most)
    assert len(getattr(wire.student_from_wire(message), field)) == most

    getattr(message, field).append(99)
    with pytest.raises(RequestInvalidError, match=field) as caught:
        wire.student_from_wire(message)

    assert (caught.value.facts["entries"], caught.value.facts["limit"]) == (most + 1, most)


def test_more_temperatures_than_are_read_are_refused() -> None:
    message = wire.student_to_wire(StudentProfile(batch_grid=GRID, top_k=8))
    message.temperatures.extend([2.0] * 17)

    with pytest.raises(RequestInvalidError, match="temperatures has 17 entries; give at most 16"):
        wire.student_from_wire(message)


def test_an_enum_that_is_not_set_is_named_by_its_field_with_its_members() -> None:
    message = wire.student_to_wire(StudentProfile(batch_grid=GRID, top_k=8))
    message.vocabulary_policy = profile_pb2.VOCABULARY_POLICY_UNSPECIFIED

    with pytest.raises(
        RequestInvalidError, match="vocabulary_policy is not set; give one of STRICT, TRUNCATE"
    ):
        wire.student_from_wire(message)
