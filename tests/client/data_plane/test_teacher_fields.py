"""Targets of ours in the fields of a store: where each position stands, and what has no entry."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import teacher_logits_client as tl
from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.data_plane.fields import ABSENT_ID, TopKForm
from teacher_logits_client.data_plane.padded import pad_jagged
from teacher_logits_client.data_plane.teacher_fields import teacher_fields
from teacher_logits_client.targets import ABSENT_LOGPROB
from teacher_logits_client.trainers import nemo_rl
from teacher_logits_client.trainers.nemo_rl import INDICES, LOGITS, TAIL

K, V = 3, 16
FORM = TopKForm(k=K)


def some_targets(counts: list[int], firsts: list[int] | None = None) -> tl.Targets:
    """Of rows of ``counts`` positions; the last of each is not valid."""
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    kept = tl.select_top_k(torch.randn(sum(counts), V), k=K)
    valid = torch.ones(sum(counts), dtype=torch.bool)
    valid[offsets[1:][torch.tensor(counts) > 0] - 1] = False
    return tl.Targets(
        topk_ids=kept.topk_ids,
        topk_logprobs=kept.topk_logprobs.float(),
        log_tail=kept.log_tail[:, 0],
        actual_logprob=None,
        valid=valid,
        temperature=1.0,
        row_offsets=offsets,
        row_firsts=None if firsts is None else torch.tensor(firsts),
    )


def test_a_row_of_l_tokens_has_l_entries() -> None:
    targets = some_targets([4, 2])

    fields = teacher_fields(targets, [4, 2], FORM)

    assert list(fields) == list(FORM.names)
    assert [tuple(row.shape) for row in fields[LOGITS].unbind()] == [(4, K), (2, K)]
    assert torch.equal(fields[LOGITS].values(), targets.topk_logprobs)
    assert torch.equal(fields[INDICES].values(), targets.topk_ids.long())
    assert torch.equal(fields[TAIL].values(), targets.log_tail)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5
    )
)
def test_every_position_stands_at_its_token(rows: list[tuple[int, int, int]]) -> None:
    """Rows of so many tokens before the first position, positions, and tokens behind the last."""
    firsts, counts, _ = (list(each) for each in zip(*rows, strict=True))
    targets = some_targets(counts, firsts)

    fields = teacher_fields(targets, [sum(row) for row in rows], FORM)

    each = zip(
        fields[INDICES].unbind(),
        fields[TAIL].unbind(),
        targets.topk_ids.split(counts),
        targets.log_tail.split(counts),
        strict=True,
    )
    for (first, count, _), (ids, tail, own_ids, own_tail) in zip(rows, each, strict=True):
        there = slice(first, first + count)
        assert torch.equal(ids[there], own_ids.long())
        assert torch.equal(tail[there], own_tail)
        assert int((ids[:, 0] == ABSENT_ID).sum()) == len(ids) - count


def test_positions_that_were_not_asked_for_have_no_entry() -> None:
    targets = some_targets([2, 0, 1], firsts=[1, 0, 0])

    padded = pad_jagged(teacher_fields(targets, [4, 0, 3], FORM))

    there = padded.fields[INDICES][..., 0] != ABSENT_ID
    assert there.tolist() == [
        [False, True, True, False],
        [False] * 4,
        [True, False, False, False],
    ]
    assert torch.equal(padded.fields[LOGITS][there], targets.topk_logprobs)
    assert (padded.fields[LOGITS][~there] == ABSENT_LOGPROB).all()
    assert (padded.fields[TAIL][~there] == 0).all()


def test_a_position_that_the_teacher_could_not_score_has_no_entry_either() -> None:
    targets = some_targets([3])
    targets.topk_ids[1], targets.valid[1] = -1, False

    fields = teacher_fields(targets, [3], FORM)

    assert (fields[INDICES].values()[1] == ABSENT_ID).all()
    assert (fields[LOGITS].values()[1] == ABSENT_LOGPROB).all()


def test_the_form_says_the_element_types_and_whether_there_is_a_tail() -> None:
    form = TopKForm(k=K, value_type=torch.bfloat16, index_type=torch.int32, with_tail=False)

    fields = teacher_fields(some_targets([3]), [3], form)

    assert {name: each.dtype for name, each in fields.items()} == {
        LOGITS: torch.bfloat16,
        INDICES: torch.int32,
    }
    assert {spec.name: spec.element_type for spec in form.specs} == {
        name: each.dtype for name, each in fields.items()
    }


def test_a_loss_over_the_fields_is_that_over_the_targets() -> None:
    targets = some_targets([4, 2])
    logits = torch.randn(6, V)
    direct, count = tl.losses.forward_kl(logits, targets)

    padded = pad_jagged(teacher_fields(targets, [4, 2], FORM))
    batch = {
        **padded.fields,
        "input_ids": torch.zeros(2, 4, dtype=torch.int64),
        "input_lengths": padded.lengths,
        "token_mask": padded.mask.float(),
        "sample_mask": torch.ones(2),
    }
    spread = torch.zeros(2, 4, V)
    spread[padded.mask] = logits
    found, same = tl.losses.forward_kl(
        spread, nemo_rl.to_targets(batch), nemo_rl.position_mask(batch)
    )

    assert int(count) == int(same) == 4
    assert torch.allclose(found, direct, rtol=1e-6)


def with_raw(targets: tl.Targets, logits: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(columns={"topk_logits": logits}, targets_at=lambda _: targets)


def test_raw_logits_of_a_payload_that_has_them() -> None:
    targets, logits = some_targets([3]), torch.randn(3, K)
    form = TopKForm(k=K, raw_logits=True, with_tail=False)

    fields = teacher_fields(with_raw(targets, logits), [3], form)

    assert list(fields) == [LOGITS, INDICES]
    assert torch.equal(fields[LOGITS].values(), logits)
    with pytest.raises(PayloadInvalidError, match=r"raw logits are wanted"):
        teacher_fields(targets, [3], form)


@pytest.mark.parametrize(
    ("targets", "lengths", "told"),
    [
        (some_targets([3, 2]), [3], r"2 rows of 3 entries a position, and 1 lengths"),
        (some_targets([3, 2]), [3, 1], r"row 1 has 2 positions from 0 on, and a length of 1"),
        (some_targets([2], firsts=[2]), [3], r"row 0 has 2 positions from 2 on, and a length of 3"),
        (replace(some_targets([2]), sampled=True), [2], r"the targets are a sample"),
        (
            replace(some_targets([2]), topk_ids=torch.tensor([[1, 2, -1], [1, 2, 3]])),
            [2],
            r"position 0 has fewer than K = 3 entries",
        ),
    ],
)
def test_what_would_be_another_rows_or_half_a_distribution_is_refused(
    targets: tl.Targets, lengths: list[int], told: str
) -> None:
    with pytest.raises(PayloadInvalidError, match=told):
        teacher_fields(targets, lengths, FORM)


def test_another_k_than_the_form_is_refused() -> None:
    with pytest.raises(PayloadInvalidError, match=r"a form of k=4"):
        teacher_fields(some_targets([2]), [2], TopKForm(k=4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0},
        {"k": True},
        {"k": 1, "value_type": torch.int64},
        {"k": 1, "index_type": torch.int16},
        {"k": 1, "raw_logits": True},
    ],
)
def test_a_form_that_there_is_not_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PayloadInvalidError):
        TopKForm(**wrong)  # type: ignore[arg-type]


def test_train_fields_get_the_teachers_once() -> None:
    fields = FORM.train_fields(("input_ids", LOGITS))

    assert fields == ("input_ids", LOGITS, INDICES, TAIL)
