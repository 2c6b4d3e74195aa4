"""Partial selections: slices of the vocabulary, cut and merged in any way, are the whole of it."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import RowStatus
from teacher_logits.selection import Selection, select_top_k
from teacher_logits.selection.partial_selection import (
    PartialSelection,
    merge_partials,
    select_partial,
)

TEMPERATURES = (1.0, 2.0, 0.5)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """Rows from nearly flat to peaked, some of so coarse values that most ids tie."""
    width, count = draw(st.sampled_from([1, 2, 9, 41, 300])), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(count, width, generator=generator) * draw(st.sampled_from([0.3, 3, 12]))
    step = draw(st.sampled_from([0.0, 0.5, 4.0]))
    if step:
        logits = (logits / step).round() * step
    if draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = -torch.inf
        logits[:, draw(st.integers(0, width - 1))] = 0.5
    return logits.to(draw(st.sampled_from(DTYPES)))


def cut(
    logits: torch.Tensor, bounds: Sequence[int], *, k: int, vocab_size: int | None = None
) -> list[PartialSelection]:
    """The selections of the slices between bounds, with every position's next id the last."""
    vocabulary = vocab_size or logits.shape[-1]
    next_ids = torch.full((len(logits),), vocabulary - 1)
    next_ids[0] = -1
    return [
        select_partial(
            logits[:, start:stop],
            k=k,
            first_id=start,
            vocab_size=vocabulary,
            temperatures=TEMPERATURES,
            next_ids=next_ids,
        )
        for start, stop in pairwise(bounds)
    ]


def whole(logits: torch.Tensor, *, k: int, vocab_size: int | None = None) -> Selection:
    vocabulary = vocab_size or logits.shape[-1]
    next_ids = torch.full((len(logits),), vocabulary - 1)
    next_ids[0] = -1
    return select_top_k(
        logits, k=k, temperatures=TEMPERATURES, vocab_size=vocabulary, next_ids=next_ids
    )


def merged_at_random(parts: list[PartialSelection], seed: int) -> PartialSelection:
    """Merge two of them after another, whichever, until one is left: any order and bracketing."""
    chance, left = random.Random(seed), list(parts)
    while len(left) > 1:
        chance.shuffle(left)
        left.append(merge_partials([left.pop(), left.pop()]))
    return left[0]


def assert_same(got: Selection, expected: Selection) -> None:
    assert torch.equal(got.topk_ids, expected.topk_ids)
    assert torch.equal(got.status, expected.status)
    for name in ("topk_logprobs", "log_tail", "logsumexp", "actual_logprob"):
        one, other = getattr(got, name), getattr(expected, name)
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


@given(rows(), st.sampled_from([1, 3, 16, 64]), st.integers(0, 2**32), st.data())
def test_any_cut_merged_in_any_order_is_the_plain_selection(
    logits: torch.Tensor, k: int, seed: int, data: st.DataObject
) -> None:
    width = logits.shape[1]
    inner = data.draw(st.lists(st.integers(0, width), max_size=6))
    bounds = sorted({0, width, *inner})

    got = merged_at_random(cut(logits, bounds, k=k), seed).finish()

    assert_same(got, whole(logits, k=k))


