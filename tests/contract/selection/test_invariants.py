"""Invariants: what a receiver refuses before anybody trains on it, by row and position."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.layout import RowStatus
from teacher_logits.selection import row_statuses, select_top_k
from teacher_logits.selection.invariants import check_invariants

Columns = dict[Kind, torch.Tensor]
TEMPERATURES = (1.0, 0.5, 2.0)
VOCABULARY = 50


def payload(
    dtype: torch.dtype, *, k: int = 6, scale: float = 2.0, seed: int = 0, offset: float = 0.0
) -> Columns:
    """Three rows of 4, 0 and 3 positions."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, VOCABULARY, generator=generator) * scale + offset
    next_ids = torch.tensor([3, 1, 4, -1, 5, 9, -1])
    got = select_top_k(rows, k=k, temperatures=TEMPERATURES, next_ids=next_ids)
    offsets = torch.tensor([0, 4, 4, 7])
    assert got.actual_logprob is not None
    return {
        Kind.TOPK_IDS: got.topk_ids,
        Kind.TOPK_LOGPROBS: got.topk_logprobs.to(dtype),
        Kind.LOG_TAIL: got.log_tail,
        Kind.LOGSUMEXP: got.logsumexp,
        Kind.ACTUAL_LOGPROB: got.actual_logprob,
        Kind.ROW_OFFSETS: offsets,
        Kind.ROW_WINDOWS: torch.tensor([[0, 4], [0, 0], [2, 3]], dtype=torch.int32),
        Kind.ROW_STATUS: row_statuses(got.status, offsets),
    }


def check(columns: Columns) -> None:
    check_invariants(columns, vocab_size=VOCABULARY, temperatures=TEMPERATURES)


def put(kind: Kind, place: int | tuple[int, int], value: float) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[kind][place] = value

    return change


def swapped_positions(columns: Columns) -> None:
    """The normalisers and tails of two positions change places; entries do not."""
    for kind in (Kind.LOG_TAIL, Kind.LOGSUMEXP):
        columns[kind][[4, 5]] = columns[kind][[5, 4]]


def at_another_temperature(columns: Columns) -> None:
    columns[Kind.LOG_TAIL][5, 2] = columns[Kind.LOG_TAIL][5, 1]


@given(
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([1, 6, 50, 64]),
    st.sampled_from([0.0, 2.0, 10.0, 60.0]),
    st.integers(0, 2**32),
)
@example(torch.float32, 1, 60.0, 7)  # its normalisers' own rounding is all that is off
def test_what_a_teacher_selects_passes(dtype: torch.dtype, k: int, scale: float, seed: int) -> None:
    check(payload(dtype, k=k, scale=scale, seed=seed))


@pytest.mark.parametrize("offset", [400.0, -5000.0, 1e6])
def test_logits_so_large_that_fp32_rounds_their_normalisers_pass(offset: float) -> None:
    for seed in range(5):
        check(payload(torch.float32, offset=offset, seed=seed))


def test_another_temperature_is_found_beside_large_logits_too() -> None:
    columns = payload(torch.float32, offset=400.0)
    at_another_temperature(columns)

    with pytest.raises(PayloadInvalidError, match="do not sum to one at temperature 2"):
        check(columns)


