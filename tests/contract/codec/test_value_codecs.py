"""Value codecs: what comes back is as near as was certified, or the codec says that it cannot."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encoded import rows_of_logits

from teacher_logits.codec import renormalise
from teacher_logits.codec.value_codecs import certify, decode_values, encode_values, entry_errors
from teacher_logits.encodings import CODEC_FACT, CodecError, Plane, StreamCodec, ValueCodec
from teacher_logits.error_bounds import bound_of
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ElementType
from teacher_logits.selection import select_top_k
from teacher_logits.tensors import DTYPES

PLANES = {
    ValueCodec.FLOAT16: (None, Plane.FLOAT16),
    ValueCodec.BFLOAT16: (None, Plane.BFLOAT16),
    ValueCodec.BFLOAT16_EXACT: (Plane.FIRST, Plane.RAW),
    ValueCodec.UINT8: (Plane.SCALE, Plane.CODES),
}
ROW_BYTES = {Plane.FIRST: 4, Plane.SCALE: 8}
ENTRY_BYTES = {Plane.FLOAT16: 2, Plane.BFLOAT16: 2, Plane.RAW: 2, Plane.CODES: 1}
LOSSY = [
    (ValueCodec.FLOAT16, ElementType.FLOAT32),
    (ValueCodec.BFLOAT16, ElementType.FLOAT32),
    (ValueCodec.UINT8, ElementType.FLOAT32),
    (ValueCodec.UINT8, ElementType.FLOAT16),
    (ValueCodec.UINT8, ElementType.BFLOAT16),
]


def through(
    codec: ValueCodec, values: torch.Tensor, logsumexp: torch.Tensor | None = None
) -> torch.Tensor:
    """The values after their way through a codec, in their own type."""
    head_plane, plane = PLANES[codec]
    head, back = None, torch.full_like(values, 7.0)
    if head_plane is not None:
        head = torch.empty(len(values), ROW_BYTES[head_plane], dtype=torch.uint8)
        encode_values(head_plane, values, head, logsumexp=logsumexp)
    data = torch.empty(len(values), ENTRY_BYTES[plane] * values.shape[1], dtype=torch.uint8)
    encode_values(plane, values, data, logsumexp=logsumexp)
    decode_values(plane, data, back, head=head)
    return back


def coarse(logprobs: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Entries and tail [P,K+1] that sum to one, in fp64."""
    whole = torch.cat([logprobs.double(), tail.double().unsqueeze(1)], 1)
    return whole - whole.logsumexp(1, keepdim=True)


@given(rows_of_logits(), st.sampled_from(LOSSY), st.sampled_from([1, 7, 64]))
def test_no_entry_is_further_off_than_was_certified(
    logits: torch.Tensor, case: tuple[ValueCodec, ElementType], k: int
) -> None:
    codec, written = case
    values = select_top_k(logits, k=k).topk_logprobs.to(DTYPES[written])
    bound = bound_of(StreamCodec(values=codec), written=written, top_k=k)

    back = through(codec, values)

    assert back.dtype == values.dtype
    assert torch.equal(back == -torch.inf, values == -torch.inf)
    error = torch.where(values == -torch.inf, 0.0, (back.double() - values.double()).abs())
    assert (error <= entry_errors(back, bound)).all()


@given(rows_of_logits(), st.sampled_from(LOSSY), st.sampled_from([1, 7, 64]))
def test_divergence_and_gradient_are_within_what_was_certified(
    logits: torch.Tensor, case: tuple[ValueCodec, ElementType], k: int
) -> None:
    codec, written = case
    selection = select_top_k(logits, k=k)
    values, tail = selection.topk_logprobs.to(DTYPES[written]), selection.log_tail[:, 0]
    bound = bound_of(StreamCodec(values=codec), written=written, top_k=k)
    back = through(codec, values)
    true, got = coarse(values, tail), coarse(back, tail)

    here = true > -torch.inf
    divergence = torch.where(here, true.exp() * (true - got), 0.0).sum(1)
    gradient = (true.exp() - got.exp()).abs().sum(1)

    kl, most = certify(back, bound)
    assert (divergence <= kl + 1e-12).all()
    assert (gradient <= most + 1e-12).all()


@given(rows_of_logits(), st.sampled_from(LOSSY))
def test_order_is_kept(logits: torch.Tensor, case: tuple[ValueCodec, ElementType]) -> None:
    codec, written = case
    back = through(codec, select_top_k(logits, k=16).topk_logprobs.to(DTYPES[written]))

    assert (back[:, 1:] <= back[:, :-1]).all()


@given(rows_of_logits(bfloat16=True), st.sampled_from([1, 7, 64]))
def test_what_bf16_logits_gave_comes_back_bit_for_bit_in_two_bytes(
    logits: torch.Tensor, k: int
) -> None:
    selection = select_top_k(logits, k=k)
    values = selection.topk_logprobs

    assert torch.equal(
        through(ValueCodec.BFLOAT16_EXACT, values, selection.logsumexp[:, 0]), values
    )


