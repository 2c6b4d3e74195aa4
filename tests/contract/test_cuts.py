"""Rows cut out of a payload are that payload's rows, byte for byte, and a payload themselves."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.cuts import Cut, cut_rows, join_parts, part_segments
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ALIGNMENT_BYTES, ColumnKind, ElementType, top_k_columns
from teacher_logits.payload import Payload, check_payload

FIRST_ROW = 16


def payload_of(row_positions: list[int], *, top_k: int = 3, temperatures: int = 2) -> Payload:
    columns, size_bytes = top_k_columns(
        row_count=len(row_positions),
        position_count=sum(row_positions),
        top_k=top_k,
        temperature_count=temperatures,
        value_type=ElementType.FLOAT16,
    )
    return Payload(
        payload_id="p",
        teacher_id="t",
        teacher_revision="",
        first_row=FIRST_ROW,
        row_count=len(row_positions),
        position_count=sum(row_positions),
        top_k=top_k,
        temperatures=tuple(float(1 + t) for t in range(temperatures)),
        vocabulary_size=100,
        columns=columns,
        size_bytes=size_bytes,
    )


def carried_out(cut: Cut, source: bytes) -> bytes:
    target = bytearray(cut.payload.size_bytes)
    for segment in cut.segments:
        start = segment.source_offset_bytes
        target[segment.offset_bytes : segment.offset_bytes + segment.size_bytes] = source[
            start : start + segment.size_bytes
        ]
    return bytes(target)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], int, int]:
    positions = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    first = draw(st.integers(0, len(positions) - 1))
    return positions, first, draw(st.integers(1, len(positions) - first))


@given(cuts())
def test_every_column_of_a_cut_has_the_bytes_of_its_rows(case: tuple[list[int], int, int]) -> None:
    positions, first, count = case
    payload = payload_of(positions)
    source = random.Random(0).randbytes(payload.size_bytes)
    cut = cut_rows(payload, positions, first_row=FIRST_ROW + first, row_count=count)
    check_payload(cut.payload)
    bytes_of_cut = carried_out(cut, source)
    offsets = [0, *accumulate(positions)]
    for column in payload.columns:
        whole = source[column.offset_bytes : column.end_bytes]
        if column.kind is ColumnKind.ROW_OFFSETS:
            start, stop, entries = first, first + count + 1, len(positions) + 1
        elif column.kind.value.startswith("row_"):
            start, stop, entries = first, first + count, len(positions)
        else:
            start, stop, entries = offsets[first], offsets[first + count], sum(positions)
        entry = len(whole) // max(entries, 1)
        target = cut.payload.column(column.kind)
        assert (
            bytes_of_cut[target.offset_bytes : target.end_bytes]
            == (whole[start * entry : stop * entry])
        )


@given(cuts())
def test_a_cut_says_which_rows_and_how_many_positions_it_has(
    case: tuple[list[int], int, int],
) -> None:
    positions, first, count = case
    cut = cut_rows(payload_of(positions), positions, first_row=FIRST_ROW + first, row_count=count)
    assert cut.payload.first_row == FIRST_ROW + first
    assert cut.payload.row_count == count
    assert cut.payload.position_count == sum(positions[first : first + count])


@given(cuts())
def test_segments_come_in_order_and_stay_inside_both(case: tuple[list[int], int, int]) -> None:
    positions, first, count = case
    payload = payload_of(positions)
    cut = cut_rows(payload, positions, first_row=FIRST_ROW + first, row_count=count)
    end = 0
    for segment in cut.segments:
        assert segment.offset_bytes >= end
        assert segment.offset_bytes % ALIGNMENT_BYTES == 0
        end = segment.offset_bytes + segment.size_bytes
        assert segment.source_offset_bytes + segment.size_bytes <= payload.size_bytes
    assert end <= cut.payload.size_bytes


def test_all_rows_cut_out_are_the_payload() -> None:
    payload = payload_of([4, 1, 2])
    assert cut_rows(payload, [4, 1, 2], first_row=FIRST_ROW, row_count=3).payload == payload


@pytest.mark.parametrize(
    ("first_row", "row_count"),
    [(FIRST_ROW - 1, 1), (FIRST_ROW, 4), (FIRST_ROW + 3, 1), (FIRST_ROW, 0)],
)
def test_rows_that_the_payload_does_not_hold_are_refused_with_both_ranges(
    first_row: int, row_count: int
) -> None:
    with pytest.raises(PayloadInvalidError, match=f"{row_count} from row {first_row}") as refused:
        cut_rows(payload_of([4, 1, 2]), [4, 1, 2], first_row=first_row, row_count=row_count)
    assert refused.value.facts["payload_first_row"] == FIRST_ROW


def test_bad_rows_of_a_cut_are_never_more_than_its_rows() -> None:
    payload = payload_of([1, 1, 1])
    cut = cut_rows(replace(payload, bad_row_count=3), [1, 1, 1], first_row=FIRST_ROW, row_count=1)
    assert check_payload(cut.payload).bad_row_count == 1


@pytest.mark.parametrize("positions", [[4, 1], [4, 1, 3], [4, 1, 2, 0]])
def test_positions_that_are_not_the_payload_s_are_refused(positions: list[int]) -> None:
    with pytest.raises(PayloadInvalidError, match="7 positions"):
        cut_rows(payload_of([4, 1, 2]), positions, first_row=FIRST_ROW, row_count=1)


def joined(whole: Payload, positions: list[int], edges: list[int], source: bytes) -> bytes:
    """A payload cut at some rows, and put together again in memory that was used before."""
    offsets = [0, *accumulate(positions)]
    parts = []
    for first, end in pairwise(edges):
        cut = cut_rows(whole, positions, first_row=FIRST_ROW + first, row_count=end - first)
        rows, places = range(first, end), range(offsets[first], offsets[end])
        parts.append((rows, places, memoryview(carried_out(cut, source))))
    room = bytearray(b"\xff" * whole.size_bytes)

    def copy(found: memoryview, target: memoryview) -> None:
        target[:] = found

    join_parts(whole, parts, memoryview(room), copy=copy)
    return bytes(room)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sets(st.integers(1, 5)))
def test_parts_that_tile_a_payload_are_that_payload_again(
    positions: list[int], borders: set[int]
) -> None:
    whole = payload_of(positions)
    source = bytearray(whole.size_bytes)
    for column in whole.columns:
        source[column.offset_bytes : column.end_bytes] = random.Random(0).randbytes(
            column.size_bytes
        )
    edges = sorted({0, len(positions), *(b for b in borders if b < len(positions))})
    assert joined(whole, positions, edges, bytes(source)) == bytes(source)


@pytest.mark.parametrize("edges", [[0, 1], [1, 3], [0, 0, 3]], ids=str)
def test_parts_that_do_not_tile_a_payload_are_refused(edges: list[int]) -> None:
    positions = [2, 3, 1]
    whole = payload_of(positions)
    with pytest.raises(PayloadInvalidError):
        joined(whole, positions, edges, bytes(whole.size_bytes))


def test_rows_that_a_payload_has_not_are_refused() -> None:
    with pytest.raises(PayloadInvalidError, match="no rows"):
        part_segments(payload_of([2, 3]), rows=range(1, 3), positions=range(2, 6))