def test_the_columns_that_need_not_be_there_need_not_be_there() -> None:
    columns = payload(torch.float32)
    for kind in (Kind.LOGSUMEXP, Kind.ACTUAL_LOGPROB, Kind.ROW_WINDOWS, Kind.ROW_STATUS):
        del columns[kind]
        check(columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "place", "rule"),
    [
        (put(Kind.TOPK_IDS, (5, 2), VOCABULARY), (2, 1), "outside the vocabulary of 50"),
        (put(Kind.TOPK_IDS, (5, 2), -2), (2, 1), "outside the vocabulary"),
        (put(Kind.TOPK_IDS, (5, 2), -1), (2, 1), "without an id"),
        (put(Kind.TOPK_LOGPROBS, (3, 0), torch.nan), (0, 3), "NaN or above 0"),
        (put(Kind.TOPK_LOGPROBS, (3, 0), 0.5), (0, 3), "NaN or above 0"),
        (put(Kind.TOPK_LOGPROBS, (3, 0), torch.inf), (0, 3), "NaN or above 0"),
        (put(Kind.TOPK_LOGPROBS, (3, 5), -torch.inf), (0, 3), "an id without"),
        (put(Kind.TOPK_LOGPROBS, (3, 0), -9.0), (0, 3), "not in falling order"),
        (put(Kind.TOPK_LOGPROBS, (3, 5), -12.0), (0, 3), "do not sum to one at temperature 1"),
        (put(Kind.LOG_TAIL, (6, 0), 0.5), (2, 2), "a log_tail"),
        (put(Kind.LOG_TAIL, (6, 1), torch.nan), (2, 2), "a log_tail"),
        (put(Kind.LOG_TAIL, (6, 0), -9.0), (2, 2), "do not sum to one at temperature 1"),
        (put(Kind.LOGSUMEXP, (6, 0), torch.inf), (2, 2), "logsumexp that is not finite"),
        (put(Kind.LOGSUMEXP, (6, 2), torch.nan), (2, 2), "logsumexp that is not finite"),
        (put(Kind.ACTUAL_LOGPROB, 1, torch.nan), (0, 1), "an actual_logprob"),
        (put(Kind.ACTUAL_LOGPROB, 1, 0.5), (0, 1), "an actual_logprob"),
        (swapped_positions, (2, 0), "do not sum to one"),
        (at_another_temperature, (2, 1), "do not sum to one at temperature 2"),
    ],
)
def test_a_fault_is_named_by_row_position_and_rule(
    dtype: torch.dtype,
    change: Callable[[Columns], None],
    place: tuple[int, int],
    rule: str,
) -> None:
    columns = payload(dtype)
    change(columns)

    with pytest.raises(PayloadInvalidError, match=rule) as caught:
        check(columns)
    assert str(caught.value).startswith(f"row {place[0]}, position {place[1]}: ")
    assert (caught.value.facts["row"], caught.value.facts["position"]) == place


def test_an_id_twice_is_found_where_the_values_tie() -> None:
    columns = payload(torch.float32, scale=0.0)
    columns[Kind.TOPK_IDS][5, 4] = columns[Kind.TOPK_IDS][5, 1]

    with pytest.raises(PayloadInvalidError, match="row 2, position 1: an id that stands there tw"):
        check(columns)


def test_a_row_that_its_teacher_could_not_score_is_passed_over() -> None:
    columns = payload(torch.float32)
    columns[Kind.TOPK_LOGPROBS][5] = torch.nan
    columns[Kind.ROW_STATUS][2] = RowStatus.NAN

    check(columns)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Kind.ROW_OFFSETS, torch.tensor([0, 4, 4, 8]), "run from 0 to 8 .* positions, 7"),
        (Kind.ROW_OFFSETS, torch.tensor([1, 4, 4, 7]), "run from 1"),
        (Kind.ROW_OFFSETS, torch.tensor([0, 4, 3, 7]), "never fall"),
        (Kind.ROW_OFFSETS, torch.zeros(0).long(), "row_offsets is empty"),
        (Kind.ROW_WINDOWS, torch.tensor([[0, 4], [0, 0], [0, 2]]), "row 2: its window"),
        (Kind.ROW_WINDOWS, torch.tensor([[0, 4], [-1, 0], [0, 3]]), "row 1: its window"),
        (Kind.ROW_STATUS, torch.tensor([0, 7, 0]).byte(), "row 1: its status"),
    ],
)
def test_rows_that_do_not_hold_together_are_refused(
    kind: Kind, values: torch.Tensor, message: str
) -> None:
    columns = payload(torch.float32)
    columns[kind] = values

    with pytest.raises(PayloadInvalidError, match=message):
        check(columns)


def test_a_column_that_is_missing_is_named() -> None:
    columns = payload(torch.float32)
    del columns[Kind.LOG_TAIL]

    with pytest.raises(PayloadInvalidError, match="no column log_tail"):
        check(columns)


def test_rows_are_named_as_the_caller_counts_them() -> None:
    columns = payload(torch.float32)
    columns[Kind.TOPK_IDS][5, 0] = VOCABULARY

    with pytest.raises(PayloadInvalidError, match="row 12, position 1") as raised:
        check_invariants(columns, vocab_size=VOCABULARY, temperatures=TEMPERATURES, first_row=10)

    assert raised.value.facts["row"] == 12
