"""Alignment: digests that differ, scores that are shifted, labels that stay in their sequence."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.codec.value_codecs import entry_errors
from teacher_logits.digest import row_digest
from teacher_logits.error_bounds import ErrorBound
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.layout import RowStatus
from teacher_logits.selection import select_top_k
from teacher_logits_client.rows import alignment
from teacher_logits_client.rows.alignment import check_lookup_identity, compare_digests
from teacher_logits_client.rows.labels import labels_mask, next_token_labels, position_mask

ROWS = [[1, 5, 6, 7], [1, 8, 9], [1, 4, 4, 4, 2]]


def digests(rows: list[list[int]]) -> list[bytes]:
    return [row_digest(row) for row in rows]


class TestDigests:
    def test_that_agree_are_fine(self) -> None:
        compare_digests(digests(ROWS), digests(ROWS), ids=ROWS)
        compare_digests([], [])

    @pytest.mark.parametrize(
        ("row", "scored", "cause"),
        [
            (0, [5, 6, 7], r"without its first token \(1\) the row is the same"),
            (1, [1, 1, 8, 9], r"with its first token \(1\) doubled the row is the same"),
            (2, [1, 4, 4, 4], r"without its last token \(2\) the row is the same"),
            (1, [1, 8, 10], "tokenise and pad alike"),
        ],
    )
    def test_that_differ_are_named_with_their_cause(
        self, row: int, scored: list[int], cause: str
    ) -> None:
        received = digests(ROWS)
        received[row] = row_digest(scored)

        with pytest.raises(AlignmentError, match=rf"1 of 3 rows \({row}\).*{cause}") as caught:
            compare_digests(digests(ROWS), received, ids=ROWS)
        assert caught.value.facts["row"] == row
        assert caught.value.facts["received"] == row_digest(scored).hex()

    def test_of_rows_in_another_order_are_told(self) -> None:
        received = digests([ROWS[0], ROWS[2], ROWS[1]])

        with pytest.raises(AlignmentError, match=r"\(11, 12\).*digest of row 12: .*another order"):
            compare_digests(digests(ROWS), received, first_row=10)

    def test_without_ids_need_no_cause(self) -> None:
        with pytest.raises(AlignmentError, match="tokenise and pad alike"):
            compare_digests(digests(ROWS), digests([[9], *ROWS[1:]]))

    def test_that_differ_in_many_rows_name_the_first_few(self) -> None:
        many = digests([[n] for n in range(20)])

        with pytest.raises(
            AlignmentError, match=r"20 of 20 rows \(0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\)"
        ):
            compare_digests(many, digests([[n + 100] for n in range(20)]))

    def test_of_another_number_of_rows_are_refused(self) -> None:
        with pytest.raises(AlignmentError, match="scored 2 rows and 3 were sent"):
            compare_digests(digests(ROWS), digests(ROWS[:2]))


WIDTH = 40
OFFSETS = torch.tensor([0, 9, 9, 20])


def scored(
    seed: int, *, shift: int = 0, dtype: torch.dtype = torch.float32, k: int = 4
) -> tuple[dict[Kind, torch.Tensor], torch.Tensor]:
    """Columns of rows of 9, 0 and 11 positions and their next ids; ``shift`` rolls the scores."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WIDTH, (20,), generator=generator)
    next_ids = next_token_labels(ids, OFFSETS, ignore_index=-1)
    table = torch.randn(WIDTH, WIDTH, generator=generator) * 3
    # A teacher that often knows the next token, so that many are among the K ids.
    logits = table[ids]
    logits[torch.arange(20), next_ids.clamp_min(0)] += 6.0
    got = select_top_k(logits, k=k, next_ids=next_ids)
    assert got.actual_logprob is not None
    columns = {
        Kind.TOPK_IDS: got.topk_ids,
        Kind.TOPK_LOGPROBS: got.topk_logprobs.to(dtype),
        Kind.ACTUAL_LOGPROB: got.actual_logprob,
    }
    bounds = OFFSETS.tolist()
    for kind, column in columns.items():
        rows = [column[a:b].roll(shift, 0) for a, b in pairwise(bounds)]
        columns[kind] = torch.cat(rows)
    return {**columns, Kind.ROW_OFFSETS: OFFSETS}, next_ids


