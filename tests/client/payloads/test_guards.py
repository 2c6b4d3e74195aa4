"""What a payload is held against before it is handed out."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from teacher_logits.digest import row_digest
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind, ElementType, top_k_columns
from teacher_logits.payload import Payload
from teacher_logits.profiles import StudentProfile
from teacher_logits.terms import Verdict
from teacher_logits_client.payloads.guards import check_scored
from teacher_logits_client.rows import RowBatch, make_row_batch

ROWS = [[3, 5, 2, 7], [1, 6]]
VOCABULARY, K = 8, 3
PROFILE = StudentProfile(
    batch_grid=BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1),
    top_k=K,
    temperatures=(0.7,),
)

Columns = dict[ColumnKind, torch.Tensor]


def a_batch() -> RowBatch:
    return make_row_batch(ROWS, vocabulary_size=VOCABULARY, prefix_vocabulary_size=VOCABULARY)


def an_answer() -> tuple[Payload, Columns]:
    """What a right-minded teacher answers, temperature 0.7 as it comes over the wire."""
    torch.manual_seed(0)
    logprobs = torch.randn(6, VOCABULARY).log_softmax(1)
    best = logprobs.topk(K)
    following = torch.tensor([5, 2, 7, -1, 6, -1])
    actual = logprobs.gather(1, following.clamp_min(0).unsqueeze(1)).squeeze(1)
    columns, size = top_k_columns(
        row_count=2,
        position_count=6,
        top_k=K,
        temperature_count=2,
        value_type=ElementType.FLOAT32,
    )
    payload = Payload(
        payload_id="p-1",
        teacher_id="teacher",
        teacher_revision="",
        first_row=0,
        row_count=2,
        position_count=6,
        top_k=K,
        temperatures=(1.0, 0.699999988079071),
        vocabulary_size=VOCABULARY,
        columns=columns,
        size_bytes=size,
    )
    digests = bytearray(b"".join(row_digest(row) for row in ROWS))
    return payload, {
        ColumnKind.TOPK_IDS: best.indices.int(),
        ColumnKind.TOPK_LOGPROBS: best.values,
        ColumnKind.ACTUAL_LOGPROB: actual.masked_fill(following < 0, 0.0),
        ColumnKind.ROW_OFFSETS: torch.tensor([0, 4, 6]),
        ColumnKind.ROW_WINDOWS: torch.tensor([[0, 4], [0, 2]], dtype=torch.int32),
        ColumnKind.ROW_DIGESTS: torch.frombuffer(digests, dtype=torch.uint8).view(2, 16),
        ColumnKind.ROW_STATUS: torch.zeros(2, dtype=torch.uint8),
    }


def check(
    payload: Payload, columns: Columns, *, batch: RowBatch | None = None, reject: bool = True
) -> dict[str, Verdict]:
    checks = check_scored(
        payload, columns, batch=batch or a_batch(), profile=PROFILE, reject_bad_rows=reject
    )
    return {check.name: check.verdict for check in checks}


def test_a_right_answer_passes_every_check() -> None:
    assert check(*an_answer()) == dict.fromkeys(
        ("row_status", "row_digests", "lookup_identity"), Verdict.PASSED
    )


def test_without_the_rows_two_checks_are_unchecked() -> None:
    payload, columns = an_answer()
    checks = check_scored(payload, columns, batch=None, profile=PROFILE, reject_bad_rows=True)

    assert [check.verdict for check in checks] == [
        Verdict.PASSED,
        Verdict.UNCHECKED,
        Verdict.UNCHECKED,
    ]


def spoil(kind: ColumnKind, change: Callable[[torch.Tensor], object]) -> tuple[Payload, Columns]:
    payload, columns = an_answer()
    change(columns[kind])
    return payload, columns


def test_fewer_entries_than_were_asked_for_are_refused() -> None:
    payload, columns = an_answer()

    with pytest.raises(PayloadInvalidError, match=r"K = 2 .* asked for K = 3"):
        check(replace(payload, top_k=2), columns)


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.8), (1.0, 0.7, 2.0)])
def test_other_temperatures_than_were_asked_for_are_refused(
    temperatures: tuple[float, ...],
) -> None:
    payload, columns = an_answer()

    with pytest.raises(PayloadInvalidError, match="temperatures"):
        check(replace(payload, temperatures=temperatures), columns)


def test_a_payload_without_a_column_is_refused_by_its_name() -> None:
    payload, columns = an_answer()
    fewer = tuple(c for c in payload.columns if c.kind is not ColumnKind.ROW_DIGESTS)

    with pytest.raises(PayloadInvalidError, match="no column row_digests"):
        check(replace(payload, columns=fewer), columns)


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        (ColumnKind.ROW_WINDOWS, (0, 1), 3),
        (ColumnKind.ROW_WINDOWS, (1, 0), 1),
        (ColumnKind.ROW_OFFSETS, 1, 5),
        (ColumnKind.ROW_OFFSETS, 0, 1),
    ],
)
def test_other_positions_than_were_asked_for_are_refused(
    kind: ColumnKind, place: int | tuple[int, int], value: int
) -> None:
    def change(column: torch.Tensor) -> None:
        column[place] = value

    with pytest.raises(PayloadInvalidError, match="has others of them"):
        check(*spoil(kind, change))


def test_another_rows_digest_is_refused() -> None:
    def change(column: torch.Tensor) -> None:
        column[1, 3] += 1

    with pytest.raises(AlignmentError, match="row 1"):
        check(*spoil(ColumnKind.ROW_DIGESTS, change))


def test_scores_that_are_one_token_off_are_refused() -> None:
    payload, columns = an_answer()
    columns[ColumnKind.ACTUAL_LOGPROB] = columns[ColumnKind.ACTUAL_LOGPROB].roll(1)

    with pytest.raises(AlignmentError, match="row 0"):
        check(payload, columns)


def test_bad_rows_are_refused_unless_they_were_allowed() -> None:
    def change(column: torch.Tensor) -> None:
        column[1] = 1

    payload, columns = spoil(ColumnKind.ROW_STATUS, change)

    with pytest.raises(PayloadInvalidError, match=r"row 1 \(nan\)"):
        check(payload, columns)
    assert check(payload, columns, reject=False)["row_status"] is Verdict.PASSED


def test_a_lookup_that_met_no_position_is_unchecked() -> None:
    payload, columns = an_answer()
    columns[ColumnKind.ROW_STATUS].fill_(1)

    assert check(payload, columns, reject=False)["lookup_identity"] is Verdict.UNCHECKED
