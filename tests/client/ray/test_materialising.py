"""The materialised way: whatever the teacher's cut and order, a student's is its own."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.layout import ElementType
from teacher_logits_client.ray.descriptions import (
    PayloadDescription,
    RowTokens,
    lay_out_columns,
)
from teacher_logits_client.ray.flat import FlatPayload, column_views
from teacher_logits_client.ray.materialising import Gathered

K = 2
SPECS = [("topk_logits", ElementType.BFLOAT16), ("topk_indices", ElementType.INT32)]


def payload(rank: int, rows: tuple[int, ...], length: int, *, lengths: bool = True) -> FlatPayload:
    """Row r says r at each of its positions; its digest is one of r."""
    columns = lay_out_columns((name, kind, (len(rows), length, K)) for name, kind in SPECS)
    told = RowTokens(
        digests=tuple(bytes([row]) for row in rows), lengths=(1,) * len(rows) if lengths else None
    )
    described = PayloadDescription(
        step=1, data_parallel_rank=rank, rows=rows, columns=columns,
        id_range=(min(rows), max(rows)), tokens=told,
    )  # fmt: skip
    flat = FlatPayload(
        description=described, buffer=np.full(described.size_bytes, 255, dtype=np.uint8)
    )
    for view in column_views(flat.buffer, columns).values():
        view.copy_(torch.tensor(rows).view(-1, 1, 1).expand(view.shape))
    return flat


def cut(flats: list[FlatPayload], rows: tuple[int, ...], length: int) -> FlatPayload:
    specs = [(name, kind, (length, K)) for name, kind in SPECS]
    return Gathered(flats).cut(rows, specs, step=1, rank=0)


@given(st.permutations(range(12)), st.permutations(range(12)), st.sampled_from([1, 2, 3, 4, 6]))
def test_rows_of_any_order_come_in_any_other(
    theirs: list[int], mine: list[int], ranks: int
) -> None:
    part = 12 // ranks
    flats = [
        payload(rank, tuple(theirs[rank * part : (rank + 1) * part]), 3) for rank in range(ranks)
    ]
    for start in range(0, 12, 4):
        rows = tuple(mine[start : start + 4])
        flat = cut(flats, rows, 3)
        for view in flat.views().values():
            assert view.shape == (4, 3, K)
            assert torch.equal(view, torch.tensor(rows).view(-1, 1, 1).expand(4, 3, K).to(view))
        assert flat.description.rows == rows
        assert flat.description.tokens is not None
        assert flat.description.tokens.digests == tuple(bytes([row]) for row in rows)
        assert flat.description.id_range is not None
        assert flat.description.id_range[1] >= max(rows)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_positions_behind_a_payload_are_zeros(first: int, second: int, length: int) -> None:
    flats = [payload(0, (1,), first), payload(1, (2,), second)]

    for view in cut(flats, (2, 1), length).views().values():
        for row, (value, has) in enumerate([(2, second), (1, first)]):
            assert (view[row, :has] == value).all()
            assert not view[row, has:].any()


def test_digests_of_all_positions_are_those_of_no_other_length() -> None:
    flats = [payload(0, (1,), 3, lengths=False)]

    assert cut(flats, (1,), 3).description.tokens is not None
    assert cut(flats, (1,), 4).description.tokens is None