class TestLookupIdentity:
    @given(
        st.integers(0, 2**32),
        st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        st.sampled_from([1, 4, WIDTH, WIDTH + 3]),
    )
    def test_holds_for_what_a_teacher_scores(self, seed: int, dtype: torch.dtype, k: int) -> None:
        columns, next_ids = scored(seed, dtype=dtype, k=k)

        got = check_lookup_identity(columns, next_ids)

        assert got.checked == 18
        among = (columns[Kind.TOPK_IDS] == next_ids[:, None]) & (next_ids >= 0)[:, None]
        assert got.among_k == int(among.sum())

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize(
        ("shift", "words", "offset"),
        [(1, "one token late", 1), (-1, "one token early", -1), (2, "two tokens late", 2)],
    )
    def test_names_a_shift(self, seed: int, shift: int, words: str, offset: int) -> None:
        columns, next_ids = scored(seed, shift=shift)

        with pytest.raises(AlignmentError, match=words) as caught:
            check_lookup_identity(columns, next_ids)
        assert caught.value.facts["offset"] == offset

    def test_names_row_position_and_numbers_of_other_tokens(self) -> None:
        columns, next_ids = scored(0)
        columns[Kind.ACTUAL_LOGPROB][12] -= 0.5

        with pytest.raises(AlignmentError, match=r"row 2, position 3: .*no shift") as caught:
            check_lookup_identity(columns, next_ids)
        assert caught.value.facts["token_id"] == int(next_ids[12])
        assert caught.value.facts["wrong_positions"] == 1
        assert caught.value.facts["checked_positions"] == 18

    def test_a_token_outside_the_k_may_not_be_likelier_than_the_last_of_them(self) -> None:
        columns, next_ids = scored(0)
        among = (columns[Kind.TOPK_IDS] == next_ids[:, None]).any(1)
        place = int((~among & (next_ids >= 0)).nonzero()[0])
        columns[Kind.ACTUAL_LOGPROB][place] = columns[Kind.TOPK_LOGPROBS][place, -1] + 0.01

        with pytest.raises(AlignmentError, match="it is not among the K ids, of which the last"):
            check_lookup_identity(columns, next_ids)

    def test_a_nan_is_no_agreement(self) -> None:
        columns, next_ids = scored(0)
        columns[Kind.ACTUAL_LOGPROB][3] = torch.nan

        with pytest.raises(AlignmentError, match="row 0, position 3"):
            check_lookup_identity(columns, next_ids)

    def test_leaves_out_rows_that_could_not_be_scored(self) -> None:
        columns, next_ids = scored(0)
        columns[Kind.ACTUAL_LOGPROB][:9] = 0.0
        columns[Kind.ROW_STATUS] = torch.tensor(
            [RowStatus.NAN, RowStatus.OK, RowStatus.OK], dtype=torch.uint8
        )

        assert check_lookup_identity(columns, next_ids).checked == 10

    def test_checks_nothing_where_no_token_comes_next(self) -> None:
        columns, _ = scored(0)

        got = check_lookup_identity(columns, torch.full((20,), -1))

        assert (got.checked, got.among_k) == (0, 0)

    def test_checks_nothing_without_actual_logprobs(self) -> None:
        columns, next_ids = scored(0)
        del columns[Kind.ACTUAL_LOGPROB]

        assert check_lookup_identity(columns, next_ids).checked == 0

    def test_takes_the_callers_tolerance(self) -> None:
        columns, next_ids = scored(0)
        columns[Kind.ACTUAL_LOGPROB][12] -= 0.05

        check_lookup_identity(columns, next_ids, tolerance=0.1)
        with pytest.raises(AlignmentError):
            check_lookup_identity(columns, next_ids, tolerance=0.01)

    def test_of_other_positions_is_refused(self) -> None:
        columns, next_ids = scored(0)

        with pytest.raises(PayloadInvalidError, match="19 next ids are given for 20 positions"):
            check_lookup_identity(columns, next_ids[:-1])


