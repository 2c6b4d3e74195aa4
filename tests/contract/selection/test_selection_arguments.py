"""What is no tensor, no number or no rule is refused by every way to select, and says so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import RowStatus
from teacher_logits.selection import Selection, select_top_k
from teacher_logits.selection.given_ids import score_given
from teacher_logits.selection.nucleus import cap_nucleus
from teacher_logits.selection.partial_selection import merge_partials, select_partial
from teacher_logits.selection.sampling import sample_threshold, sample_with_replacement
from teacher_logits.selection_rules import Nucleus

if TYPE_CHECKING:
    from collections.abc import Callable

LOGITS = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
LEAST = torch.finfo(torch.float32).min


def best(logits: object = LOGITS, **given: object) -> Selection:
    return select_top_k(logits, **{"k": 2, **given})  # type: ignore[call-overload,no-any-return]


def part(logits: object = LOGITS, **given: object) -> object:
    return select_partial(logits, **{"k": 2, "first_id": 0, "vocab_size": 7, **given})  # type: ignore[arg-type]


def given_ids(logits: object = LOGITS, **given: object) -> object:
    ids = given.pop("ids", torch.zeros(3, 1).long())
    return score_given(logits, ids, **given)  # type: ignore[arg-type]


def sample(logits: object = LOGITS, **given: object) -> object:
    return sample_threshold(logits, **{"m": 2, "uniforms": torch.zeros(3), **given})  # type: ignore[arg-type]


def draws(logits: object = LOGITS, **given: object) -> object:
    return sample_with_replacement(logits, **{"uniforms": torch.zeros(3, 2), **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("select", [best, part, given_ids, sample, draws])
@pytest.mark.parametrize("logits", [None, [[1.0]], LOGITS.to_sparse(), LOGITS.numpy()])
def test_logits_that_are_no_plain_tensor(select: Callable[..., object], logits: object) -> None:
    with pytest.raises(PayloadInvalidError, match=r"logits are .*give a (torch|dense) tensor"):
        select(logits)


@pytest.mark.parametrize(
    ("select", "name"),
    [(best, "k"), (part, "k"), (sample, "m"), (best, "vocab_size"), (part, "first_id")],
)
@pytest.mark.parametrize("size", [2.0, "2", True])
def test_a_size_that_is_no_whole_number(
    select: Callable[..., object], name: str, size: object
) -> None:
    with pytest.raises(PayloadInvalidError, match=f"{name} is .*: give a whole number"):
        select(**{name: size})


@pytest.mark.parametrize("select", [best, part, given_ids])
@pytest.mark.parametrize("given", [2.0, "12", torch.ones(2), (1.0, "2"), (1.0, None), (True,)])
def test_temperatures_that_are_no_list_of_numbers(
    select: Callable[..., object], given: object
) -> None:
    with pytest.raises(PayloadInvalidError, match=r"temperatures are .*give a tuple of numbers"):
        select(temperatures=given)


@pytest.mark.parametrize("select", [best, part, given_ids])
@pytest.mark.parametrize("given", [1e-40, 1e40, math.nan, -math.inf, 10**400])
def test_a_temperature_at_which_fp32_says_nothing(
    select: Callable[..., object], given: float
) -> None:
    with pytest.raises(PayloadInvalidError, match=r"temperature 1 is .*from 1e-30 to 1e\+30"):
        select(temperatures=(1.0, given))


def test_a_vocabulary_that_is_larger_than_the_logits_names_the_ways_out() -> None:
    with pytest.raises(PayloadInvalidError, match="8 ids and the logits have fewer columns, 7: "):
        best(vocab_size=8)


@pytest.mark.parametrize("ids", [[[0]] * 3, torch.zeros(3, 1), torch.zeros(3, 1).bool()])
def test_chosen_ids_that_are_no_integers(ids: object) -> None:
    with pytest.raises(PayloadInvalidError, match="ids are "):
        given_ids(ids=ids)


@pytest.mark.parametrize("draw", [sample, draws])
@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
def test_uniforms_outside_0_to_1(draw: Callable[..., object], value: float) -> None:
    drawn = torch.zeros(3, 2) if draw is draws else torch.zeros(3)
    drawn[1] = value

    with pytest.raises(PayloadInvalidError, match=r"uniforms\[1.* is "):
        draw(uniforms=drawn)


@pytest.mark.parametrize("drawn", [torch.zeros(2, 2), torch.zeros(3), torch.zeros(3, 2).long()])
def test_uniforms_of_other_positions_or_axes(drawn: torch.Tensor) -> None:
    with pytest.raises(PayloadInvalidError, match="uniforms"):
        draws(uniforms=drawn)


@pytest.mark.parametrize("power", [math.nan, math.inf, "1"])
def test_a_power_that_is_no_number(power: object) -> None:
    with pytest.raises(PayloadInvalidError, match="the power is"):
        draws(power=power)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_draws_from_nothing(value: float) -> None:
    logits = LOGITS.clone()
    logits[1] = value

    with pytest.raises(PayloadInvalidError, match="position 1 has a NaN"):
        draws(logits)


def test_a_nucleus_that_is_a_bare_number() -> None:
    with pytest.raises(PayloadInvalidError, match=r"the nucleus is 0\.9: give Nucleus"):
        cap_nucleus(best(), 0.9)  # type: ignore[arg-type]


def test_a_nucleus_at_a_bare_temperature() -> None:
    with pytest.raises(PayloadInvalidError, match=r"temperatures are"):
        cap_nucleus(best(), Nucleus(mass=0.9), temperatures=1.0)  # type: ignore[arg-type]


def test_slices_that_are_selections() -> None:
    with pytest.raises(PayloadInvalidError, match="a slice is a Selection"):
        merge_partials([best()])  # type: ignore[list-item]


def test_slices_beside_other_next_ids() -> None:
    first = select_partial(
        LOGITS[:, :3], k=2, first_id=0, vocab_size=7, next_ids=torch.tensor([1, 2, 3])
    )
    second = select_partial(
        LOGITS[:, 3:], k=2, first_id=3, vocab_size=7, next_ids=torch.tensor([1, 4, 3])
    )

    with pytest.raises(PayloadInvalidError, match=r"next_ids\[1\] is 2 .* and 4 beside another"):
        merge_partials([first, second])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ids_that_a_model_masks_with_the_least_number_stay_entries(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, LEAST, 2.0, LEAST]])
    out = select_top_k(logits, k=4)
    out = Selection(**{**vars(out), "topk_logprobs": torch.empty(1, 4, dtype=dtype)})

    select_top_k(logits, k=4, out=out)

    assert out.status.tolist() == [RowStatus.OK]
    assert out.topk_ids.tolist() == [[2, 0, 1, 3]]
    assert out.topk_logprobs.isfinite().all()
