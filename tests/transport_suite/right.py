"""The right answers to what the dense teacher is asked, and holding a payload against them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE, head_logits

from teacher_logits.layout import ElementType
from teacher_logits_client import LeasedPayload

RAGGED = ([3, 1, 4, 1, 5, 9, 2, 6], [1499], [0, 1498, 77])
#: Steps of a type's last digit, relative and at zero.
PRECISION = {
    ElementType.FLOAT16: (2**-11, 2**-25),
    ElementType.BFLOAT16: (2**-8, 0.0),
    ElementType.FLOAT32: (2**-18, 1e-5),
}
FP32 = PRECISION[ElementType.FLOAT32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What is right for the positions of one row, in fp64; K entries in the agreed order."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    log_tail: torch.Tensor
    logsumexp: torch.Tensor
    actual_logprob: torch.Tensor


def answer(
    row: Sequence[int], *, top_k: int, temperatures: Sequence[float], vocabulary_size: int
) -> Answer:
    """Work out the answer for a row, over the whole vocabulary."""
    logits = head_logits(row)[:, :vocabulary_size].double()
    logprobs = logits.log_softmax(1)
    ranked, order = logits.sort(dim=1, descending=True, stable=True)
    ids = order[:, :top_k]
    following = torch.tensor([*row[1:], 0]).unsqueeze(1)
    actual = logprobs.gather(1, following).squeeze(1)
    actual[-1] = 0.0
    scaled = [ranked / temperature for temperature in temperatures]
    normalisers = torch.stack([each.logsumexp(1) for each in scaled], 1)
    tails = torch.stack([each[:, top_k:].logsumexp(1) for each in scaled], 1)
    return Answer(
        ids=ids,
        logprobs=logprobs.gather(1, ids),
        log_tail=tails - normalisers,
        logsumexp=normalisers,
        actual_logprob=actual,
    )


def assert_right(
    leased: LeasedPayload,
    rows: Sequence[Sequence[int]],
    *,
    windows: Sequence[tuple[int, int]] | None = None,
    vocabulary_size: int = VOCABULARY_SIZE,
) -> None:
    """Every column says what a dense teacher says."""
    payload = leased.payload
    value_type = payload.columns[1].element_type
    starts = leased.row_offsets.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        right = answer(
            rows[row],
            top_k=payload.top_k,
            temperatures=payload.temperatures,
            vocabulary_size=vocabulary_size,
        )
        first, count = windows[row] if windows else (0, len(rows[row]))
        assert end - start == count
        got = {name: tensor[start:end] for name, tensor in leased.columns.items()}
        assert_row(got, right, slice(first, first + count), value_type)


def assert_row(
    got: dict[str, torch.Tensor], right: Answer, part: slice, value_type: ElementType
) -> None:
    assert torch.equal(got["topk_ids"].long(), right.ids[part])
    assert_near(got["topk_logprobs"], right.logprobs[part], PRECISION[value_type])
    assert_near(got["log_tail"], right.log_tail[part], FP32)
    assert_near(got["logsumexp"], right.logsumexp[part], FP32)
    assert_near(got["actual_logprob"], right.actual_logprob[part], FP32)


def assert_near(got: torch.Tensor, right: torch.Tensor, precision: tuple[float, float]) -> None:
    relative, absolute = precision
    torch.testing.assert_close(got.double(), right, rtol=relative, atol=absolute)
