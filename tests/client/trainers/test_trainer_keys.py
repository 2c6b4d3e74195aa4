"""Batches in the keys of NeMo RL and verl that are not what they should be: told by the key."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.losses.losses_by_definition import normal, targets_of

from teacher_logits.errors import PayloadInvalidError, TeacherLogitsError
from teacher_logits_client.losses import forward_kl
from teacher_logits_client.trainers import nemo_rl, verl

N, S, K, V = 2, 5, 3, 12
TARGETS = replace(targets_of(normal(8, V, seed=1), k=K), row_offsets=torch.tensor([0, 5, 8]))
LENGTHS = torch.tensor([5, 3])


def of_nemo_rl() -> dict[str, object]:
    ids = torch.arange(N * S * K).view(N, S, K) % V
    return {
        "input_lengths": LENGTHS,
        "token_mask": torch.ones(N, S),
        "sample_mask": torch.ones(N),
        "teacher_topk_logits": normal(N, S, K, seed=2),
        "teacher_topk_indices": ids,
        "teacher_log_tail": torch.full((N, S), -3.0),
    }


def of_verl() -> dict[str, object]:
    made: dict[str, object] = {
        "teacher_ids": torch.arange(N * S * K).view(N, S, K) % V,
        "teacher_logprobs": normal(N, S, K, seed=2).log_softmax(-1) - 0.1,
        "teacher_log_tail": torch.full((N, S), -3.0),
        "response_mask": torch.ones(N, 2),
        "attention_mask": torch.ones(N, S),
    }
    return made


def learn_nemo_rl(batch: dict[str, object]) -> None:
    mask = nemo_rl.position_mask(batch)
    forward_kl(torch.zeros(N, S, V), nemo_rl.to_targets(batch), mask)
    nemo_rl.context_parallel_part(batch, size=1, rank=0)


def learn_verl(batch: dict[str, object]) -> None:
    attention = batch["attention_mask"]
    targets = verl.to_targets(batch, attention_mask=attention)  # type: ignore[arg-type]
    mask = verl.position_mask(batch, torch.tensor([S, S]))
    forward_kl(torch.zeros(N * S, V), targets, mask)


def wrong_things() -> st.SearchStrategy[object]:
    sizes = st.lists(st.integers(0, 6), max_size=4)
    kinds = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64])
    tensors = st.builds(lambda size, kind: torch.ones(size, dtype=kind), sizes, kinds)
    jagged = torch.nested.as_nested_tensor(
        [torch.ones(2, K), torch.ones(3, K)], layout=torch.jagged
    )
    others = [None, 1, "x", [1, 2], torch.ones(N, S).to_sparse(), jagged]
    return st.one_of(tensors, st.sampled_from(others))


@pytest.mark.parametrize(("make", "learn"), [(of_nemo_rl, learn_nemo_rl), (of_verl, learn_verl)])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_a_key_has_it_is_learnt_from_or_refused(make, learn, data) -> None:  # type: ignore[no-untyped-def]
    """Never by what torch has to say of shapes."""
    batch = make()
    batch["teacher_logprobs" if "teacher_ids" in batch else "teacher_topk_logits"] = torch.full(
        (N, S, K), -1.5
    )
    name = data.draw(st.sampled_from(sorted(batch)))
    batch[name] = data.draw(wrong_things())

    with suppress(TeacherLogitsError):
        learn(batch)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("sample_mask", torch.ones(3), r"sample_mask is a tensor of .* shape \(3,\): .* \[2\]"),
        ("token_mask", torch.ones(N), r"token_mask is .*\[any, any\]"),
        ("input_lengths", torch.tensor([5.0, 3.0]), "input_lengths is .* array of whole numbers"),
        ("teacher_topk_indices", torch.zeros(N, S, K), "teacher_topk_indices is .* whole numbers"),
        ("teacher_topk_logits", torch.zeros(N, S, K, dtype=torch.int64), "array of floats"),
    ],
)
def test_keys_of_nemo_rl_are_told_by_name(name: str, given: torch.Tensor, says: str) -> None:
    with pytest.raises(PayloadInvalidError, match=says):
        learn_nemo_rl({**of_nemo_rl(), name: given})


def test_weights_of_samples_are_kept_where_the_tokens_have_truth_values() -> None:
    batch = {
        "token_mask": torch.ones(N, S, dtype=torch.int64),
        "sample_mask": torch.tensor([0.5, 2]),
    }

    assert nemo_rl.position_mask(batch).sum(1).tolist() == [2.0, 8.0]


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([5, 3], "lengths is a list"),
        (torch.tensor([5, 3, 1]), r"lengths is .* of shape \[2\]"),
        (torch.tensor([5.0, 3.0]), "array of whole numbers"),
        (torch.tensor([5, 0]), "row 1 has a length of 0"),
        (torch.tensor([5, 2]), "row 1 has positions up to 3 and a length of 2"),
    ],
)
def test_lengths_of_verl_are_those_of_the_rows(lengths: torch.Tensor, says: str) -> None:
    """The last of them was cut, and a position of the teacher's lost."""
    with pytest.raises(PayloadInvalidError, match=says):
        verl.to_batch(TARGETS, lengths)


def test_no_rows_are_a_batch_of_none() -> None:
    none = replace(targets_of(normal(0, V, seed=1), k=K), row_offsets=torch.tensor([0]))

    with pytest.raises(PayloadInvalidError, match="no rows"):
        verl.to_batch(none, torch.zeros(0, dtype=torch.int64))
