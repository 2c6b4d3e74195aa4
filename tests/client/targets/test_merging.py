"""Targets of several teachers as those of one batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets
from teacher_logits_client.targets.merging import Part, merge_targets, nothing_known


def some(counts: list[int], k: int, *, start: int = 0) -> Targets:
    """Targets that are all different; entries count up from ``start``."""
    size = sum(counts)
    ids = torch.arange(start, start + size * k, dtype=torch.int32).view(size, k)
    return Targets(
        topk_ids=ids,
        topk_logprobs=-1.0 - ids.float() / 7,
        log_tail=-2.0 - ids[:, 0].float(),
        actual_logprob=-3.0 - ids[:, 0].float(),
        valid=ids[:, 0] % 3 > 0,
        temperature=1.0,
        row_offsets=torch.tensor([0, *counts]).cumsum(0),
    )


@given(st.data())
def test_every_row_says_in_its_place_what_its_own_part_said(data: st.DataObject) -> None:
    teachers = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    counts = [data.draw(st.integers(0, 4)) for _ in teachers]
    ks = [data.draw(st.integers(1, 3)) for _ in range(3)]
    parts = []
    for teacher in data.draw(st.permutations(sorted({*teachers}))):
        rows = [row for row, own in enumerate(teachers) if own == teacher]
        own = some([counts[row] for row in rows], ks[teacher], start=1000 * teacher)
        parts.append(Part(targets=own, rows=rows))

    merged = merge_targets(parts)

    assert merged.row_offsets.diff().tolist() == counts
    for part in parts:
        k = part.targets.topk_ids.shape[1]
        for at, row in enumerate(part.rows):
            here = slice(*merged.row_offsets[row : row + 2].tolist())
            there = slice(*part.targets.row_offsets[at : at + 2].tolist())
            for name in ("log_tail", "actual_logprob", "valid"):
                assert torch.equal(getattr(merged, name)[here], getattr(part.targets, name)[there])
            assert torch.equal(merged.topk_ids[here, :k], part.targets.topk_ids[there])
            assert torch.equal(merged.topk_logprobs[here, :k], part.targets.topk_logprobs[there])
            assert (merged.topk_ids[here, k:] == -1).all()
            assert (merged.topk_logprobs[here, k:] == ABSENT_LOGPROB).all()


def test_rows_start_where_they_started() -> None:
    first = replace(some([2], 1), row_firsts=torch.tensor([5]))

    merged = merge_targets([Part(targets=first, rows=[1]), Part(targets=some([1], 1), rows=[0])])

    assert merged.row_firsts is not None
    assert merged.row_firsts.tolist() == [0, 5]


def test_what_one_part_lacks_nobody_has() -> None:
    first = replace(some([2], 1), actual_logprob=None)

    merged = merge_targets([Part(targets=first, rows=[1]), Part(targets=some([1], 1), rows=[0])])

    assert merged.actual_logprob is None


def test_of_rows_that_nobody_knows_nothing_is_learned() -> None:
    known = some([2], 2)

    unknown = nothing_known(torch.tensor([[0, 3], [4, 1]]), known)

    assert unknown.row_offsets.tolist() == [0, 3, 4]
    assert not unknown.valid.any()
    assert not unknown.present.any()
    mass = unknown.topk_logprobs.exp().sum(1) + unknown.log_tail.exp()
    assert mass.tolist() == [1.0] * 4


@pytest.mark.parametrize("other", [{"temperature": 2.0}, {"sampled": True}])
def test_of_several_kinds_are_refused(other: dict[str, object]) -> None:
    odd = replace(some([1], 1), **other)  # type: ignore[arg-type]

    with pytest.raises(PayloadInvalidError, match="several kinds"):
        merge_targets([Part(targets=some([1], 1), rows=[0]), Part(targets=odd, rows=[1])])
