"""Targets made by hand that do not fit together, and labels that are none: named, with numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.client.losses.losses_by_definition import normal, targets_of

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.losses import forward_kl
from teacher_logits_client.rows.labels import labels_mask, next_token_labels, position_mask

WIDTH = 9


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": 0.0}, r"temperature is 0\.0; .* finite number above 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"topk_logprobs": torch.zeros(4, 2)}, r"topk_logprobs .* \(4, 2\) and topk_ids \(4, 3\)"),
        ({"topk_logprobs": torch.zeros(3, 3)}, r"topk_logprobs .* \(3, 3\) and topk_ids \(4, 3\)"),
        ({"log_tail": torch.zeros(3)}, r"log_tail .* \(3,\) and topk_ids \(4, 3\)"),
        ({"log_tail": torch.zeros(4, 1)}, r"log_tail .* \(4, 1\)"),
        ({"valid": torch.ones(5, dtype=torch.bool)}, r"valid .* \(5,\)"),
        ({"valid": torch.ones(4)}, "valid of the targets is a torch.float32; .* truth values"),
        ({"topk_ids": torch.zeros(4, 3)}, "topk_ids of the targets is a torch.float32"),
        ({"topk_ids": torch.zeros(12, dtype=torch.int64)}, r"topk_ids \(12,\)"),
        ({"topk_logprobs": [[0.0] * 3] * 4}, "topk_logprobs of the targets is a list"),
        ({"row_offsets": [0, 4]}, "row_offsets of the targets is a list"),
        ({"row_offsets": torch.zeros((), dtype=torch.int64)}, r"row_offsets .* shape \(\)"),
        ({"row_firsts": [0]}, "row_firsts of the targets is a list"),
        ({"row_firsts": torch.zeros(1)}, "row_firsts of the targets is a torch.float32"),
        ({"row_firsts": torch.zeros(2, dtype=torch.int64)}, r"shape \(2,\) and there are 1 rows"),
        ({"entropy": torch.zeros(3)}, r"entropy of the targets has shape \(3,\)"),
        ({"log_tail": torch.zeros(4, device="meta")}, "log_tail of the targets is on meta"),
        ({"log_tail": torch.ones(4).to_sparse()}, "log_tail of the targets is"),
        ({"topk_ids": torch.tensor([[1, 0, 1]] * 4)}, r"name an id twice at position 0 \(4 such"),
    ],
)
def test_targets_that_do_not_fit_together_are_refused_by_name(
    changes: dict[str, object], says: str
) -> None:
    targets = replace(targets_of(normal(4, WIDTH, seed=1), k=3), **changes)  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalidError, match=says):
        forward_kl(torch.zeros(4, WIDTH), targets)


@pytest.mark.parametrize("wrong", ["2", 0, math.nan])
def test_a_temperature_that_is_asked_for_is_one(wrong: float) -> None:
    with pytest.raises(PayloadInvalidError, match=r"temperature is .* finite number above 0"):
        forward_kl(
            torch.zeros(4, WIDTH), targets_of(normal(4, WIDTH, seed=1), k=3), temperature=wrong
        )


def test_targets_elsewhere_than_the_logits_are_refused() -> None:
    targets = targets_of(normal(4, WIDTH, seed=1), k=3)
    with pytest.raises(PayloadInvalidError, match=r"on cpu .* on meta; give targets\.to"):
        forward_kl(torch.zeros(4, WIDTH, device="meta"), targets)


@pytest.mark.parametrize("labels", [[[1, 2]], torch.ones(2), torch.tensor(1), None])
def test_a_mask_is_made_of_a_tensor_of_labels(labels: torch.Tensor) -> None:
    with pytest.raises(PayloadInvalidError, match=r"labels are a .*; give a tensor"):
        labels_mask(labels)


def test_packed_labels_are_made_of_tensors() -> None:
    ids, bounds = torch.tensor([5, 6, 7]), torch.tensor([0, 3])
    with pytest.raises(PayloadInvalidError, match="ids are a list"):
        next_token_labels([5, 6, 7], bounds)  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalidError, match="sequence bounds are a list"):
        next_token_labels(ids, [0, 3])  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalidError, match="token_mask has 2 numbers and there are 3 ids"):
        next_token_labels(ids, bounds, token_mask=torch.ones(2))
    with pytest.raises(PayloadInvalidError, match="token_mask is of shape or type list"):
        position_mask([1, 1, 0], bounds)  # type: ignore[arg-type]


def test_a_row_is_nowhere_in_front_of_its_logits() -> None:
    targets = replace(
        targets_of(normal(4, WIDTH, seed=1), k=3),
        row_offsets=torch.tensor([0, 1, 4]),
        row_firsts=torch.tensor([0, -2]),
    )
    with pytest.raises(PayloadInvalidError, match="row 1 of 2 has 3 positions from -2 on"):
        forward_kl(torch.zeros(2, 5, WIDTH), targets)


def test_an_id_may_stand_twice_where_nothing_counts() -> None:
    targets = targets_of(normal(4, WIDTH, seed=1), k=3)
    ids = targets.topk_ids.clone()
    ids[2] = 5
    mask = torch.tensor([True, True, False, True])

    loss, count = forward_kl(torch.zeros(4, WIDTH), replace(targets, topk_ids=ids), mask)

    assert (loss, count) == forward_kl(torch.zeros(4, WIDTH), targets, mask)
