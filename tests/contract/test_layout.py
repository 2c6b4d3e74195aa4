"""Where columns lie: aligned, apart, in order, and within the payload."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import (
    ALIGNMENT_BYTES,
    COLUMN_RULES,
    ColumnKind,
    ElementType,
    is_on_device,
    lay_out,
    round_up,
    top_k_columns,
)

specs = st.lists(
    st.tuples(
        st.sampled_from(ColumnKind),
        st.sampled_from(ElementType),
        st.lists(st.integers(0, 40), max_size=3),
    ),
    max_size=9,
)


@given(specs)
def test_columns_are_aligned_and_apart_and_inside(
    specs: list[tuple[ColumnKind, ElementType, list[int]]],
) -> None:
    columns, size_bytes = lay_out(specs)

    end = 0
    for column, (kind, element_type, shape) in zip(columns, specs, strict=True):
        assert (column.kind, column.element_type, column.shape) == (
            kind,
            element_type,
            tuple(shape),
        )
        assert column.offset_bytes % ALIGNMENT_BYTES == 0
        assert end <= column.offset_bytes < end + ALIGNMENT_BYTES
        assert column.size_bytes == math.prod(shape) * element_type.size_bytes
        end = column.end_bytes
    assert end <= size_bytes
    assert size_bytes % ALIGNMENT_BYTES == 0
    assert size_bytes > 0


@pytest.mark.parametrize(
    ("size", "multiple", "rounded"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)]
)
def test_rounding_up_never_goes_down(size: int, multiple: int, rounded: int) -> None:
    assert round_up(size, multiple) == rounded


def test_every_kind_of_column_has_its_rule() -> None:
    assert set(COLUMN_RULES) == set(ColumnKind)


def test_a_scored_payload_has_the_columns_of_the_contract() -> None:
    columns, _ = top_k_columns(
        row_count=3,
        position_count=10,
        top_k=4,
        temperature_count=2,
        value_type=ElementType.BFLOAT16,
    )

    assert [(c.kind.value, c.element_type.value, c.shape) for c in columns] == [
        ("topk_ids", "int32", (10, 4)),
        ("topk_logprobs", "bfloat16", (10, 4)),
        ("log_tail", "float32", (10, 2)),
        ("logsumexp", "float32", (10, 2)),
        ("actual_logprob", "float32", (10,)),
        ("row_offsets", "int64", (4,)),
        ("row_windows", "int32", (3, 2)),
        ("row_digests", "uint8", (3, 16)),
        ("row_status", "uint8", (3,)),
    ]


@given(
    rows=st.integers(0, 5),
    positions=st.integers(0, 50),
    top_k=st.integers(1, 70),
    temperatures=st.integers(1, 5),
    value_type=st.sampled_from([ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32]),
)
def test_a_scored_payload_follows_the_rules_of_its_columns(
    rows: int, positions: int, top_k: int, temperatures: int, value_type: ElementType
) -> None:
    sizes = {"P": positions, "N": rows, "N+1": rows + 1, "K": top_k, "T": temperatures}

    columns, _ = top_k_columns(
        row_count=rows,
        position_count=positions,
        top_k=top_k,
        temperature_count=temperatures,
        value_type=value_type,
    )

    for column in columns:
        types, axes = COLUMN_RULES[column.kind]
        assert column.element_type in types
        assert column.shape == tuple(a if isinstance(a, int) else sizes[a] for a in axes)


@pytest.mark.parametrize("value_type", [ElementType.INT32, ElementType.INT64, ElementType.UINT8])
def test_log_probabilities_are_no_whole_numbers(value_type: ElementType) -> None:
    with pytest.raises(PayloadInvalidError, match=value_type.value) as caught:
        top_k_columns(
            row_count=1,
            position_count=1,
            top_k=1,
            temperature_count=1,
            value_type=value_type,
        )

    assert caught.value.facts == {"value_type": value_type.value}


class TestOnADevice:
    def test_lie_the_columns_over_positions_and_no_others(self) -> None:
        rows = {
            ColumnKind.ROW_OFFSETS,
            ColumnKind.ROW_WINDOWS,
            ColumnKind.ROW_DIGESTS,
            ColumnKind.ROW_STATUS,
            ColumnKind.ROW_RUNS,
        }

        assert {kind for kind in ColumnKind if not is_on_device(kind)} == rows