def test_a_large_payload_is_compared_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def errors(logprobs: torch.Tensor, bound: ErrorBound) -> torch.Tensor:
        seen.append(logprobs.numel())
        return entry_errors(logprobs, bound)

    monkeypatch.setattr(alignment, "entry_errors", errors)
    rows = torch.randn(3000, 80, generator=torch.Generator().manual_seed(1))
    following = torch.arange(3000) % 80
    got = select_top_k(rows, k=64, next_ids=following)
    columns = {Kind[name.upper()]: each for name, each in got.columns.items()}
    columns[Kind.ROW_OFFSETS] = torch.tensor([0, 3000])

    found = check_lookup_identity(columns, following, bound=ErrorBound(absolute=1e-6))

    assert found.checked == 3000
    assert sum(seen) == rows.shape[0] * 64
    assert max(seen) <= 1 << 16


class TestLabels:
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def test_are_the_next_token_of_the_same_sequence(self, lengths: list[int]) -> None:
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        ids = torch.arange(100, 100 + int(bounds[-1]))
        expected: list[int] = []
        for start, length in zip(bounds.tolist(), lengths, strict=False):
            row = ids[start : start + length].tolist()
            expected += [*row[1:], *[-100] * min(length, 1)]

        assert next_token_labels(ids, bounds).tolist() == expected

    def test_are_ignored_where_their_token_is_masked(self) -> None:
        bounds, mask = torch.tensor([0, 3, 5]), torch.tensor([1, 0, 1, 1, 1])
        ids = torch.tensor([10, 11, 12, 13, 14])

        got = next_token_labels(ids, bounds, token_mask=mask, ignore_index=-1)

        assert got.tolist() == [-1, 12, -1, 14, -1]
        assert position_mask(mask, bounds).tolist() == [0, 1, 0, 1, 0]

    def test_padding_between_sequences_is_no_next_token(self) -> None:
        ids = torch.tensor([10, 11, 12, 0, 20, 21, 0, 0])
        lengths, starts = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])

        got = next_token_labels(ids, lengths, padded_cu_seqlens=starts)

        assert got.tolist() == [11, 12, -100, -100, 21, -100, -100, -100]
        mask = position_mask(torch.ones(8), lengths, padded_cu_seqlens=starts)
        assert mask.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
        assert mask.dtype == torch.float32

    @pytest.mark.parametrize(
        ("bounds", "padded", "message"),
        [
            ([0, 3, 6], None, "run from 0 to 6; .* positions, 5"),
            ([1, 5], None, "run from 1 to 5"),
            ([0, 4, 2, 5], None, "never fall"),
            ([], None, "no sequence bounds"),
            ([0, 3], [0, 2, 5], "1 sequences are in cu_seqlens and 2 in padded"),
            ([0, 3, 5], [0, 2, 5], "none is longer than its room"),
        ],
    )
    def test_of_bounds_that_do_not_fit_are_refused(
        self, bounds: list[int], padded: list[int] | None, message: str
    ) -> None:
        starts = None if padded is None else torch.tensor(padded)
        with pytest.raises(PayloadInvalidError, match=message):
            next_token_labels(
                torch.arange(5), torch.tensor(bounds, dtype=torch.int64), padded_cu_seqlens=starts
            )

    @given(
        st.lists(
            st.lists(st.sampled_from([-100, 0, 7]), min_size=4, max_size=4), min_size=1, max_size=4
        )
    )
    def test_beside_their_tokens_say_which_positions_count(self, rows: list[list[int]]) -> None:
        labels = torch.tensor(rows)
        expected = [[label != -100 for label in row[1:]] + [False] for row in rows]

        assert labels_mask(labels).tolist() == expected
        assert labels_mask(labels[0]).tolist() == expected[0]
        assert labels_mask(labels, ignore_index=0)[:, :-1].equal(labels[:, 1:] != 0)

    def test_of_no_tokens_count_nowhere(self) -> None:
        assert labels_mask(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0)
