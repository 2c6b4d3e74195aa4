"""Selection: exact entries in one order, true log-probabilities, tails over the complement."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from teacher_logits.codec import retemper
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import RowStatus
from teacher_logits.selection import Selection, complement, row_statuses, select_top_k

# On both sides of the widths from which rows are folded once and twice.
WIDTHS = [1, 2, 7, 41, 1100, 5003, 20_011]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def logits(draw: st.DrawFn, widths: list[int] = WIDTHS) -> torch.Tensor:
    """Rows from nearly flat to peaked, some on a grid so coarse that most entries tie."""
    width, count = draw(st.sampled_from(widths)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows = torch.randn(count, width, generator=generator) * draw(st.sampled_from([0.3, 3.0, 9.0]))
    step = draw(st.sampled_from([0.0, 0.25, 4.0]))
    if step:
        rows = (rows / step).round() * step
    if draw(st.booleans()):
        rows[torch.rand(rows.shape, generator=generator) < 0.4] = -torch.inf
        rows[:, draw(st.integers(0, width - 1))] = 0.5
    return rows.to(draw(st.sampled_from(DTYPES)))


def ordered(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids by value descending, then id ascending."""
    return (rows.double() + 0.0).sort(dim=1, descending=True, stable=True)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got.double(), expected.double(), atol=2e-6, rtol=1e-5)


def same(a: Selection, b: Selection) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return all(x is y if x is None else torch.equal(x, y) for x, y in pairs)


class TestAgainstTheDenseReference:
    @given(logits(), st.sampled_from([1, 2, 9, 64, 300]))
    def test_ids_are_in_the_agreed_order(self, rows: torch.Tensor, k: int) -> None:
        values, ids = ordered(rows)
        expected = torch.where(values == -torch.inf, -1, ids)[:, :k].int()

        got = select_top_k(rows, k=k).topk_ids

        assert torch.equal(got[:, : rows.shape[1]], expected)
        assert (got[:, rows.shape[1] :] == -1).all()

    @given(logits(), st.sampled_from([1, 9, 64]))
    def test_logprobs_are_those_of_the_whole_vocabulary(self, rows: torch.Tensor, k: int) -> None:
        values, _ = ordered(rows)
        expected = values.log_softmax(1)[:, :k]

        got = select_top_k(rows, k=k)

        assert close(got.topk_logprobs[:, : expected.shape[1]], expected)
        assert close(got.logsumexp[:, 0], values.logsumexp(1))

    @given(logits(), st.sampled_from([1, 9, 64]), st.sampled_from([0.5, 2.0, 4.0]))
    def test_tails_are_those_of_the_complement_at_every_temperature(
        self, rows: torch.Tensor, k: int, tau: float
    ) -> None:
        values, _ = ordered(rows)

        got = select_top_k(rows, k=k, temperatures=(1.0, tau))

        for column, temperature in enumerate((1.0, tau)):
            expected = (values / temperature).log_softmax(1)[:, k:].logsumexp(1)
            assert close(got.log_tail[:, column], expected)
            assert close(got.logsumexp[:, column], (values / temperature).logsumexp(1))

    @given(logits(widths=[41, 5003]), st.sampled_from([0.5, 2.0]))
    def test_entries_follow_at_another_temperature(self, rows: torch.Tensor, tau: float) -> None:
        values, _ = ordered(rows)
        expected = (values / tau).log_softmax(1)[:, :9]

        got = select_top_k(rows, k=9, temperatures=(1.0, tau))
        at_1, at_tau = got.logsumexp.unbind(1)

        tempered = retemper(got.topk_logprobs, at_1, at_tau, tau)
        assert torch.allclose(tempered.double(), expected, atol=1e-5, rtol=1e-5)

    @given(logits(), st.data())
    def test_the_next_token_has_its_own_logprob(
        self, rows: torch.Tensor, data: st.DataObject
    ) -> None:
        count, width = rows.shape
        ids = [data.draw(st.integers(-1, width - 1)) for _ in range(count)]
        next_ids = torch.tensor(ids)
        dense = rows.double().log_softmax(1).gather(1, next_ids.clamp_min(0)[:, None])[:, 0]

        got = select_top_k(rows, k=3, next_ids=next_ids).actual_logprob

        assert got is not None
        assert close(got, torch.where(next_ids < 0, 0.0, dense))


