"""What floats torch makes when it is not told has no say in what a teacher or a receiver computes.

Scripts set it, to bfloat16 for the models that they make, or to float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from teacher_logits.codec.value_codecs import decode_values, encode_values
from teacher_logits.encodings import Plane
from teacher_logits.selection import select_top_k
from teacher_logits.selection.given_ids import score_given
from teacher_logits.selection.nucleus import cap_nucleus
from teacher_logits.selection.partial_selection import select_partial
from teacher_logits.selection.sampling import sample_threshold, sample_with_replacement
from teacher_logits.selection_rules import Nucleus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TEMPERATURES = (1.0, 0.7)
LOGITS = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(15).view(5, 3)
UNIFORMS = torch.rand(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NEXT = torch.arange(5)


def coded() -> dict[str, torch.Tensor]:
    values = select_top_k(LOGITS, k=4).topk_logprobs
    values[0, 3] = -torch.inf
    scale = torch.empty(5, 8, dtype=torch.uint8)
    codes, back = torch.empty(5, 4, dtype=torch.uint8), torch.empty(5, 4, dtype=torch.float32)
    encode_values(Plane.SCALE, values, scale)
    encode_values(Plane.CODES, values, codes)
    decode_values(Plane.CODES, codes, back, head=scale)
    return {"scale": scale, "codes": codes, "back": back}


MAKERS: dict[str, Callable[[], object]] = {
    "top-k": lambda: select_top_k(LOGITS, k=4, temperatures=TEMPERATURES, next_ids=NEXT),
    "of parts": lambda: select_partial(
        LOGITS, k=4, first_id=0, vocab_size=40, temperatures=TEMPERATURES, next_ids=NEXT
    ).finish(),
    "given": lambda: score_given(LOGITS, IDS, temperatures=TEMPERATURES, next_ids=NEXT),
    "nucleus": lambda: cap_nucleus(
        select_top_k(LOGITS, k=4, temperatures=TEMPERATURES),
        Nucleus(mass=0.5),
        temperatures=TEMPERATURES,
    ),
    "threshold": lambda: sample_threshold(LOGITS, m=4, uniforms=UNIFORMS[:, 0]),
    "replaced": lambda: sample_with_replacement(LOGITS, uniforms=UNIFORMS),
    "coded": coded,
}


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def unusual(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", list(MAKERS))
def test_the_default_dtype_changes_no_bit(name: str, unusual: torch.dtype) -> None:
    wanted = tensors_of(MAKERS[name]())
    torch.set_default_dtype(unusual)

    found = tensors_of(MAKERS[name]())

    assert wanted.keys() == found.keys()
    for column, each in wanted.items():
        assert found[column].dtype == each.dtype, column
        assert torch.equal(found[column], each), column


def tensors_of(made: object) -> dict[str, torch.Tensor]:
    if isinstance(made, tuple):
        made = dict(enumerate(made))
    fields = made if isinstance(made, dict) else vars(made)
    return {str(name): each for name, each in fields.items() if isinstance(each, torch.Tensor)}
