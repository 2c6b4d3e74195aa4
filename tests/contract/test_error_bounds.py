"""Error bounds hold for the worst rows there are, and are not so wide that they say nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.encodings import StreamCodec, ValueCodec
from teacher_logits.error_bounds import EXACT, ErrorBound, bound_of
from teacher_logits.layout import ElementType

RELATIVE = [ValueCodec.FLOAT16, ValueCodec.BFLOAT16]


def bound(codec: ValueCodec, top_k: int) -> ErrorBound:
    return bound_of(StreamCodec(values=codec), written=ElementType.FLOAT32, top_k=top_k)


@st.composite
def adversarial(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """True log-probabilities [n] in fp64, and the sign of the error at each."""
    size = draw(st.integers(2, 70))
    depth = st.floats(0, draw(st.sampled_from([0.01, 1.0, 6.0, 40.0, 700.0])))
    depths = torch.tensor(draw(st.lists(depth, min_size=size, max_size=size)), dtype=torch.float64)
    signs = draw(st.lists(st.sampled_from([-1.0, 1.0, 0.0]), min_size=size, max_size=size))
    return torch.log_softmax(-depths, 0), torch.tensor(signs, dtype=torch.float64)


@given(adversarial(), st.sampled_from(RELATIVE))
def test_an_adversary_who_moves_every_entry_as_far_as_may_be_stays_below(
    row: tuple[torch.Tensor, torch.Tensor], codec: ValueCodec
) -> None:
    true, signs = row
    certified = bound(codec, len(true) - 1)
    assert certified.kl is not None
    assert certified.gradient is not None
    moved = true + signs * (certified.relative * true.abs() + certified.absolute)
    got = moved - moved.logsumexp(0)

    assert float((true.exp() * (true - got)).sum()) <= certified.kl
    assert float((true.exp() - got.exp()).abs().sum()) <= certified.gradient


@given(adversarial())
def test_the_same_holds_of_a_range(row: tuple[torch.Tensor, torch.Tensor]) -> None:
    true, signs = row
    certified = bound(ValueCodec.UINT8, len(true) - 1)
    spread = float(true.max() - true.min())
    moved = true + signs * (certified.of_range * spread + certified.absolute)
    got = moved - moved.logsumexp(0)

    delta = certified.delta(furthest=float(true.abs().max()), spread=spread)
    assert float((true.exp() * (true - got)).sum()) <= delta**2 / 2
    assert float((true.exp() - got.exp()).abs().sum()) <= delta


@pytest.mark.parametrize("codec", RELATIVE)
def test_a_flat_row_that_is_moved_half_up_and_half_down_comes_near_the_bound(
    codec: ValueCodec,
) -> None:
    certified = bound(codec, 63)
    assert certified.kl is not None
    assert certified.gradient is not None
    true = torch.full((64,), -math.log(64), dtype=torch.float64)
    moved = true + certified.relative * true.abs() * torch.tensor([1.0, -1.0]).repeat(32)
    got = moved - moved.logsumexp(0)

    assert float((true.exp() * (true - got)).sum()) > 0.9 * certified.kl
    assert float((true.exp() - got.exp()).abs().sum()) > 0.9 * certified.gradient


@pytest.mark.parametrize("written", [ElementType.FLOAT16, ElementType.FLOAT32])
@pytest.mark.parametrize("codec", [ValueCodec.AS_WRITTEN, ValueCodec.BFLOAT16_EXACT])
def test_what_loses_nothing_has_bounds_of_zero(codec: ValueCodec, written: ElementType) -> None:
    found = bound_of(StreamCodec(values=codec), written=written, top_k=64)

    assert found == EXACT
    assert found.is_exact
    assert (found.kl, found.gradient) == (0.0, 0.0)


def test_only_a_range_leaves_the_session_without_one_number() -> None:
    found = bound(ValueCodec.UINT8, 64)

    assert (found.kl, found.gradient) == (None, None)
    assert found.delta(furthest=20.0, spread=10.0) == pytest.approx(10 / 508, rel=1e-3)


def test_fp16_is_certified_sixty_times_below_bf16() -> None:
    fine, wide = bound(ValueCodec.FLOAT16, 64), bound(ValueCodec.BFLOAT16, 64)

    assert fine.kl is not None
    assert wide.kl is not None
    assert 2e-6 < fine.kl < 2.2e-6
    assert wide.kl > 60 * fine.kl