def test_what_fp32_logits_gave_is_refused_as_bf16_logits() -> None:
    selection = select_top_k(torch.randn(4, 50, generator=torch.Generator().manual_seed(0)), k=8)

    with pytest.raises(CodecError, match="not what bf16 logits give") as refused:
        through(ValueCodec.BFLOAT16_EXACT, selection.topk_logprobs, selection.logsumexp[:, 0])
    assert refused.value.facts[CODEC_FACT] == "bfloat16_exact"


def test_a_log_probability_beyond_fp16_is_refused() -> None:
    values = torch.tensor([[0.0, -1.0], [0.0, -70000.0]])

    with pytest.raises(CodecError, match="-70000 is beyond what fp16 holds"):
        through(ValueCodec.FLOAT16, values)


@pytest.mark.parametrize(
    ("codec", "written"), [case for case in LOSSY if case[0] is not ValueCodec.FLOAT16]
)
def test_the_least_number_of_a_type_by_which_models_mask_stays_an_entry(
    codec: ValueCodec, written: ElementType
) -> None:
    dtype = DTYPES[written]
    least = torch.finfo(dtype).min
    values = torch.tensor([[-0.5, least], [-0.5, least / 3], [least, least]], dtype=dtype)
    masked = torch.tensor([[-0.5, least, -torch.inf]], dtype=dtype)
    bound = bound_of(StreamCodec(values=codec), written=written, top_k=2)

    for row in (values, masked):
        back = through(codec, row)
        assert torch.equal(back == -torch.inf, row == -torch.inf)
        error = (back.double() - row.double()).nan_to_num(0.0).abs()
        assert (error <= entry_errors(back, bound)).all()


def test_below_temperature_1_a_position_is_certified_by_its_own_errors() -> None:
    flat = torch.full((1, 64), -math.log(64))
    bound = bound_of(StreamCodec(values=ValueCodec.BFLOAT16), written=ElementType.FLOAT32, top_k=64)
    moved = flat + bound.relative * flat.abs() * torch.tensor([1.0, -1.0]).repeat(32)
    p, q = ((2 * each.double()).log_softmax(1) for each in (flat, moved))  # at temperature 1/2
    divergence = float((p.exp() * (p - q)).sum())
    kl, gradient = certify(moved, bound, temperature=0.5)
    assert bound.kl is not None

    assert bound.kl < divergence <= float(kl)
    assert float((p.exp() - q.exp()).abs().sum()) <= float(gradient)


@given(rows_of_logits(), st.sampled_from(LOSSY), st.sampled_from([0.3, 1.5, 4.0]))
def test_what_is_certified_holds_at_any_temperature(
    logits: torch.Tensor, case: tuple[ValueCodec, ElementType], temperature: float
) -> None:
    codec, written = case
    selection = select_top_k(logits, k=7, temperatures=(1.0, temperature))
    values, tail = selection.topk_logprobs.to(DTYPES[written]), selection.log_tail[:, 1]
    shift = (selection.logsumexp[:, :1] / temperature - selection.logsumexp[:, 1:]).double()
    bound = bound_of(StreamCodec(values=codec), written=written, top_k=7)
    back = through(codec, values)
    true, got = (coarse(each.double() / temperature + shift, tail) for each in (values, back))

    divergence = torch.where(true > -torch.inf, true.exp() * (true - got), 0.0).sum(1)
    kl, gradient = certify(back, bound, temperature=temperature)
    assert (divergence <= kl + 1e-12).all()
    assert ((true.exp() - got.exp()).abs().sum(1) <= gradient + 1e-12).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_uint8_refuses_what_has_no_range(value: float) -> None:
    with pytest.raises(CodecError, match="NaN or an infinite range") as refused:
        through(ValueCodec.UINT8, torch.tensor([[0.0, -1.0], [value, -1.0]]))
    assert "value_codecs=('as_written',)" in refused.value.message


def test_positions_without_entries_come_back_empty_beside_constant_ones() -> None:
    values = torch.tensor([[-torch.inf] * 3, [-0.5] * 3, [-0.5, -0.5, -torch.inf], [0.0] * 3])

    assert torch.equal(through(ValueCodec.UINT8, values), values)


def test_a_scale_that_is_not_finite_is_malformed() -> None:
    scale = torch.tensor([[0.0, 0.1], [torch.nan, 0.1]]).view(torch.uint8)

    with pytest.raises(PayloadInvalidError, match="malformed") as refused:
        decode_values(
            Plane.CODES, torch.zeros(2, 4, dtype=torch.uint8), torch.empty(2, 4), head=scale
        )
    assert not isinstance(refused.value, CodecError)
    assert CODEC_FACT not in refused.value.facts


@given(rows_of_logits())
def test_decoded_targets_sum_to_one(logits: torch.Tensor) -> None:
    selection = select_top_k(logits, k=8)
    back = through(ValueCodec.UINT8, selection.topk_logprobs)

    logprobs, tail = renormalise(back, selection.log_tail[:, 0])

    total = logprobs.double().exp().sum(1) + tail.double().exp()
    assert torch.allclose(total, torch.ones_like(total), atol=1e-6)