class TestTies:
    def test_a_row_of_equal_values_gives_the_first_ids(self) -> None:
        got = select_top_k(torch.zeros(2, 20_000), k=64)

        assert torch.equal(got.topk_ids, torch.arange(64).expand(2, -1).int())

    @pytest.mark.parametrize("first", [0, 3000, 17_000])
    @pytest.mark.parametrize("above", [0, 10])
    def test_more_ties_than_are_taken_are_searched_for(self, first: int, above: int) -> None:
        rows = torch.full((2, 20_000), -1.0)
        rows[0, first::3] = 2.0
        best = torch.arange(19_000, 19_000 + above)
        rows[0, best] = 5.0
        tied = torch.arange(first, 20_000, 3)
        expected = torch.cat([best, tied[~torch.isin(tied, best)]])[:64].int()

        assert torch.equal(select_top_k(rows, k=64).topk_ids[0], expected)

    @pytest.mark.parametrize("stride", [16, 625, 1250, 2500])
    def test_ties_at_a_steady_distance_are_all_found(self, stride: int) -> None:
        rows = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(3))
        tied = torch.arange(20_000)[torch.arange(20_000) % stride < max(1, stride // 80)]
        rows[0, tied] = 9.0

        assert torch.equal(select_top_k(rows, k=64).topk_ids[0], tied[:64].int())

    def test_zeros_of_either_sign_are_equal(self) -> None:
        rows = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])

        assert select_top_k(rows, k=4).topk_ids.tolist() == [[0, 1, 2, 3]]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class TestARowIsItsOwn:
    @pytest.mark.parametrize(
        ("count", "width", "k"), [(7000, 41, 9), (90, 5003, 64), (23, 60_001, 300), (9, 1, 4)]
    )
    @pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
    @pytest.mark.usefixtures("threads")
    def test_its_bits_do_not_depend_on_the_rows_beside_it(
        self, count: int, width: int, k: int, dtype: torch.dtype
    ) -> None:
        rows = torch.randn(count, width, generator=torch.Generator().manual_seed(5)) * 3
        rows, next_ids = rows.to(dtype), torch.arange(count) % width
        temperatures = (1.0, 2.0)
        whole = select_top_k(rows, k=k, temperatures=temperatures, next_ids=next_ids)

        step = count // 8 - 1 if count > 16 else 1
        for part in (slice(start, start + step) for start in range(0, count, step)):
            alone = select_top_k(
                rows[part], k=k, temperatures=temperatures, next_ids=next_ids[part]
            )
            assert same(alone, whole[part])

    @pytest.mark.parametrize("count", [37, 7000])
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.usefixtures("threads")
    def test_its_bits_do_not_depend_on_where_a_threads_share_ends(
        self, count: int, seed: int
    ) -> None:
        """torch computes a share's last powers otherwise, so few entries make up these rows."""
        rows = torch.full((count, 41), -torch.inf)
        generator = torch.Generator().manual_seed(seed)
        for columns in (slice(2, 8), slice(24, 30), slice(32, 41)):
            rows[:, columns] = torch.rand(rows[:, columns].shape, generator=generator)
        rows[:, 0] = 5.0
        temperatures = (1.0, 0.3, 0.5, 1.5, 2.0)
        whole = select_top_k(rows, k=1, temperatures=temperatures)

        for row in {*range(12), 2275, 4550, count - 1} & set(range(count)):
            part = slice(row, row + 1)
            assert same(select_top_k(rows[part], k=1, temperatures=temperatures), whole[part])

    @given(st.integers(1, 10**5), st.integers(1, 5000), st.integers(1, 96))
    def test_a_threads_share_is_whole_rows(self, count: int, width: int, threads: int) -> None:
        """torch gives every thread an equal share, where each gets at least 32,768 elements."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: threads)
            rows = complement._buffer_rows(count, width * 32, torch.device("cpu"))

        alone = count * width * 32 <= 32_768 and rows == count
        assert alone or (rows % threads == 0 and rows // threads * width * 32 >= 32_768)

    def test_sequences_give_the_same_as_their_positions(self) -> None:
        rows = torch.randn(3, 5, 90, generator=torch.Generator().manual_seed(1))
        for view in (rows, rows[:, :-1], rows[:, :, 20:], rows.transpose(0, 1)):
            flat = view.reshape(-1, view.shape[-1])

            assert same(select_top_k(view, k=4), select_top_k(flat, k=4))

    def test_the_logits_stay_as_they_are(self) -> None:
        rows = torch.randn(4, 5000)
        before = rows.clone()

        select_top_k(rows, k=9)

        assert torch.equal(rows, before)

    def test_no_second_array_of_their_size_is_made(self) -> None:
        rows = torch.randn(150, 40_000)
        with _Sizes(rows) as sizes:
            select_top_k(rows, k=64, temperatures=(1.0, 2.0))

        assert 0 < sizes.largest < rows.numel() / 4


class _Sizes(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, views of the given one left out."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.largest = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() != self.known
            ):
                stored = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, stored)
        return out


class TestPrecision:
    @pytest.mark.parametrize("exponent", range(1, 31, 4))
    @pytest.mark.parametrize("width", [64, 5000])
    def test_a_small_tail_is_as_exact_as_a_large_one(self, exponent: int, width: int) -> None:
        rest = torch.randn(width - 1, generator=torch.Generator().manual_seed(exponent))
        rest += math.log(10.0**-exponent) - rest.logsumexp(0)
        rows = torch.cat([torch.zeros(1), rest]).unsqueeze(0)
        expected = rows.double().log_softmax(1)[0, 1:].logsumexp(0).exp()

        tail = select_top_k(rows, k=1).log_tail.double().exp()

        assert float(tail) == pytest.approx(float(expected), rel=1e-5)

    def test_large_logits_cost_no_digits(self) -> None:
        rows = torch.randn(3, 3000, generator=torch.Generator().manual_seed(2)).bfloat16().float()
        large = rows + 32_768.0
        dense = large.double().log_softmax(1)

        got = select_top_k(large, k=9)

        assert close(got.topk_logprobs, dense.gather(1, got.topk_ids.long()))


class TestVocabulary:
    @pytest.mark.parametrize("garbage", [60.0, -60.0, math.nan, math.inf, -math.inf])
    def test_padded_columns_take_no_part(self, garbage: float) -> None:
        rows = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3))
        padded = torch.cat([rows, torch.full((3, 120), garbage)], 1)

        assert same(select_top_k(padded, k=9, vocab_size=5000), select_top_k(rows, k=9))

    @pytest.mark.parametrize("k", [5, 6, 9, 300])
    def test_at_least_the_whole_vocabulary_leaves_no_tail(self, k: int) -> None:
        rows = torch.randn(2, 5, generator=torch.Generator().manual_seed(4))

        got = select_top_k(rows, k=k, temperatures=(1.0, 2.0))

        assert (got.log_tail == -torch.inf).all()
        assert close(got.topk_logprobs[:, :5].exp().sum(1), torch.ones(2))
        assert (got.topk_ids[:, 5:] == -1).all()
        assert (got.topk_logprobs[:, 5:] == -torch.inf).all()

    @pytest.mark.parametrize("finite", [1, 4, 8])
    @pytest.mark.parametrize("width", [41, 5000])
    def test_entries_that_are_not_finite_are_absent(self, finite: int, width: int) -> None:
        rows = torch.full((1, width), -torch.inf)
        rows[0, width - finite :] = 1.0

        got = select_top_k(rows, k=8)

        assert got.status.tolist() == [RowStatus.OK]
        expected = [*range(width - finite, width), *[-1] * (8 - finite)]
        assert got.topk_ids[0].tolist() == expected
        assert ((got.topk_ids == -1) == (got.topk_logprobs == -torch.inf)).all()
        assert got.log_tail.item() == -torch.inf


class TestBadRows:
    @pytest.mark.parametrize("width", [12, 5000])
    @pytest.mark.parametrize(
        ("values", "status"),
        [
            ([math.nan], RowStatus.NAN),
            ([-math.nan], RowStatus.NAN),
            ([math.inf], RowStatus.POSITIVE_INFINITY),
            ([math.inf, math.nan], RowStatus.NAN),
            (None, RowStatus.EMPTY_SUPPORT),
        ],
    )
    def test_are_named_and_canonical_and_leave_the_others_alone(
        self, width: int, values: list[float] | None, status: RowStatus
    ) -> None:
        rows = torch.randn(3, width, generator=torch.Generator().manual_seed(6))
        good = select_top_k(rows, k=4, next_ids=torch.tensor([1, 2, 3]))
        if values is None:
            rows[1] = -torch.inf
        else:
            rows[1, 7 : 7 + len(values)] = torch.tensor(values)

        got = select_top_k(rows, k=4, next_ids=torch.tensor([1, 2, 3]))

        assert got.status.tolist() == [RowStatus.OK, status, RowStatus.OK]
        assert (got.topk_ids[1] == -1).all()
        for floats in (got.topk_logprobs, got.log_tail, got.logsumexp, got.actual_logprob):
            assert floats is not None
            assert (floats[1] == 0).all()
        for row in (slice(0, 1), slice(2, 3)):
            assert same(got[row], good[row])

    def test_are_canonical_where_k_exceeds_the_vocabulary(self) -> None:
        got = select_top_k(torch.full((1, 3), math.nan), k=5)

        assert got.topk_ids.tolist() == [[-1] * 5]
        assert got.topk_logprobs.tolist() == [[0.0] * 5]

    def test_a_row_of_positions_has_the_worst_of_them(self) -> None:
        status = torch.tensor([0, 0, 3, 0, 2, 1, 2, 0], dtype=torch.uint8)
        offsets = torch.tensor([0, 2, 2, 4, 7, 8])

        assert row_statuses(status, offsets).tolist() == [0, 0, 3, 1, 0]
        assert row_statuses(status, offsets).dtype == torch.uint8


class TestOut:
    def made(self, dtype: torch.dtype, positions: int = 4, k: int = 5) -> Selection:
        return Selection(
            topk_ids=torch.zeros(positions, k, dtype=torch.int32),
            topk_logprobs=torch.zeros(positions, k, dtype=dtype),
            log_tail=torch.zeros(positions, 1),
            logsumexp=torch.zeros(positions, 1),
            actual_logprob=None,
            status=torch.full((positions,), 9, dtype=torch.uint8),
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_takes_the_result_in_its_own_type(self, dtype: torch.dtype) -> None:
        rows = torch.randn(4, 90, generator=torch.Generator().manual_seed(7))
        fresh, out = select_top_k(rows, k=5), self.made(dtype)

        assert select_top_k(rows, k=5, out=out) is out
        assert same(out, replace(fresh, topk_logprobs=fresh.topk_logprobs.to(dtype)))

    def test_takes_views_of_larger_memory(self) -> None:
        rows = torch.randn(4, 90, generator=torch.Generator().manual_seed(8))
        slab = self.made(torch.float16, positions=9)

        select_top_k(rows, k=5, out=slab[3:7])

        assert same(slab[3:7], select_top_k(rows, k=5, out=self.made(torch.float16)))
        assert slab.status.tolist() == [9, 9, 9, 0, 0, 0, 0, 9, 9]

    def test_an_entry_too_small_for_fp16_is_still_an_entry(self) -> None:
        out = self.made(torch.float16, positions=1, k=2)

        select_top_k(torch.tensor([[0.0, -1e6, -2e6]]), k=2, out=out)

        assert out.topk_logprobs.tolist() == [[0.0, torch.finfo(torch.float16).min]]

    @pytest.mark.parametrize(
        ("field", "tensor"),
        [
            ("topk_ids", torch.zeros(4, 5, dtype=torch.int64)),
            ("topk_logprobs", torch.zeros(4, 6)),
            ("log_tail", torch.zeros(4, 1, dtype=torch.float16)),
            ("status", torch.zeros(3, dtype=torch.uint8)),
        ],
    )
    def test_that_does_not_fit_is_refused_by_name(self, field: str, tensor: torch.Tensor) -> None:
        out = replace(self.made(torch.float32), **{field: tensor})

        with pytest.raises(PayloadInvalidError, match=rf"out\.{field} is") as caught:
            select_top_k(torch.zeros(4, 90), k=5, out=out)
        assert caught.value.facts["shape"] == str(tuple(tensor.shape))

    def test_has_room_for_the_next_token_where_one_is_given(self) -> None:
        out = self.made(torch.float32)
        with pytest.raises(PayloadInvalidError, match="next_ids are given and actual_logprob"):
            select_top_k(torch.zeros(4, 90), k=5, next_ids=torch.zeros(4).int(), out=out)
        with pytest.raises(PayloadInvalidError, match="actual_logprob are given and next_ids"):
            select_top_k(torch.zeros(4, 90), k=5, out=replace(out, actual_logprob=torch.zeros(4)))


class TestRefusals:
    @pytest.mark.parametrize(
        ("shape", "arguments", "facts"),
        [
            ((4, 9), {"k": 0}, {"k": 0}),
            ((4, 9), {"k": -3}, {"k": -3}),
            ((4, 0), {"k": 1}, {"columns": 0}),
            ((9,), {"k": 1}, {"axes": 1}),
            ((1, 1, 4, 9), {"k": 1}, {"axes": 4}),
            ((4, 9), {"k": 1, "vocab_size": 10}, {"vocab_size": 10, "columns": 9}),
            ((4, 9), {"k": 1, "vocab_size": 0}, {"vocab_size": 0}),
            ((4, 9), {"k": 1, "temperatures": ()}, {"temperature_count": 0}),
            ((4, 9), {"k": 1, "temperatures": (1.0, 2, 3, 4, 5, 6)}, {"temperature_count": 6}),
            ((4, 9), {"k": 1, "temperatures": (1.0, 0.0)}, {"place": 1, "temperature": 0.0}),
            ((4, 9), {"k": 1, "temperatures": (1.0, -2.0)}, {"temperature": -2.0}),
            ((4, 9), {"k": 1, "temperatures": (1.0, math.inf)}, {"temperature": math.inf}),
            ((4, 9), {"k": 1, "temperatures": (2.0, 1.0)}, {"temperature": 2.0}),
            ((4, 9), {"k": 1, "temperatures": (1.0, 2.0, 2.0)}, {"distinct": 2}),
        ],
    )
    def test_of_sizes_and_temperatures_have_their_numbers(
        self, shape: tuple[int, ...], arguments: dict[str, object], facts: dict[str, object]
    ) -> None:
        with pytest.raises(PayloadInvalidError) as caught:
            select_top_k(torch.zeros(shape), **arguments)  # type: ignore[call-overload]
        assert facts.items() <= caught.value.facts.items()
        assert all(
            f"{value:g}" in str(caught.value)
            for value in facts.values()
            if isinstance(value, float)
        )

    def test_of_an_id_outside_the_vocabulary_say_where(self) -> None:
        with pytest.raises(PayloadInvalidError, match=r"next_ids\[2\] is 9, .* of 9 ") as caught:
            select_top_k(
                torch.zeros(4, 12), k=1, vocab_size=9, next_ids=torch.tensor([0, -1, 9, -2])
            )
        assert caught.value.facts == {
            "position": 2,
            "token_id": 9,
            "vocab_size": 9,
            "wrong_positions": 2,
        }

    @pytest.mark.parametrize("next_ids", [torch.zeros(3).long(), torch.zeros(4)])
    def test_of_next_ids_of_another_shape_or_type(self, next_ids: torch.Tensor) -> None:
        with pytest.raises(PayloadInvalidError, match="next_ids are"):
            select_top_k(torch.zeros(4, 12), k=1, next_ids=next_ids)

    def test_of_other_element_types(self) -> None:
        with pytest.raises(PayloadInvalidError, match="float64"):
            select_top_k(torch.zeros(4, 12, dtype=torch.float64), k=1)


def test_no_positions_select_nothing() -> None:
    got = select_top_k(torch.zeros(0, 9), k=4, next_ids=torch.zeros(0).long())

    assert got.topk_ids.shape == got.topk_logprobs.shape == (0, 4)


def test_what_takes_a_selection_is_handed_all_that_was_given() -> None:
    class Taker:
        def select(self, logits: torch.Tensor, **given: object) -> Selection:
            self.given = given
            return select_top_k(logits, k=2)

    taker = Taker()
    got = select_top_k(torch.eye(3), out=taker, k=5)

    assert got.topk_ids.shape == (3, 2)
    assert taker.given == {"k": 5, "temperatures": None, "vocab_size": None, "next_ids": None}


def test_what_takes_no_selection_is_refused_by_its_type() -> None:
    with pytest.raises(PayloadInvalidError, match=r"out is \{\}, a dict: give a Selection"):
        select_top_k(torch.zeros(2, 5), k=2, out={})  # type: ignore[call-overload]


def test_k_is_needed_where_nothing_else_knows_it() -> None:
    with pytest.raises(PayloadInvalidError, match="k is not given"):
        select_top_k(torch.eye(3))  # type: ignore[call-overload]


def test_a_blank_selection_is_that_of_a_bad_position() -> None:
    following = torch.tensor([1])

    def selected(logits: torch.Tensor) -> Selection:
        plain = select_top_k(logits, k=2, next_ids=following)
        out = replace(plain, topk_logits=torch.empty(1, 2))
        return select_top_k(logits, k=2, next_ids=following, out=out)

    blank, wanted = selected(torch.randn(1, 4)), selected(torch.full((1, 4), torch.nan))
    blank.blank()

    for each in fields(Selection):
        if each.name != "status":
            assert torch.equal(getattr(blank, each.name), getattr(wanted, each.name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_kept_as_they_were_for_who_has_a_place_for_them(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 6) * 1e4
    logits[2, 1:] = -torch.inf
    logits[3, 0] = torch.inf
    plain = select_top_k(logits, k=8)
    out = replace(plain, topk_logits=torch.empty(5, 8, dtype=dtype))
    selected = select_top_k(logits, k=8, out=out)
    assert selected.topk_logits is not None
    assert selected[1:3].topk_logits is not None
    absent = plain.topk_ids < 0
    wanted = logits.gather(1, plain.topk_ids.clamp_min(0).long()).masked_fill(absent, -torch.inf)
    wanted[3] = 0.0
    assert torch.equal(selected.topk_logits, wanted.to(dtype))


def test_half_precision_has_no_place_for_logits() -> None:
    out = replace(select_top_k(torch.eye(3), k=2), topk_logits=torch.empty(3, 2).half())
    with pytest.raises(PayloadInvalidError, match="topk_logits is float16"):
        select_top_k(torch.eye(3), k=2, out=out)