@given(rows(), st.integers(0, 2**32))
def test_the_merge_is_associative_to_the_last_id(logits: torch.Tensor, seed: int) -> None:
    width = logits.shape[1]
    parts = cut(logits, sorted({0, width // 3, 2 * width // 3, width}), k=5)

    one, other = merged_at_random(parts, seed), merge_partials(parts)

    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.logits, other.logits)
    torch.testing.assert_close(one.log_rest, other.log_rest, atol=1e-12, rtol=1e-12)


@given(rows(), st.data())
def test_a_tail_of_next_to_nothing_keeps_its_digits(
    logits: torch.Tensor, data: st.DataObject
) -> None:
    logits = logits.float().nan_to_num(neginf=-50.0) - 30.0
    logits[:, data.draw(st.integers(0, logits.shape[1] - 1))] = 20.0
    parts = cut(logits, sorted({0, logits.shape[1] // 2, logits.shape[1]}), k=1)

    got = merge_partials(parts).finish().log_tail[:, 0]

    exact = logits.double().log_softmax(1).sort(1).values[:, :-1].logsumexp(1)
    torch.testing.assert_close(got.double(), exact, atol=2e-6, rtol=1e-6)


def test_columns_of_padding_take_part_in_no_slice() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    logits[:, 33:] = 99.0
    parts = cut(logits, [0, 10, 30, 36, 40], k=6, vocab_size=33)

    assert parts[-1].spans == ()
    assert_same(merge_partials(parts[::-1]).finish(), whole(logits, k=6, vocab_size=33))


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ([math.nan, math.inf], RowStatus.NAN),
        ([math.inf, math.nan], RowStatus.NAN),
        ([math.inf, 0.0], RowStatus.POSITIVE_INFINITY),
        ([-math.inf, 0.0], RowStatus.OK),
    ],
)
def test_a_bad_logit_of_one_slice_makes_the_position_bad(
    values: list[float], status: RowStatus
) -> None:
    logits = torch.zeros(2, 8)
    logits[0, 1], logits[0, 6] = values

    got = merge_partials(cut(logits, [0, 4, 8], k=3)).finish()

    assert got.status.tolist() == [status, RowStatus.OK]
    assert_same(got, whole(logits, k=3))


def test_a_position_without_a_finite_logit_is_known_when_all_is_merged() -> None:
    logits = torch.full((1, 8), -math.inf)
    parts = cut(logits, [0, 4, 8], k=3)

    assert [int(part.status) for part in parts] == [RowStatus.OK, RowStatus.OK]
    assert_same(merge_partials(parts).finish(), whole(logits, k=3))
    assert int(merge_partials(parts).finish().status) == RowStatus.EMPTY_SUPPORT


def test_three_axes_are_flat_positions() -> None:
    logits = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(2))
    parts = [
        select_partial(logits[..., start : start + 5], k=4, first_id=start, vocab_size=10)
        for start in (0, 5)
    ]

    assert torch.equal(merge_partials(parts).finish().topk_ids, select_top_k(logits, k=4).topk_ids)


class TestRefused:
    LOGITS = torch.zeros(2, 10)

    def parts(self, *bounds: int) -> list[PartialSelection]:
        return cut(self.LOGITS, bounds, k=3)

    def test_a_hole(self) -> None:
        first, _, last = self.parts(0, 3, 6, 10)

        with pytest.raises(PayloadInvalidError, match="0 to 2, 6 to 9 of a vocabulary of 10"):
            merge_partials([first, last]).finish()

    def test_an_overlap(self) -> None:
        with pytest.raises(PayloadInvalidError, match="ids 3 to 5 are in two"):
            merge_partials([*self.parts(0, 6), *self.parts(3, 10)])

    def test_a_slice_inside_another(self) -> None:
        with pytest.raises(PayloadInvalidError, match="ids 3 to 5 are in two"):
            merge_partials([*self.parts(0, 10), *self.parts(3, 6)])

    def test_no_slices(self) -> None:
        with pytest.raises(PayloadInvalidError, match="no slices"):
            merge_partials([])

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ({"k": 2}, "positions and entries"),
            ({"temperatures": (1.0,)}, "temperatures"),
            ({"vocab_size": 11}, "vocab_size"),
            ({"next_ids": None}, "next_ids"),
        ],
    )
    def test_slices_cut_by_other_settings(self, given: dict[str, object], name: str) -> None:
        settings: dict[str, object] = {
            "k": 3,
            "temperatures": TEMPERATURES,
            "vocab_size": 10,
            "next_ids": torch.tensor([1, 2]),
        }
        other = select_partial(
            self.LOGITS[:, 5:],
            first_id=5,
            **{**settings, **given},  # type: ignore[arg-type]
        )

        with pytest.raises(PayloadInvalidError, match=name):
            merge_partials([*self.parts(0, 5), other])

    def test_a_slice_from_nowhere(self) -> None:
        with pytest.raises(PayloadInvalidError, match="first_id is -1"):
            select_partial(self.LOGITS, k=1, first_id=-1, vocab_size=10)
