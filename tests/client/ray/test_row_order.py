"""Row order and bins: rules that hold for every batch, whatever NeMo RL's cases hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import GridMismatchError
from teacher_logits.layout import round_up
from teacher_logits_client.ray.bins import pack_rows
from teacher_logits_client.ray.row_orders import (
    DynamicBatching,
    RowOrder,
    SequencePacking,
    row_order,
)

sizes = st.lists(st.integers(1, 64), min_size=1, max_size=40)


@given(sizes, st.integers(64, 200), st.integers(1, 4))
def test_bins_hold_every_row_once_and_no_more_than_fits(
    tokens: list[int], capacity: int, multiple: int
) -> None:
    if len(tokens) < multiple:
        tokens = tokens * multiple
    fewest = len(pack_rows(tokens, capacity=capacity))
    if round_up(fewest, multiple) > len(tokens):
        with pytest.raises(GridMismatchError, match="too_few_rows"):
            pack_rows(tokens, capacity=capacity, multiple_of=multiple)
        return
    bins = pack_rows(tokens, capacity=capacity, multiple_of=multiple)
    assert sorted(row for each in bins for row in each) == list(range(len(tokens)))
    assert all(0 < sum(tokens[row] for row in each) <= capacity for each in bins)
    assert len(bins) % multiple == 0


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.data())
def test_the_ranks_rows_tile_the_batch_once(
    ranks: int, part: int, chunks: int, data: st.DataObject
) -> None:
    size = ranks * part
    count = size * chunks
    lengths = data.draw(st.lists(st.integers(1, 64), min_size=count, max_size=count))
    batching = data.draw(
        st.sampled_from(
            [
                None,
                SequencePacking(max_tokens_per_micro_batch=64, pad_multiple=8),
                DynamicBatching(max_tokens_per_micro_batch=128, length_round=8),
            ]
        )
    )
    order = row_order(
        row_count=count, ranks=ranks, batch_size=size, lengths=lengths, batching=batching
    )

    assert sorted(row for rows in order.rows for row in rows) == list(range(count))
    for chunk in range(chunks):
        whole = range(chunk * size, (chunk + 1) * size)
        held = [sum(row in whole for row in rows) for rows in order.rows]
        assert sum(held) == size
        assert isinstance(batching, SequencePacking) or set(held) == {part}
    if order.micro_batches is not None:
        check_micro_batches(order, lengths, batching)


def check_micro_batches(
    order: RowOrder, lengths: list[int], batching: SequencePacking | DynamicBatching | None
) -> None:
    assert order.micro_batches is not None
    for rows, parts in zip(order.rows, order.micro_batches, strict=True):
        batches = [batch for part in parts for batch in part]
        assert tuple(row for batch in batches for row in batch.rows) == rows
        for batch in batches:
            padded = [round_up(lengths[row], 8) for row in batch.rows]
            if isinstance(batching, SequencePacking):
                assert batch.tokens == sum(padded) <= batching.max_tokens_per_micro_batch
            elif isinstance(batching, DynamicBatching):
                assert batch.tokens >= max(padded)
                fits = batch.tokens * len(padded) <= batching.max_tokens_per_micro_batch
                assert fits or len(padded) == 1
    counts = {tuple(map(len, parts)) for parts in order.micro_batches}
    assert len(counts) == 1  # or the ranks' collectives would wait for one another for ever


@pytest.mark.parametrize(
    ("given_", "rule"),
    [
        ({"row_count": 8, "ranks": 0}, "not_positive"),
        ({"row_count": 8, "ranks": 2, "batch_size": 0}, "not_positive"),
        ({"row_count": 8, "ranks": 3}, "batch_not_multiple_of_shards"),
        ({"row_count": 9, "ranks": 2, "batch_size": 4}, "total_not_multiple_of_batch"),
        (
            {"row_count": 2, "ranks": 1, "batching": SequencePacking(max_tokens_per_micro_batch=8)},
            "lengths_missing",
        ),
        (
            {
                "row_count": 2,
                "ranks": 1,
                "lengths": [9, 1],
                "batching": SequencePacking(max_tokens_per_micro_batch=8),
            },
            "row_too_long",
        ),
        (
            {
                "row_count": 2,
                "ranks": 1,
                "lengths": [2, 1],
                "batching": SequencePacking(max_tokens_per_micro_batch=8, algorithm="mine"),
            },
            "algorithm_unknown",
        ),
        (
            {
                "row_count": 3,
                "ranks": 1,
                "lengths": [2, 0, 1],
                "batching": DynamicBatching(max_tokens_per_micro_batch=8),
            },
            "not_positive",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(given_: dict[str, object], rule: str) -> None:
    with pytest.raises(GridMismatchError) as refusal:
        row_order(**given_)  # type: ignore[arg-type]

    assert refusal.value.violations[0].rule == rule


def test_two_ranks_need_two_rows_to_pack() -> None:
    with pytest.raises(GridMismatchError) as refusal:
        pack_rows([8, 8, 8], capacity=8, multiple_of=2)

    assert refusal.value.violations[0].rule == "too_few_rows"
    assert refusal.value.facts == {"rows": 3, "bins": 4}
