"""Targets: a payload's columns at one temperature, normalised, and finite throughout."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.error_bounds import EXACT, ErrorBound
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.layout import RowStatus
from teacher_logits.selection import entry_invariants, row_statuses, select_top_k
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets, make_targets
from teacher_logits_client.targets.leased_targets import Made, lease_targets

Columns = dict[Kind, torch.Tensor]
TEMPERATURES = (1.0, 0.5, 2.0)
VOCABULARY = 50
OFFSETS = torch.tensor([0, 4, 4, 7])


def columns_of(rows: torch.Tensor, *, k: int = 6, dtype: torch.dtype = torch.float32) -> Columns:
    """Three rows of 4, 0 and 3 positions."""
    next_ids = torch.tensor([3, 1, 4, -1, 5, 2, -1])
    got = select_top_k(rows, k=k, temperatures=TEMPERATURES, next_ids=next_ids)
    assert got.actual_logprob is not None
    return {
        Kind.TOPK_IDS: got.topk_ids,
        Kind.TOPK_LOGPROBS: got.topk_logprobs.to(dtype),
        Kind.LOG_TAIL: got.log_tail,
        Kind.LOGSUMEXP: got.logsumexp,
        Kind.ACTUAL_LOGPROB: got.actual_logprob,
        Kind.ROW_OFFSETS: OFFSETS,
        Kind.ROW_WINDOWS: torch.tensor([[0, 4], [0, 0], [2, 3]], dtype=torch.int32),
        Kind.ROW_STATUS: row_statuses(got.status, OFFSETS),
    }


def some_rows(seed: int = 0, width: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(7, width, generator=torch.Generator().manual_seed(seed)) * 2


def floats(targets: Targets) -> list[torch.Tensor]:
    assert targets.actual_logprob is not None
    return [targets.topk_logprobs, targets.log_tail, targets.actual_logprob]


@st.composite
def any_columns(draw: st.DrawFn) -> Columns:
    """With absent entries, empty tails, NaN rows and rows without a finite logit."""
    rows = some_rows(draw(st.integers(0, 2**32)), draw(st.sampled_from([6, 9, VOCABULARY])))
    for row in draw(st.sets(st.integers(0, 6))):
        finite = draw(st.integers(0, 5))
        rows[row, finite:] = draw(st.sampled_from([-math.inf, math.nan, -2e5]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    return columns_of(rows, k=draw(st.sampled_from([1, 6, 64])), dtype=dtype)


class TestNumbers:
    @given(any_columns(), st.sampled_from(TEMPERATURES))
    def test_are_finite_whatever_the_payload_holds(
        self, columns: Columns, temperature: float
    ) -> None:
        got = make_targets(columns, temperature=temperature, temperatures=TEMPERATURES)

        for tensor in floats(got):
            assert tensor.isfinite().all()
            assert (tensor >= ABSENT_LOGPROB).all()
            assert tensor.dtype == torch.float32

    @given(any_columns(), st.sampled_from(TEMPERATURES))
    def test_sum_to_one_at_every_position(self, columns: Columns, temperature: float) -> None:
        got = make_targets(columns, temperature=temperature, temperatures=TEMPERATURES)

        total = got.topk_logprobs.double().exp().sum(1) + got.log_tail.double().exp()

        assert torch.allclose(total, torch.ones(7, dtype=torch.float64), atol=1e-5)

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_are_the_dense_ones_at_that_temperature(self, temperature: float) -> None:
        rows = some_rows()
        dense = (rows.double() / temperature).log_softmax(1)

        got = make_targets(columns_of(rows), temperature=temperature, temperatures=TEMPERATURES)

        expected = dense.gather(1, got.topk_ids.long())
        assert torch.allclose(got.topk_logprobs.double(), expected, atol=1e-5)
        tail = dense.scatter(1, got.topk_ids.long(), -torch.inf).logsumexp(1)
        assert torch.allclose(got.log_tail.double(), tail, atol=1e-5)
        assert got.temperature == temperature

    def test_of_the_next_token_stay_at_temperature_one(self) -> None:
        columns = columns_of(some_rows())

        got = make_targets(columns, temperature=2.0, temperatures=TEMPERATURES)

        assert got.actual_logprob is not None
        assert torch.equal(got.actual_logprob, columns[Kind.ACTUAL_LOGPROB])

    def test_the_columns_are_only_read(self) -> None:
        rows = some_rows()
        rows[1] = math.nan
        rows[5, 3:] = -math.inf
        columns = columns_of(rows)
        before = {kind: column.clone() for kind, column in columns.items()}

        make_targets(columns, temperature=2.0, temperatures=TEMPERATURES)

        for kind, column in columns.items():
            assert torch.equal(column, before[kind])


class TestAbsence:
    def test_an_absent_entry_has_no_id_and_no_mass(self) -> None:
        rows = some_rows()
        rows[5, 3:] = -math.inf

        got = make_targets(columns_of(rows))

        assert got.present[5].tolist() == [True] * 3 + [False] * 3
        assert got.topk_ids[5, 3:].tolist() == [-1] * 3
        assert (got.topk_logprobs[5, 3:] == ABSENT_LOGPROB).all()
        assert got.topk_logprobs[5, 3:].exp().sum() == 0
        assert got.log_tail[5] == ABSENT_LOGPROB

    def test_a_row_that_could_not_be_scored_has_all_its_mass_in_the_tail(self) -> None:
        rows = some_rows()
        rows[1, 9] = math.nan

        got = make_targets(columns_of(rows))

        assert got.valid.tolist() == [False] * 4 + [True] * 3
        assert (got.topk_ids[:4] == -1).all()
        assert (got.topk_logprobs[:4] == ABSENT_LOGPROB).all()
        assert (got.log_tail[:4] == 0).all()
        assert all((tensor[:4] <= 0).all() for tensor in floats(got))

    def test_without_actual_logprob_there_is_none(self) -> None:
        columns = columns_of(some_rows())
        del columns[Kind.ACTUAL_LOGPROB]

        assert make_targets(columns).actual_logprob is None


class TestValid:
    def test_is_everything_where_no_status_is_told(self) -> None:
        columns = columns_of(some_rows())
        del columns[Kind.ROW_STATUS]

        assert make_targets(columns).valid.all()

    def test_leaves_out_the_last_position_of_each_row_by_its_true_length(self) -> None:
        columns = columns_of(some_rows())
        whole, cut = torch.tensor([4, 0, 5]), torch.tensor([6, 0, 6])

        assert make_targets(columns, lengths=whole).valid.tolist() == [
            *[True, True, True, False],
            *[True, True, False],
        ]
        assert make_targets(columns, lengths=cut).valid.all()

    def test_takes_rows_without_windows_for_whole(self) -> None:
        columns = columns_of(some_rows())
        del columns[Kind.ROW_WINDOWS]

        got = make_targets(columns, lengths=torch.tensor([4, 0, 3]))

        assert (~got.valid).nonzero().flatten().tolist() == [3, 6]


class TestRows:
    def test_say_where_they_start_in_a_copy(self) -> None:
        columns = columns_of(some_rows())

        firsts = make_targets(columns).row_firsts
        columns[Kind.ROW_WINDOWS].fill_(9)

        assert firsts is not None
        assert firsts.dtype == torch.int64
        assert firsts.tolist() == [0, 0, 2]

    def test_without_windows_start_at_the_front(self) -> None:
        columns = columns_of(some_rows())
        del columns[Kind.ROW_WINDOWS]

        assert make_targets(columns).row_firsts is None


class TestRepresentation:
    @pytest.mark.parametrize("leased", [False, True])
    def test_is_shapes_and_no_numbers(self, leased: bool) -> None:
        targets = make_targets(columns_of(some_rows()))

        made = Made(what="lease 5 of payload 7", again="the payload", facts={})

        assert repr(lease_targets(targets, made) if leased else targets) == (
            f"<{'LeasedTargets' if leased else 'Targets'} topk_ids [7, 6], topk_logprobs [7, 6], "
            "log_tail [7], actual_logprob [7], valid [7], row_offsets [4], row_firsts [3], "
            "temperature 1, cpu>"
        )


class TestRectangular:
    def test_is_a_view_of_equal_rows(self) -> None:
        rows = some_rows()[:6]
        got = select_top_k(rows, k=4)
        columns = {
            Kind.TOPK_IDS: got.topk_ids,
            Kind.TOPK_LOGPROBS: got.topk_logprobs,
            Kind.LOG_TAIL: got.log_tail,
            Kind.ROW_OFFSETS: torch.tensor([0, 3, 6]),
        }
        flat = make_targets(columns)

        square = flat.rectangular()

        assert square.topk_ids.shape == square.topk_logprobs.shape == (2, 3, 4)
        assert square.log_tail.shape == square.valid.shape == (2, 3)
        assert square.topk_ids.data_ptr() == flat.topk_ids.data_ptr()
        assert square.topk_logprobs.data_ptr() == flat.topk_logprobs.data_ptr()
        assert torch.equal(square.log_tail.flatten(), flat.log_tail)

    def test_of_rows_of_different_lengths_is_refused(self) -> None:
        with pytest.raises(PayloadInvalidError, match="row 1 of 3 has 0 positions and row 0 has 4"):
            make_targets(columns_of(some_rows())).rectangular()


class TestRefusals:
    @pytest.mark.parametrize("kind", [Kind.TOPK_LOGPROBS, Kind.LOG_TAIL, Kind.ACTUAL_LOGPROB])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_of_a_nan_or_infinity_in_a_row_that_is_said_to_be_good(
        self, kind: Kind, value: float
    ) -> None:
        columns = columns_of(some_rows())
        columns[kind][5] = value

        with pytest.raises(PayloadInvalidError, match="position 5 of 7 holds a NaN"):
            make_targets(columns)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_of_a_position_that_does_not_sum_to_one_in_a_row_that_is_said_to_be_good(
        self, dtype: torch.dtype, temperature: float
    ) -> None:
        columns = columns_of(some_rows(), dtype=dtype)
        columns[Kind.TOPK_LOGPROBS][5, 0] += 0.3

        def targets(bound: ErrorBound | None) -> Targets:
            return make_targets(
                columns, temperature=temperature, temperatures=TEMPERATURES, bound=bound
            )

        assert targets(None).valid.any()
        with pytest.raises(PayloadInvalidError, match="position 5 of 7 has entries and tail that"):
            targets(EXACT)

    def test_of_a_mass_that_its_codec_may_have_moved_so_far_does_not_come(self) -> None:
        columns = columns_of(some_rows())
        columns[Kind.TOPK_LOGPROBS] += 0.005
        bound = ErrorBound(absolute=0.005)

        with pytest.raises(PayloadInvalidError, match="do not sum to one"):
            make_targets(columns, bound=EXACT)
        total = make_targets(columns, bound=bound).topk_logprobs.exp().sum(1)
        assert (total <= 1).all()

    @pytest.mark.parametrize(
        ("kind", "spoil", "rule"),
        [
            (
                Kind.TOPK_IDS,
                lambda c: c[5, :2].fill_(int(c[5, 0])),
                "an id that stands there twice",
            ),
            (Kind.TOPK_IDS, lambda c: c[5, 1:2].fill_(VOCABULARY), "an id outside the vocabulary"),
            (Kind.TOPK_LOGPROBS, lambda c: c[5].copy_(c[5].flip(0).clone()), "in falling order"),
            (Kind.LOGSUMEXP, lambda c: c[5].fill_(torch.nan), "a logsumexp that is not finite"),
        ],
    )
    @pytest.mark.parametrize("is_there", [True, False])
    def test_of_entries_that_no_teacher_selects(
        self,
        kind: Kind,
        spoil: Callable[[torch.Tensor], object],
        rule: str,
        is_there: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if not is_there:
            monkeypatch.setattr(entry_invariants, "_sort_by_numpy", lambda ids: False)
        columns = columns_of(some_rows())

        def targets(bound: ErrorBound | None = EXACT) -> Targets:
            return make_targets(columns, bound=bound, vocab_size=VOCABULARY)

        targets()
        spoil(columns[kind])
        with pytest.raises(PayloadInvalidError, match=f"position 5 of 7 has .*{rule}"):
            targets()
        targets(None)  # of another origin they may be anything

    @given(any_columns(), st.sampled_from(TEMPERATURES))
    def test_of_what_a_teacher_selects_are_never_refused(
        self, columns: Columns, temperature: float
    ) -> None:
        make_targets(
            columns,
            temperature=temperature,
            temperatures=TEMPERATURES,
            bound=EXACT,
            vocab_size=VOCABULARY,
        )

    def test_of_another_temperature_whose_tail_is_wrong(self) -> None:
        columns = columns_of(some_rows())
        columns[Kind.LOG_TAIL][5, TEMPERATURES.index(2.0)] -= 3

        def targets(temperature: float) -> Targets:
            return make_targets(
                columns, temperature=temperature, temperatures=TEMPERATURES, bound=EXACT
            )

        targets(1.0)
        with pytest.raises(PayloadInvalidError, match=r"position 5 .* to one at temperature 2"):
            targets(2.0)

    def test_of_a_temperature_that_is_not_there_name_those_that_are(self) -> None:
        with pytest.raises(PayloadInvalidError, match=r"no temperature 3; it has 1, 0\.5, 2"):
            make_targets(columns_of(some_rows()), temperature=3.0, temperatures=TEMPERATURES)

    def test_of_a_temperature_that_is_no_number(self) -> None:
        with pytest.raises(PayloadInvalidError, match="the temperature is '2', a str"):
            make_targets(columns_of(some_rows()), temperature="2")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "kind", [Kind.TOPK_IDS, Kind.TOPK_LOGPROBS, Kind.LOG_TAIL, Kind.LOGSUMEXP, Kind.ROW_OFFSETS]
    )
    def test_of_a_missing_column_name_it(self, kind: Kind) -> None:
        columns = columns_of(some_rows())
        del columns[kind]

        with pytest.raises(PayloadInvalidError, match=f"need the column {kind.value}"):
            make_targets(columns, temperature=2.0, temperatures=TEMPERATURES)

    def test_of_offsets_that_speak_of_other_positions(self) -> None:
        columns = columns_of(some_rows())
        columns[Kind.ROW_OFFSETS] = torch.tensor([0, 4, 4, 6])

        with pytest.raises(PayloadInvalidError, match="of 6 positions and topk_ids has 7"):
            make_targets(columns)

    @pytest.mark.parametrize("offsets", [[], [0, 5, 4, 7], [2, 4, 4, 7]])
    def test_of_offsets_that_are_none(self, offsets: list[int]) -> None:
        columns = columns_of(some_rows())
        columns[Kind.ROW_OFFSETS] = torch.tensor(offsets, dtype=torch.int64)

        with pytest.raises(PayloadInvalidError, match="row_offsets run from"):
            make_targets(columns)

    @pytest.mark.parametrize(
        ("token_id", "rule"), [(-7, "an id below -1"), (-1, "a log-probability without an id")]
    )
    def test_of_an_id_that_is_none_beside_its_log_probability(
        self, token_id: int, rule: str
    ) -> None:
        columns = columns_of(some_rows())
        columns[Kind.TOPK_IDS][5, 1] = token_id

        with pytest.raises(PayloadInvalidError, match=f"position 5 of 7 .*{rule}"):
            make_targets(columns)

    def test_a_nan_in_a_row_that_is_masked_is_none_of_them(self) -> None:
        columns = columns_of(some_rows())
        columns[Kind.TOPK_LOGPROBS][5] = math.nan
        columns[Kind.ROW_STATUS][2] = RowStatus.NAN

        assert make_targets(columns).valid.tolist() == [True] * 4 + [False] * 3
