"""Descriptions of payloads: what a receiver refuses before it touches a byte."""

from __future__ import annotations

import dataclasses
import math

import pytest

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import (
    ALIGNMENT_BYTES,
    Column,
    ColumnKind,
    ElementType,
    lay_out,
    top_k_columns,
)
from teacher_logits.payload import MAX_SIZE_BYTES, MAX_TEMPERATURES, Payload, check_payload


def sound(**changes: object) -> Payload:
    columns, size_bytes = top_k_columns(
        row_count=2,
        position_count=6,
        top_k=3,
        temperature_count=2,
        value_type=ElementType.FLOAT16,
    )
    payload = Payload(
        payload_id="p",
        teacher_id="teacher",
        teacher_revision="r1",
        first_row=0,
        row_count=2,
        position_count=6,
        top_k=3,
        temperatures=(1.0, 2.0),
        vocabulary_size=100,
        columns=columns,
        size_bytes=size_bytes,
    )
    return dataclasses.replace(payload, **changes)  # type: ignore[arg-type]


def with_column(index: int, **changes: object) -> Payload:
    columns = list(sound().columns)
    columns[index] = dataclasses.replace(columns[index], **changes)  # type: ignore[arg-type]
    return sound(columns=tuple(columns))


def test_what_holds_together_is_returned() -> None:
    payload = sound()

    assert check_payload(payload) is payload


def test_a_payload_without_columns_holds_together() -> None:
    check_payload(sound(columns=(), row_count=0, position_count=0))


@pytest.mark.parametrize("size_bytes", [1, MAX_SIZE_BYTES])
def test_a_size_that_a_payload_may_have_passes(size_bytes: int) -> None:
    check_payload(sound(columns=(), size_bytes=size_bytes))


@pytest.mark.parametrize("count", [1, MAX_TEMPERATURES])
def test_one_to_five_temperatures_pass(count: int) -> None:
    check_payload(sound(columns=(), temperatures=(1.0, 2.0, 3.0, 4.0, 5.0)[:count]))


@pytest.mark.parametrize("size_bytes", [0, -1, MAX_SIZE_BYTES + 1])
def test_a_size_that_no_payload_has_is_refused(size_bytes: int) -> None:
    with pytest.raises(PayloadInvalidError, match=str(size_bytes)):
        check_payload(sound(size_bytes=size_bytes))


@pytest.mark.parametrize(
    "name",
    ["first_row", "row_count", "position_count", "top_k", "vocabulary_size", "bad_row_count"],
)
def test_a_negative_count_is_refused_by_name(name: str) -> None:
    with pytest.raises(PayloadInvalidError, match=f"{name} -1") as caught:
        check_payload(sound(columns=(), **{name: -1}))

    assert caught.value.facts[name] == -1


def test_more_bad_rows_than_rows_are_refused() -> None:
    check_payload(sound(bad_row_count=2))
    with pytest.raises(PayloadInvalidError, match="bad_row_count 3"):
        check_payload(sound(bad_row_count=3))


@pytest.mark.parametrize(
    "temperatures",
    [(), (2.0,), (2.0, 1.0), (math.nan,), (1.0,) * (MAX_TEMPERATURES + 1)],
)
def test_temperatures_start_with_one_and_are_few(temperatures: tuple[float, ...]) -> None:
    with pytest.raises(PayloadInvalidError, match="temperatures"):
        check_payload(sound(columns=(), temperatures=temperatures))


def test_a_kind_is_there_once() -> None:
    columns, size_bytes = lay_out([(ColumnKind.ROW_STATUS, ElementType.UINT8, (2,))] * 2)

    with pytest.raises(PayloadInvalidError, match="twice"):
        check_payload(sound(columns=columns, size_bytes=size_bytes))


def test_an_element_type_that_a_kind_cannot_have_is_refused_with_those_it_can() -> None:
    with pytest.raises(PayloadInvalidError, match="is int64, and may be int32"):
        check_payload(with_column(0, element_type=ElementType.INT64))


@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (18,), (6, 3, 1), ()])
def test_a_shape_that_does_not_follow_from_the_counts_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PayloadInvalidError, match=r"should have \(6, 3\)"):
        check_payload(with_column(0, shape=shape))


def test_a_negative_axis_of_no_known_size_is_refused() -> None:
    columns, size_bytes = lay_out([(ColumnKind.HIDDEN_STATES, ElementType.FLOAT16, (6, 8))])
    check_payload(sound(columns=columns, size_bytes=size_bytes))

    negative = (dataclasses.replace(columns[0], shape=(6, -8)),)
    with pytest.raises(PayloadInvalidError, match="hidden_states"):
        check_payload(sound(columns=negative, size_bytes=size_bytes))


@pytest.mark.parametrize("offset", [-ALIGNMENT_BYTES, 0, 128, ALIGNMENT_BYTES + 1])
def test_a_column_starts_aligned_and_behind_the_one_before(offset: int) -> None:
    sound_offset = sound().columns[2].offset_bytes
    assert offset < sound_offset

    with pytest.raises(PayloadInvalidError, match=f"starts at byte {offset}"):
        check_payload(with_column(2, offset_bytes=offset))


def test_columns_end_within_the_payload() -> None:
    payload = sound()
    end = payload.columns[-1].end_bytes
    check_payload(sound(size_bytes=end))

    with pytest.raises(PayloadInvalidError, match=f"up to byte {end}") as caught:
        check_payload(sound(size_bytes=end - 1))

    assert caught.value.facts == {"end_bytes": end, "size_bytes": end - 1}


def test_a_column_is_found_by_its_kind() -> None:
    column = sound().column(ColumnKind.LOG_TAIL)

    assert isinstance(column, Column)
    assert column.shape == (6, 2)


def test_a_column_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(PayloadInvalidError, match=r"no column logits; it has topk_ids, ") as caught:
        sound().column(ColumnKind.LOGITS)

    assert caught.value.facts["column"] == "logits"
